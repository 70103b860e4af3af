"""The units of `make evidence`: each can be run as declared, and what docs/results says of them is in their files."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from tamis.experiments import read_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
PAGE = ROOT / "docs" / "results" / "embedded-corpus.md"


@pytest.fixture(scope="module")
def evidence():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("evidence")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_units_can_be_read_and_end_within_forty_minutes(evidence):
    units = evidence.units()
    assert len({unit.name for unit in units}) == len(units)
    assert all(unit.minutes <= 40 for unit in units)
    for unit in units:
        recipe = read_recipe(ROOT / unit.recipe, unit.overrides, unit.arms)
        assert recipe.training.seed == unit.seed


def test_a_result_stands_for_its_recipe_until_code_changes_what_runs_give(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    unit = evidence.units()[0]
    assert not unit.is_done()
    evidence.save(unit.result, {"version": "0.1.0", **unit.asked()})
    assert unit.is_done()
    assert not dataclasses.replace(unit, changes={**unit.changes, "training.lr": 1e-3}).is_done()
    monkeypatch.setattr(evidence, "SINCE", "0.1.1")
    assert not unit.is_done()
    assert "take" in evidence.estimate([unit], 2)


def test_what_was_run_is_a_unit_and_small(evidence):
    known = {unit.result.name: unit for unit in evidence.units()}
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert {key: found[key] for key in ("arms", "changes", "seed")} == {
            key: known[path.name].asked()[key] for key in ("arms", "changes", "seed")
        }
        assert {"machine", "version", "recipe"} <= found.keys()
        assert path.stat().st_size < 300_000


def test_few_of_many_are_evenly_spaced_and_small_numbers_keep_their_digits(evidence):
    assert evidence.some(list(range(5))) == list(range(5))
    assert evidence.some(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert evidence.rounded({"a": [1.23456789, 0.000123456789, 7]}) == {"a": [1.2346, 0.0001235, 7]}
    assert evidence.spread([1.0]) == "1.00"
    assert evidence.spread([1.0, 3.0]) == "2.00 +-1.41"


def test_tables_have_what_the_files_have():
    """A row that names a file begins with its BLEU, its best AER, its density and its validation loss."""
    rows = re.findall(
        r"^\| \[[^]]*\]\(\S*/results/evidence/(\S+?\.json)\) \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE
    )
    assert len(rows) >= 5
    for name, cells in rows:
        found = json.loads((RESULTS / name).read_text())
        *_, loss = found["valid"].values()
        expected = [
            f"{found['bleu']:.1f}",
            f"{100 * found['alignment']['best']['aer']:.1f}",
            f"{found['valid_density']:.2f}",
            f"{loss:.3f}",
        ]
        assert cells.split(" | ")[:4] == expected, name
