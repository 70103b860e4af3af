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

from tamis.report.content import SPACES, ReportRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}
# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SUFFIXES = ("pdf", "svg", "png")
BINS = [1 + k / 20 for k in range(21)]
DPI, DPI_RANGE = 150, (30, 1200)
"""Dots per inch of a png."""

Runs = Sequence[ReportRun]


def plot(runs: Runs, folder: Path, suffix: str = "pdf", dpi: int = DPI) -> list[Path]:
    """Draw every figure that the runs have numbers for, each into a file of its own."""
    check_format(suffix, dpi)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in FIGURES.items():
        figure = draw(runs)
        if figure is not None:
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=dpi)
            written.append(path)
    return written


def check_format(suffix: str, dpi: int) -> None:
    if suffix not in SUFFIXES:
        raise ValueError(f"a figure is written as one of {', '.join(SUFFIXES)}, got {suffix!r}")
    if not DPI_RANGE[0] <= dpi <= DPI_RANGE[1]:
        raise ValueError(f"dpi must lie between {DPI_RANGE[0]} and {DPI_RANGE[1]}, got {dpi}")
    _need_matplotlib()


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
    """The alpha of every head over training."""
    learned = [run for run in _learned(runs) if len(run.analysis.get("trajectories", {}).get("steps", ())) > 1]
    if not learned:
        return None
    figure, panels = _panels(learned, "step", "alpha")
    for kind, panel in panels.items():
        for run, colour in zip(learned, _colours(learned, runs), strict=True):
            found = run.analysis["trajectories"]
            for site in _layers(run, kind):
                if site in found["sites"]:
                    panel.plot(found["steps"], found["sites"][site], color=colour, linewidth=0.8)
        panel.set_ylim(1, 2)
    return _finish(figure, learned, runs)


def density_histograms(runs: Runs) -> Figure:
    """Rows by the share of visible keys that got a weight; a row of panels for each run, so that none hides another."""
    from matplotlib.figure import Figure

    kinds = _kinds(runs)
    figure = Figure(figsize=(3.1 * max(1, len(kinds)), 0.7 + 1.25 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), max(1, len(kinds)), sharex=True, sharey="row", squeeze=False)
    for row, run, colour in zip(grid, runs, _colours(runs, runs), strict=True):
        for kind, panel in zip(kinds, row, strict=False):
            _plain(panel)
            counts = np.array(run.analysis["density_histograms"].get(kind, []), dtype=float)
            if counts.size:
                bins = np.linspace(0, 1, counts.size + 1)
                panel.stairs(counts / max(1.0, counts.sum()), bins, color=colour, fill=True)
        row[0].set(xlim=(0, 1), ylim=(0, None))  # shared, so only now that they are full
        row[0].set_ylabel(_label(run.name), fontsize=8)
    for kind, first, last in zip(kinds, grid[0], grid[-1], strict=False):
        first.set_title(KINDS[kind], fontsize=9)
        last.set_xlabel("density of a row", fontsize=9)
    figure.supylabel("share of rows", fontsize=9)
    return figure


