"""The papers' figures of runs, by matplotlib.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015: alphas and their trajectories,
densities, diversity and positional heads, for encoder, decoder and cross-attention side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Runs = Sequence[ReportRun]


def plot(runs: Runs, folder: Path, suffix: str = "pdf") -> list[Path]:
    """Draw every figure that the runs have numbers for, each into a file of its own."""
    if suffix not in SUFFIXES:
        raise ValueError(f"a figure is written as one of {', '.join(SUFFIXES)}, got {suffix!r}")
    _need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in FIGURES.items():
        figure = draw(runs)
        if figure is not None:
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=200)
            written.append(path)
    return written


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
        panel.hist(values, BINS, color=_colours(learned, runs), label=[run.name for run in learned])
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
    """Rows by the share of visible keys that got a weight."""
    figure, panels = _panels(runs, "density of a row", "share of rows")
    for kind, panel in panels.items():
        for run, colour in zip(runs, _colours(runs, runs), strict=True):
            counts = np.array(run.analysis["density_histograms"].get(kind, []), dtype=float)
            if counts.size:
                panel.stairs(counts / max(1.0, counts.sum()), np.linspace(0, 1, counts.size + 1), color=colour)
        panel.set(xlim=(0, 1), ylim=(0, 1))
    return _finish(figure, runs, runs)


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
    return _finish(figure, runs, runs)


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
    """The weight of self-attention on keys at each distance from the query, for every head."""
    figure, panels = _panels(runs, "distance of the key", "mean weight", ("encoder", "decoder"))
    if not panels:
        return None
    for kind, panel in panels.items():
        for place, (run, colour) in enumerate(zip(runs, _colours(runs, runs), strict=True)):
            offsets = np.array(run.analysis["offsets"])
            for site in _layers(run, kind):
                for confidence in run.analysis["sites"][site]["confidence"]:
                    at = offsets + 0.7 * (place + 0.5) / len(runs) - 0.35
                    panel.plot(at, confidence, ".", color=colour, markersize=5)
        panel.set(ylim=(0, 1), xticks=runs[0].analysis["offsets"])
    return _finish(figure, runs, runs)


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
        row[0].set_ylabel(f"{run.name}\n{site}", fontsize=8)
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


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError("figures need matplotlib: pip install 'tamis[plots]'") from None


def _panels(
    runs: Runs, xlabel: str, ylabel: str, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each type of attention that some run has."""
    from matplotlib.figure import Figure

    found = [kind for kind in kinds if any(_layers(run, kind) for run in runs)]
    figure = Figure(figsize=(3.1 * max(1, len(found)), 2.7), layout="constrained")
    if not found:
        return figure, {}
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for kind, panel in zip(found, axes, strict=True):
        panel.set_title(KINDS[kind], fontsize=9)
        panel.set_xlabel(xlabel, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(ylabel, fontsize=9)
    return figure, dict(zip(found, axes, strict=True))


def _finish(figure: Figure, shown: Runs, every: Runs) -> Figure:
    """With a legend where there is more than one run to tell apart."""
    from matplotlib.lines import Line2D

    if len(shown) > 1:
        colours = _colours(shown, every)
        handles = [Line2D([], [], color=c, label=run.name) for run, c in zip(shown, colours, strict=True)]
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
    """A token as matplotlib writes it: a dollar is a dollar, not the start of a formula."""
    return piece.lstrip("".join(SPACES)).replace("$", r"\$")
