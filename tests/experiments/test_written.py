"""Runs and recipes as they were written before there was one kind of experiment: they go on working.

The archive holds a run of each kind after 4 of 6 steps, with its recipe, its evaluation, and as whole.jsonl the journal
of the same run as the code of then went on with it.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from experiments.listening import QUIET
from tamis.experiments import analyze, evaluate, open_run, plot_lengths, read_recipe, train
from tamis.native import library

ARCHIVE = Path(__file__).with_name("written.tar.xz")
KINDS = ("translation", "language", "task")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Its recipes name files beside them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library, "_load", lambda: (None, library.Status(None, "as it was then", ())))
    torch.set_num_threads(1)
    return tmp_path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_run_goes_on_to_its_end(written, kind):
    train(read_recipe(written / f"{kind}.toml"), written / kind, "cpu", QUIET)
    found, whole = records(written / kind / "metrics.jsonl"), records(written / kind / "whole.jsonl")
    assert [record["step"] for record in found] == [record["step"] for record in whole]
    for one, other in zip(found, whole, strict=True):
        for name in ("loss", "valid_loss", "grad_norm", "lr", "tokens", "density"):
            assert (name in one) == (name in other)
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-5)
    assert "old-" in (written / kind / "model" / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_run_is_evaluated_as_it_was_then(written, kind):
    old = open_run(written / kind).folder.evaluated()
    found = evaluate(written / kind, "cpu", QUIET)
    if kind == "translation":
        assert found["translation"] == old["translation"]
        assert found["alignment"]["best"] == pytest.approx(old["alignment"]["best"])
    if kind == "language":
        for now, then in zip(found["perplexity"], old["perplexity"], strict=True):
            assert now["perplexity"] == pytest.approx(then["perplexity"], rel=1e-5)
    if kind == "task":
        keys = ("multiple", "length", "exact_match", "token_accuracy")
        assert [[row[key] for key in keys] for row in found["scores"]] == [
            [row[key] for key in keys] for row in old["scores"]
        ]


def test_old_runs_are_analysed_and_drawn(written):
    for kind in ("language", "task"):  # which had no analysis then
        assert analyze(written / kind, device="cpu", display=QUIET, shown=2)["sites"]
    assert plot_lengths([written / "task"], written / "lengths.png").startswith("| exact match, % | 1x")