def head_density(runs: Runs) -> Figure:
    """The mean density of every head, sorted within its layer."""
    figure, panels = _panels(runs, "layer, its heads sorted", "density")
    for kind, panel in panels.items():
        for place, (run, colour) in enumerate(zip(runs, _colours(runs, runs), strict=True)):
            for layer, site in enumerate(_layers(run, kind)):
                values = sorted(run.analysis["sites"][site]["density"])
                within = (np.arange(len(values)) + 0.5) / len(values)
                at = layer + (place + 0.1 + 0.8 * within) / len(runs) - 0.5
                panel.plot(at, values, ".", color=colour, markersize=5)
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
    panel.set_ylim(bottom=0)  # shared by all panels, so only now that they are full
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
    """One sentence through the first heads of the last layer of each run; what is grey is exactly 0."""
    shown = [(run, sentence) for run in runs if (sentence := _telling(run)) is not None]
    if not shown:
        return None
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    colours = colormaps["Blues"].with_extremes(bad="0.93")
    heads = min(4, max(sentence[1].shape[0] for _, sentence in shown))
    figure = Figure(figsize=(2.9 * heads + 0.6, 3.2 * len(shown)), layout="constrained")
    for row, (run, (site, weights, queries, keys)) in zip(
        figure.subplots(len(shown), heads, squeeze=False), shown, strict=True
    ):
        share = weights / np.maximum(np.abs(weights).sum(-1, keepdims=True), np.finfo(np.float32).tiny)
        for head, panel in enumerate(row):
            if head >= len(share):
                panel.set_axis_off()
                continue
            panel.imshow(np.where(share[head] != 0, share[head], np.nan), cmap=colours, vmin=0, vmax=1, aspect="auto")
            panel.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6)
            panel.set_yticks(range(len(queries)), queries if head == 0 else [], fontsize=6)
            panel.set_title(f"head {head}: {(share[head] == 0).mean():.0%} exact zeros", fontsize=8)
        row[0].set_ylabel(f"{_label(run.name)}\n{site}", fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Runs], Figure | None]] = {
    "alpha-histograms": alpha_histograms,
    "alpha-trajectories": alpha_trajectories,
    "density-histograms": density_histograms,
    "head-density": head_density,
    "diversity": diversity,
    "positions": positions,
    "attention": attention,
}


def check_figure(path: Path) -> type[Figure]:
    """What a figure that will be written there is made of; an error if it cannot be."""
    if path.suffix.removeprefix(".") not in SUFFIXES:
        raise ValueError(f"a figure is written as one of {', '.join(SUFFIXES)}, got {path.name!r}")
    return _need_matplotlib()


def _need_matplotlib() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ImportError("figures need matplotlib: pip install 'tamis[plots]'") from None
    return Figure


def _panels(
    runs: Runs, xlabel: str, ylabel: str, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each type of attention that some run has."""
    from matplotlib.figure import Figure

    found = _kinds(runs, kinds)
    figure = Figure(figsize=(3.1 * max(1, len(found)), 2.7), layout="constrained")
    if not found:
        return figure, {}
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for kind, panel in zip(found, axes, strict=True):
        panel.set_title(KINDS[kind], fontsize=9)
        panel.set_xlabel(xlabel, fontsize=9)
        _plain(panel)
    axes[0].set_ylabel(ylabel, fontsize=9)
    return figure, dict(zip(found, axes, strict=True))


def _plain(panel: Axes) -> None:
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _kinds(runs: Runs, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """The types of attention that some run has."""
    return [kind for kind in kinds if any(_layers(run, kind) for run in runs)]


DOTS = {"marker": ".", "linestyle": "none"}


def _finish(figure: Figure, shown: Runs, every: Runs, marks: Mapping[str, Any] | None = None) -> Figure:
    """With a legend where there is more than one run to tell apart, of lines or of what `marks` says."""
    from matplotlib.lines import Line2D

    if len(shown) > 1:
        named = zip((_label(run.name) for run in shown), _colours(shown, every), strict=True)
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


def _telling(run: ReportRun) -> tuple[str, Any, list[str], list[str]] | None:
    """The first sentence of middling length through the last layer: its site, weights (H, Lq, Lk), queries and keys."""
    sentences = [sentence for sentence in run.sentences() if sentence.weights]
    if not sentences:
        return None
    sentence = min(sentences, key=lambda one: abs(len(one.target) - 12))
    site = next((site for site in reversed(sentence.weights) if site.endswith("cross")), list(sentence.weights)[-1])
    target, source = ([_label(piece) for piece in side] for side in (sentence.target, sentence.source))
    kind = run.analysis["sites"][site]["kind"]
    queries, keys = (source if kind == "encoder" else target), (target if kind == "decoder" else source)
    return site, sentence.weights[site].dense(), queries, keys


def _label(piece: str) -> str:
    """A token or a name as matplotlib writes it: a dollar is a dollar, not the start of a formula."""
    return piece.lstrip("".join(SPACES)).replace("$", r"\$")
