"""The papers' figures by matplotlib."""

import sys
from dataclasses import replace

import pytest

from report import cases
from tamis.report import plots
from tamis.report.plots import FIGURES, plot


def test_every_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    written = plot(cases.three_runs(), tmp_path, "png")
    assert [path.stem for path in written] == list(FIGURES)
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 8_000


def test_tokens_are_no_formulas(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    run = cases.three_runs()[0]
    tokens = {"0": {"source": ["$", r"$\frac$", "<b>", "%", "$x$", "_"], "target": ["$"] * 5}}
    monkeypatch.setattr(plots, "FIGURES", {"attention": plots.attention})
    assert plot([replace(run, analysis={**run.analysis, "tokens": tokens})], tmp_path, "svg")


def test_figures_that_a_run_has_no_numbers_for_are_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    dense = cases.three_runs()[0]
    analysis = {**dense.analysis, "tokens": {}, "alphas": {}, "trajectories": {"steps": [], "sites": {}}}
    written = plot([replace(dense, analysis=analysis)], tmp_path, "svg")
    assert {path.stem for path in written} == set(FIGURES) - {"alpha-histograms", "alpha-trajectories", "attention"}


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="one of pdf, svg, png, got 'gif'"):
        plot(cases.three_runs(), tmp_path, "gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'tamis\[plots\]'"):
        plot(cases.three_runs(), tmp_path)
