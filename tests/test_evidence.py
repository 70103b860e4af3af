"""The units of `make evidence`: each can be run as declared, and what docs/results says of them is in their files."""

import dataclasses
import importlib
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

from tamis.experiments import read_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
PAGE = ROOT / "docs" / "results" / "embedded-corpus.md"
LENGTHS = ROOT / "docs" / "results" / "reverse-and-sort.md"


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


def tables(page):
    """The tables of a page, each as rows of cells."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", page.read_text(), flags=re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks]


def runs(cell):
    """What the result files hold that a cell links to: one seed, or several of one variant."""
    names = re.findall(r"\(\S*/results/evidence/(\S+?\.json)\)", cell)
    found = [json.loads((RESULTS / name).read_text()) for name in names]
    assert len({(run["benchmark"], run["variant"]) for run in found}) <= 1, cell
    assert len({run["seed"] for run in found}) == len(found), cell
    return found


def told(values, digits):
    """One seed's figure, or mean and standard deviation of several."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} +-{statistics.stdev(values):.{digits}f}"


KINDS = ("encoder", "decoder", "cross")


def alphas(found):
    ends = []
    for kind in KINDS:
        of_kind = [
            alpha
            for run in found
            for name, values in run.get("alphas", {}).items()
            if run["sites"][name]["kind"] == kind
            for alpha in values
        ]
        ends += [f"{min(of_kind):.2f} to {max(of_kind):.2f}"] if of_kind else []
    return ", ".join(ends)


COLUMNS = {
    "BLEU": lambda found: told([run["bleu"] for run in found], 1),
    "AER %": lambda found: told([100 * run["alignment"]["best"]["aer"] for run in found], 1),
    "density": lambda found: told([run["valid_density"] for run in found], 2),
    "validation loss": lambda found: told([list(run["valid"].values())[-1] for run in found], 3),
    "alphas: encoder, decoder, cross": alphas,
    "diversity: encoder, decoder, cross": lambda found: ", ".join(
        told([run["summary"][kind]["diversity"] for run in found], 3) for kind in KINDS
    ),
}


def test_tables_have_what_the_files_have():
    """A row whose first cell links to files has their figures in the columns that are known."""
    rows = 0
    for header, _, *body in tables(PAGE):
        for first, *cells in body:
            if found := runs(first):
                rows += 1
                named = {name: cell for name, cell in zip(header[1:], cells, strict=True) if name in COLUMNS}
                assert len(named) >= 4
                assert named == {name: COLUMNS[name](found) for name in named}, first
    assert rows >= 5


def test_alignment_by_layer_is_what_the_files_have():
    """In the table whose columns are runs: the mean over seeds of each layer, and its spread."""
    [(header, _, *body)] = [table for table in tables(PAGE) if any(map(runs, table[0]))]
    for (what, *cells), mode in zip(body, ["normal"] * 3 + ["shifted"] * 3, strict=True):
        for cell, found in zip(cells, map(runs, header[1:]), strict=True):
            aer = {
                "best head": lambda layer: min(layer["heads"]),
                "average": lambda layer: layer["average"],
                "normalised": lambda layer: layer["normalised"],
            }[what.removeprefix(f"{mode}, ")]
            by_layer = zip(*([100 * aer(layer) for layer in run["alignment"][mode]] for run in found), strict=True)
            assert cell == ", ".join(told(list(values), 1) for values in by_layer), what


def test_exact_match_is_what_the_files_have():
    """A row of a generated task: exact match in percent at each length, mean, spread and each seed."""
    rows = 0
    for header, _, *body in tables(LENGTHS):
        for first, *cells in body:
            if found := runs(first):
                rows += 1
                at = {f"{score['multiple']:g}x": place for place, score in enumerate(found[0]["scores"])}
                for name, cell in zip(header[1:], cells, strict=True):
                    exact = [100 * run["scores"][at[name]]["exact_match"] for run in found]
                    each = f" ({', '.join(f'{value:.1f}' for value in exact)})" if len(exact) > 1 else ""
                    assert cell == told(exact, 1) + each, (first, name)
    assert rows >= 3
