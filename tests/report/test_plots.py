"""The papers' figures by matplotlib."""

import sys
from dataclasses import replace

import numpy as np
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


def test_a_run_hides_no_other():
    """Densities of rows: a row of panels for each run, and each panel has the shares of its run."""
    pytest.importorskip("matplotlib")
    runs = cases.three_runs()
    panels = plots.density_histograms(runs).axes
    assert len(panels) == 3 * len(runs)
    for place, run in enumerate(runs):
        for kind, panel in zip(("encoder", "decoder", "cross"), panels[3 * place : 3 * place + 3], strict=True):
            counts = np.array(run.analysis["density_histograms"][kind])
            (drawn,) = panel.patches
            np.testing.assert_allclose(drawn.get_data().values, counts / counts.sum())
            assert panel.get_ylim()[1] >= (counts / counts.sum()).max()


@pytest.mark.parametrize(("name", "dots"), [("head-density", True), ("positions", True), ("diversity", False)])
def test_the_legend_shows_what_is_drawn(name, dots):
    pytest.importorskip("matplotlib")
    (legend,) = FIGURES[name](cases.three_runs()).legends
    for handle in legend.legend_handles:
        assert (handle.get_marker(), handle.get_linestyle()) == ((".", "None") if dots else ("None", "-"))


def test_dots_stay_inside_and_shares_do_not_go_below_zero():
    """One dot a panel, and a figure that no head has any of."""
    pytest.importorskip("matplotlib")
    run = cases.three_runs()[0]
    sites = {
        site: {**figures, "null_share": [0.0] * len(figures["density"])}
        for site, figures in run.analysis["sites"].items()
    }
    last = {}  # one layer of each kind
    for site, figures in sites.items():
        last[figures["kind"]] = site
    run = replace(run, analysis={**run.analysis, "sites": {site: sites[site] for site in last.values()}})
    for panel in plots.diversity([run]).axes:
        (line,) = panel.lines
        assert panel.get_ylim()[0] == 0
        assert max(line.get_ydata()) < 0.96 * panel.get_ylim()[1]
    panels = plots.heads([run]).axes
    none = [panel for panel in panels if panel.lines and not any(y for line in panel.lines for y in line.get_ydata())]
    assert none
    for panel in none:
        ticks = [tick for tick in panel.get_yticks() if panel.get_ylim()[0] <= tick <= panel.get_ylim()[1]]
        assert len(ticks) >= 3
        assert min(ticks) == 0


def test_learned_heads_go_from_the_lowest_alpha_to_the_highest():
    """In the layer of cross-attention whose alphas lie furthest apart; titles count the zeros of what is drawn."""
    pytest.importorskip("matplotlib")
    run = next(run for run in cases.three_runs() if run.name == "entmax")
    crossed = [site for site, figures in run.analysis["sites"].items() if figures["kind"] == "cross"]
    heads = len(run.analysis["alphas"][crossed[0]])
    spread = np.linspace(1.9, 1.1, heads).tolist()
    alphas = {site: [1.5] * heads for site in run.analysis["alphas"]} | {crossed[0]: spread}
    figure = plots.learned_heads([replace(run, analysis={**run.analysis, "alphas": alphas})])
    drawn = [panel for panel in figure.axes if panel.images]
    assert figure.axes[0].get_ylabel() == f"entmax\n{crossed[0]}"
    found = [panel.get_title().split("\n") for panel in drawn]
    assert found[0][0] == f"head {heads - 1}, alpha 1.10"
    assert found[-1][0] == "head 0, alpha 1.90"
    for panel, (_, zeros) in zip(drawn, found, strict=True):
        assert zeros == f"{np.ma.getmaskarray(panel.images[0].get_array()).mean():.0%} exact zeros"
    assert plots.learned_heads([run for run in cases.three_runs() if run.name != "entmax"]) is None


def test_one_sentence_is_of_middling_length_and_few_split_words():
    pytest.importorskip("matplotlib")
    run = cases.three_runs()[0]
    tokens = {k: dict(v) for k, v in run.analysis["tokens"].items()}
    sides = {k: (len(v["source"]), len(v["target"])) for k, v in tokens.items()}
    whole = next(k for k, (_, target) in sides.items() if target in (11, 13))
    for number, (source, target) in sides.items():
        mark = "\u2581" if number == whole else ""
        tokens[number] = {
            "source": ["\u2581a"] + [f"{mark}b"] * (source - 1),
            "target": ["\u2581a"] + [f"{mark}c"] * (target - 1),
        }
    _, weights, queries, keys, _ = plots._telling(replace(run, analysis={**run.analysis, "tokens": tokens}))
    assert weights.shape[1:] == (len(queries), len(keys)) == sides[whole][::-1]
    assert queries[1:] == ["c"] * (sides[whole][1] - 1)


def test_distances_that_no_row_sees_are_not_drawn():
    pytest.importorskip("matplotlib")
    encoder, decoder = plots.positions(cases.three_runs()).axes
    for panel, last in ((encoder, 3), (decoder, 0)):
        drawn = {round(x) for line in panel.lines for x in line.get_xdata()}
        assert drawn == set(range(-3, last + 1)) == set(panel.get_xticks())


def test_dots_per_inch_make_the_size(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "FIGURES", {"diversity": plots.diversity})

    def width(**options):
        (path,) = plot(cases.three_runs(), tmp_path, "png", **options)
        return int.from_bytes(path.read_bytes()[16:20], "big")

    assert [width(), width(dpi=50)] == [1395, 465]
    with pytest.raises(ValueError, match="dpi must lie between 30 and 1200, got 5"):
        width(dpi=5)


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
    assert {path.stem for path in written} == set(FIGURES) - {
        "alpha-histograms", "alpha-trajectories", "attention", "learned-heads",
    }  # fmt: skip


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="one of pdf, svg, png, got 'gif'"):
        plot(cases.three_runs(), tmp_path, "gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'tamis\[plots\]'"):
        plot(cases.three_runs(), tmp_path)
