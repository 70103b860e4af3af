"""The papers' figures of runs, by matplotlib.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015: alphas and their trajectories,
densities, diversity and positional heads, for encoder, decoder and cross-attention side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tamis.analysis.figures import FIGURES as MEASURED
from tamis.report.content import ReportRun, looks_back
from tamis.report.drawing import (
    COLOURS,
    DPI,
    bare,
    check_format,
    draw_weights,
    figure_class,
    label,
    save,
    weights_legend,
)
from tamis.report.fonts import fonts_for
from tamis.report.palette import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}
BINS = [1 + k / 20 for k in range(21)]

Runs = Sequence[ReportRun]


def plot(runs: Runs, folder: Path, suffix: str = "pdf", dpi: int = DPI) -> list[Path]:
    """Draw every figure that the runs have numbers for, each into a file of its own."""
    check_format(suffix, dpi)
    written = []
    with fonts_for(_texts(runs)):
        for name, draw in FIGURES.items():
            figure = draw(runs)
            if figure is not None:
                path = folder / f"{name}.{suffix}"
                save(figure, path, dpi)
                written.append(path)
    return written


def _texts(runs: Runs) -> list[str]:
    """All that pictures write of runs."""
    told = [found for run in runs if (found := _telling(run)) is not None]
    return [*(run.name for run in runs), *(piece for _, _, queries, keys, _ in told for piece in (*queries, *keys))]


def alpha_histograms(runs: Runs) -> Figure | None:
    """How many heads have which learned alpha."""
    learned = _learned(runs)
    if not learned:
        return None
    figure, panels = _panels(learned, "alpha", "heads")
    for kind, panel in panels.items():
        values = [
            [alpha for site in _layers(run, kind) for alpha in run.analysis["alphas"].get(site, ())] for run in learned
        ]
        panel.hist(values, BINS, color=_colours(learned, runs))
        panel.set_xlim(1, 2)
    return _finish(figure, learned, runs)


def alpha_trajectories(runs: Runs) -> Figure | None:
    """The alpha of every head over training: a row of panels for each run, the later the layer the darker."""
    learned = [run for run in _learned(runs) if len(run.analysis.get("trajectories", {}).get("steps", ())) > 1]
    if not learned:
        return None
    figure, grid = _grid(learned, 1.7)
    layers = max(len(_layers(run, kind)) for run in learned for kind in _kinds([run]))
    for run, row in zip(learned, grid, strict=True):
        found = run.analysis["trajectories"]
        for kind, panel in row.items():
            for layer, site in enumerate(_layers(run, kind)):
                if site in found["sites"]:
                    panel.plot(found["steps"], found["sites"][site], color=_of_layer(layer, layers), linewidth=0.9)
            panel.set(ylim=(1, 2), yticks=(1, 1.25, 1.5, 1.75, 2))
            panel.set_xlabel("step" if run is learned[-1] else "", fontsize=9)
    figure.supylabel("alpha", fontsize=9)
    _layer_legend(figure, layers)
    return figure


def density_histograms(runs: Runs) -> Figure:
    """Rows by the share of visible keys that got a weight; a row of panels for each run, so that none hides another."""
    figure, grid = _grid(runs, 1.5)
    for run, row, colour in zip(runs, grid, _colours(runs, runs), strict=True):
        highest = 0.0
        for kind, panel in row.items():
            counts = np.array(run.analysis["density_histograms"].get(kind, []), dtype=float)
            if counts.size:
                shares = counts / max(1.0, counts.sum())
                highest = max(highest, float(shares.max()))
                panel.stairs(shares, np.linspace(0, 1, counts.size + 1), color=colour, fill=True)
            panel.set_xlabel("density of a row" if run is runs[-1] else "", fontsize=9)
        for panel in row.values():
            panel.set(xlim=(0, 1), ylim=(0, 1.05 * highest or 1))
            panel.locator_params(axis="y", nbins=4, min_n_ticks=3)
    figure.supylabel("share of rows", fontsize=9)
    return figure


def heads(runs: Runs) -> Figure:
    """Every figure that is declared of heads, one row of panels each; a dot is a head."""
    declared = [figure for figure in MEASURED if figure.per_head and not figure.offsets]
    shown = [figure for figure in declared if _has(runs, figure.name)]
    kinds = _kinds(runs)
    made = figure_class()(figsize=(3.1 * max(1, len(kinds)), 0.8 + 1.5 * len(shown)), layout="constrained")
    grid = made.subplots(len(shown), max(1, len(kinds)), squeeze=False)
    for figure, row in zip(shown, grid, strict=True):
        for kind, panel in zip(kinds, row, strict=False):
            bare(panel)
            _head_dots(panel, runs, kind, figure.name)
            _layer_axis(panel, runs, kind)
            panel.locator_params(axis="y", nbins=4, min_n_ticks=3)
            drawn = [float(value) for line in panel.lines for value in line.get_ydata()]
            if not any(drawn):  # no head has any of it: matplotlib would go below zero
                panel.set_ylim(-0.05, 1.05)
            if not drawn:
                panel.set_yticks([])
                panel.text(0.5, 0.5, "nothing to measure", ha="center", fontsize=7, transform=panel.transAxes)
            panel.set_title(KINDS[kind] if figure is shown[0] else "", fontsize=9)
        row[0].set_ylabel(figure.title, fontsize=8)
    made.supxlabel("layer, its heads sorted", fontsize=9)
    return _finish(made, runs, runs, DOTS)


def head_density(runs: Runs) -> Figure:
    """The mean density of every head, sorted within its layer."""
    figure, panels = _panels(runs, "layer, its heads sorted", "density")
    for kind, panel in panels.items():
        _head_dots(panel, runs, kind, "density")
        _layer_axis(panel, runs, kind)
        panel.set_ylim(0, 1.05)
    return _finish(figure, runs, runs, DOTS)


def diversity(runs: Runs) -> Figure:
    """Jensen-Shannon divergence between the heads of each layer."""
    figure, panels = _panels(runs, "layer", "Jensen-Shannon divergence")
    for kind, panel in panels.items():
        for run, colour in zip(runs, _colours(runs, runs), strict=True):
            values = [run.analysis["sites"][site]["diversity"] for site in _layers(run, kind)]
            panel.plot(range(len(values)), values, "o-", color=colour, markersize=4)
        _layer_axis(panel, runs, kind)
    highest = max(float(np.max(line.get_ydata())) for panel in panels.values() for line in panel.lines)
    panel.set_ylim(0, 1.06 * highest or 1)  # shared by all panels, so only now that they are full
    return _finish(figure, runs, runs)


def positions(runs: Runs) -> Figure | None:
    """The weight of self-attention on keys at each distance from the query that rows see, for every head."""
    figure, panels = _panels(runs, "distance of the key", "mean weight", ("encoder", "decoder"))
    if not panels:
        return None
    for kind, panel in panels.items():
        for place, (run, colour) in enumerate(zip(runs, _colours(runs, runs), strict=True)):
            shift = 0.7 * (place + 0.5) / len(runs) - 0.35
            for offset, weight in _seen(run, kind):
                panel.plot(offset + shift, weight, ".", color=colour, markersize=5)
        seen = [offset for run in runs for offset, _ in _seen(run, kind)]
        panel.set(ylim=(0, 1.05), xticks=sorted(set(seen)))
    return _finish(figure, runs, runs, DOTS)


def _seen(run: ReportRun, kind: str) -> list[tuple[int, float]]:
    """Distances and weights of every head, without those that no row sees."""
    return [
        (offset, weight)
        for site in _layers(run, kind)
        for head in run.analysis["sites"][site]["confidence"]
        for offset, weight in zip(run.analysis["offsets"], head, strict=True)
        if weight is not None
    ]


def attention(runs: Runs) -> Figure | None:
    """One sentence through the first heads of the last layer of each run, as the page draws it."""
    shown = [(run, sentence) for run in runs if (sentence := _telling(run)) is not None]
    if not shown:
        return None
    count = min(4, max(sentence[1].shape[0] for _, sentence in shown))
    figure = figure_class()(figsize=(2.9 * count + 0.6, 3.2 * len(shown) + 0.4), layout="constrained")
    grid = figure.subplots(len(shown), count, squeeze=False)
    for row, (run, (site, weights, queries, keys, causal)) in zip(grid, shown, strict=True):
        draw_heads(row, f"{label(run.name)}\n{site}", weights, queries, keys, causal)
    weights_legend(figure, any(sentence[4] for _, sentence in shown))
    return figure


def draw_heads(
    row: Sequence[Axes], name: str, weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], causal: bool
) -> None:
    """The first heads of a layer (H, Lq, Lk), one in each panel, counted from 0 as in the code."""
    for head, panel in enumerate(row):
        if head >= len(weights):
            panel.set_axis_off()
            continue
        draw_weights(panel, weights[head], queries, keys, causal)
        panel.set_title(f"head {head}: {_zeros(weights[head], causal)}", fontsize=8)
        if head:
            panel.set_yticks([])
    row[0].set_ylabel(name, fontsize=8)


def _zeros(weights: np.ndarray, causal: bool) -> str:
    """The share of zeros among the weights (Lq, Lk) of what is visible."""
    visible = np.tril(np.ones(weights.shape, bool)) if causal else np.ones(weights.shape, bool)
    return f"{(weights[visible] == 0).mean():.0%} exact zeros"


def learned_heads(runs: Runs) -> Figure | None:
    """One sentence through three heads of a layer of each run: of the lowest, a middle and the highest learned alpha.

    The layer is that whose alphas lie furthest apart, of cross-attention where there is some.
    """
    shown = []
    for run in _learned(runs):
        alphas = run.analysis["alphas"]
        sites = [site for site in _layers(run, "cross") if site in alphas] or list(alphas)
        site = max(sites, key=lambda site: max(alphas[site]) - min(alphas[site]))
        if (sentence := _telling(run, site)) is not None:
            shown.append((run, alphas[site], sentence))
    if not shown:
        return None
    figure = figure_class()(figsize=(5.8, 2.1 * len(shown) + 0.4), layout="constrained")
    grid = figure.subplots(len(shown), 3, squeeze=False)
    for row, (run, alphas, (site, weights, queries, keys, causal)) in zip(grid, shown, strict=True):
        wanted = (min(alphas), (min(alphas) + max(alphas)) / 2, max(alphas))
        heads = list(dict.fromkeys(int(np.argmin(np.abs(np.array(alphas) - alpha))) for alpha in wanted))
        for panel, head in zip(row, heads, strict=False):
            draw_weights(panel, weights[head], queries, keys, causal)
            title = f"head {head}, alpha {alphas[head]:.2f}\n{_zeros(weights[head], causal)}"
            panel.set_title(title, fontsize=8)
            if panel is not row[0]:
                panel.set_yticks([])
        for panel in row[len(heads) :]:
            panel.set_axis_off()
        row[0].set_ylabel(f"{label(run.name)}\n{site}", fontsize=7)
    weights_legend(figure, any(sentence[4] for _, _, sentence in shown))
    return figure


FIGURES: dict[str, Callable[[Runs], Figure | None]] = {
    "alpha-histograms": alpha_histograms,
    "alpha-trajectories": alpha_trajectories,
    "density-histograms": density_histograms,
    "head-density": head_density,
    "heads": heads,
    "diversity": diversity,
    "positions": positions,
    "attention": attention,
    "learned-heads": learned_heads,
}


def _grid(runs: Runs, height: float) -> tuple[Figure, list[dict[str, Axes]]]:
    """A row of panels for each run, one for each type of attention that some run has."""
    kinds = _kinds(runs)
    figure = figure_class()(figsize=(3.1 * max(1, len(kinds)), 0.7 + height * len(runs)), layout="constrained")
    made = figure.subplots(len(runs), max(1, len(kinds)), squeeze=False)
    for run, row in zip(runs, made, strict=True):
        row[0].set_ylabel(label(run.name), fontsize=8)
        for kind, panel in zip(kinds, row, strict=False):
            bare(panel)
            panel.set_title(KINDS[kind] if run is runs[0] else "", fontsize=9)
    return figure, [dict(zip(kinds, row, strict=False)) for row in made]


def _head_dots(panel: Axes, runs: Runs, kind: str, name: str) -> None:
    """A dot for each head: layers side by side, in each of them runs, in each of these heads from the lowest up."""
    for place, (run, colour) in enumerate(zip(runs, _colours(runs, runs), strict=True)):
        for layer, site in enumerate(_layers(run, kind)):
            values = sorted(run.analysis["sites"][site].get(name) or ())
            within = (np.arange(len(values)) + 0.5) / max(1, len(values))
            at = layer + (place + 0.1 + 0.8 * within) / len(runs) - 0.5
            panel.plot(at, values, ".", color=colour, markersize=5)


def _has(runs: Runs, name: str) -> bool:
    return any(site.get(name) for run in runs for site in run.analysis["sites"].values())


def _of_layer(layer: int, layers: int) -> Any:
    """The colour of a layer on the way from the first to the last."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("layers", palette()["light"]["layers"])(layer / max(1, layers - 1))


