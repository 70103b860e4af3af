"""What all pictures by matplotlib have in common: formats, colours, how weights look, and text as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tamis.report.palette import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = ("pdf", "svg", "png")
DPI, DPI_RANGE = 150, (30, 1200)
"""Dots per inch of a png."""
COLOURS: tuple[str, ...] = tuple(palette()["light"]["runs"])
"""Colours of runs, in their order."""
SPACES = ("\u2581", "\u0120")
"""What stands for a space before a word, in SentencePiece and in byte-level vocabularies."""


def check_format(suffix: str, dpi: int) -> None:
    if suffix not in SUFFIXES:
        raise ValueError(f"a figure is written as one of {', '.join(SUFFIXES)}, got {suffix!r}")
    if not DPI_RANGE[0] <= dpi <= DPI_RANGE[1]:
        raise ValueError(f"dpi must lie between {DPI_RANGE[0]} and {DPI_RANGE[1]}, got {dpi}")
    figure_class()


def check_figure(path: Path) -> type[Figure]:
    """What a figure that will be written there is made of; an error if it cannot be."""
    if path.suffix.removeprefix(".") not in SUFFIXES:
        raise ValueError(f"a figure is written as one of {', '.join(SUFFIXES)}, got {path.name!r}")
    return figure_class()


def figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ImportError("figures need matplotlib: pip install 'tamis[plots]'") from None
    return Figure


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write a figure where its folder may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def bare(panel: Axes) -> None:
    """Without a frame on top and at the right."""
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def label(piece: str) -> str:
    """A token or a name as matplotlib writes it: a dollar is a dollar, not the start of a formula."""
    return piece.lstrip("".join(SPACES)).replace("$", r"\$")


def draw_weights(panel: Axes, weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], causal: bool) -> None:
    """One head (Lq, Lk) as the page draws it: shares of a row, exact zeros almost white, what is not visible grey."""
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.patches import Polygon

    share = np.abs(weights) / np.maximum(np.abs(weights).sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    colours = ListedColormap(ramp()).with_extremes(bad=palette()["light"]["empty"])
    shown = np.where(share != 0, share, np.nan)
    panel.imshow(shown, cmap=colours, norm=PowerNorm(0.5, 0, 1), aspect="auto")
    if causal:
        size = len(queries)
        stairs = [point for k in range(size) for point in ((k + 0.5, k - 0.5), (k + 0.5, k + 0.5))]
        corner = [*stairs, (size - 0.5, -0.5)]
        panel.add_patch(Polygon(corner, closed=True, color=palette()["light"]["unseen"], linewidth=0))
    panel.set_xticks(range(len(keys)), [label(key) for key in keys], rotation=90, fontsize=6)
    panel.set_yticks(range(len(queries)), [label(query) for query in queries], fontsize=6)
    for ticks, count in ((panel.set_xticks, len(keys)), (panel.set_yticks, len(queries))):
        ticks(np.arange(1, count) - 0.5, minor=True)
    panel.tick_params(which="both", length=0)
    panel.set_axisbelow(True)  # gaps lie on the cells, and under what is not visible
    gap = min(0.8, 8 / max(len(queries), len(keys)))
    panel.grid(which="minor", color=palette()["light"]["page"], linewidth=gap)
    panel.spines[:].set_color(palette()["light"]["line"])


def weights_legend(figure: Figure, causal: bool) -> None:
    """What the colours of `draw_weights` mean, in the page's words."""
    from matplotlib.patches import Patch

    light, shares = palette()["light"], (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
    handles = [Patch(facecolor=light["empty"], edgecolor=light["line"], label="exactly 0")]
    for share in shares:
        colour = ramp()[round(255 * share**0.5)]
        handles.append(Patch(facecolor=colour, edgecolor=colour, label=f"{100 * share:g} %" if share else "above 0"))
    if causal:
        handles.append(Patch(facecolor=light["unseen"], edgecolor=light["line"], label="not visible"))
    title = "a weight's share of its row:"
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=7,
        title=title,
        title_fontsize=7,
        handlelength=1.4,
        columnspacing=1.4,
    )


def ramp(steps: int = 256) -> list[tuple[float, ...]]:
    """From the smallest weight to 1, by the square root of the share."""
    from matplotlib.colors import LinearSegmentedColormap

    made = LinearSegmentedColormap.from_list("weights", palette()["light"]["ramp"])
    return [tuple(made(k / (steps - 1))) for k in range(steps)]


def thousands(panel: Any, keys: Sequence[int]) -> None:
    """Ticks at these lengths, whatever the scale of the axis."""
    panel.set_xticks(keys, labels=[f"{count:,}" for count in keys])
    panel.minorticks_off()