def _layer_legend(figure: Figure, layers: int) -> None:
    from matplotlib.lines import Line2D

    numbers = range(layers) if layers <= 8 else (0, layers // 2, layers - 1)
    handles = [Line2D([], [], color=_of_layer(number, layers), label=f"layer {number}") for number in numbers]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)


def _panels(
    runs: Runs, xlabel: str, ylabel: str, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each type of attention that some run has."""
    found = _kinds(runs, kinds)
    figure = figure_class()(figsize=(3.1 * max(1, len(found)), 2.7), layout="constrained")
    if not found:
        return figure, {}
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for kind, panel in zip(found, axes, strict=True):
        panel.set_title(KINDS[kind], fontsize=9)
        panel.set_xlabel(xlabel, fontsize=9)
        bare(panel)
    axes[0].set_ylabel(ylabel, fontsize=9)
    return figure, dict(zip(found, axes, strict=True))


def _kinds(runs: Runs, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """The types of attention that some run has."""
    return [kind for kind in kinds if any(_layers(run, kind) for run in runs)]


DOTS = {"marker": ".", "linestyle": "none"}


def _finish(figure: Figure, shown: Runs, every: Runs, marks: Mapping[str, Any] | None = None) -> Figure:
    """With a legend where there is more than one run to tell apart, of lines or of what `marks` says."""
    from matplotlib.lines import Line2D

    if len(shown) > 1:
        named = zip((label(run.name) for run in shown), _colours(shown, every), strict=True)
        handles = [Line2D([], [], color=colour, label=name, **(marks or {})) for name, colour in named]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(shown), frameon=False, fontsize=8)
    return figure


def _layers(run: ReportRun, kind: str) -> list[str]:
    """The sites of one type of attention, in the order of the layers."""
    return [site for site, figures in run.analysis["sites"].items() if figures["kind"] == kind]


def _layer_axis(panel: Any, runs: Runs, kind: str) -> None:
    layers = max(len(_layers(run, kind)) for run in runs)
    panel.set(xlim=(-0.5, layers - 0.5), xticks=range(layers))


def _learned(runs: Runs) -> list[ReportRun]:
    return [run for run in runs if run.analysis.get("alphas")]


def _colours(some: Runs, every: Runs) -> list[str]:
    """A run has the same colour in every figure."""
    of_run = dict(zip((run.name for run in every), cycle(COLOURS), strict=False))
    return [of_run[run.name] for run in some]


def _telling(run: ReportRun, site: str | None = None) -> tuple[str, Any, list[str], list[str], bool] | None:
    """A sentence of middling length, with few split words, through a layer, by default the last: its site, weights
    (H, Lq, Lk), queries, keys, and whether queries see no later key."""
    sentences = [sentence for sentence in run.sentences() if sentence.weights]
    if not sentences:
        return None
    middling = sorted(sentences, key=lambda one: abs(len(one.target.pieces) - 12))[:8]
    sentence = min(
        middling, key=lambda one: sum(len(side.pieces) - len(side.text.split()) for side in (one.source, one.target))
    )
    if site is None:
        site = next((site for site in reversed(sentence.weights) if site.endswith("cross")), list(sentence.weights)[-1])
    kind = run.analysis["sites"][site]["kind"]
    target = sentence.target.labels()
    source = sentence.source.labels() or target
    queries, keys = (source if kind == "encoder" else target), (target if kind == "decoder" else source)
    weights = sentence.weights[site]
    return site, weights.to_dense()[0].numpy(), queries, keys, kind == "decoder" and looks_back(weights)
