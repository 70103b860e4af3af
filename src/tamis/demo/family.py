"""What alpha does to a row of scores, as a picture and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional

SCORES = torch.tensor([2.0, 1.4, 1.1, 0.5, 0.0, -1.0], dtype=torch.float64)
# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def run(folder: Path, console: Console) -> None:
    console.print(_table())
    picture = folder / "entmax-family.png"
    draw(picture)
    console.print(f"picture: {picture}\n")


def family(scores: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and their derivatives in alpha, each (alphas, scores), and support sizes (alphas)."""
    rows = scores.expand(len(alphas), -1)
    column = alphas.unsqueeze(-1)
    derivative = torch.func.jvp(lambda a: functional.entmax(rows, a), (column,), (torch.ones_like(column),))
    return derivative[0], derivative[1], functional.entmax_threshold(rows, column)[1].squeeze(-1)


def _table() -> Table:
    alphas = torch.tensor([1.0, 1.25, 1.5, 2.0, 4.0], dtype=torch.float64)
    weights, _, support = family(SCORES, alphas)
    table = Table(title="alpha-entmax of six scores")
    table.add_column("alpha \\ score")
    for score in SCORES.tolist():
        table.add_column(f"{score:g}", justify="right")
    table.add_column("support", justify="right")
    for alpha, p, size in zip(alphas, weights, support, strict=True):
        name = {1.0: " softmax", 2.0: " sparsemax"}.get(alpha.item(), "")
        shown = [f"{weight:.4f}" if weight > 0 else "0" for weight in p.tolist()]
        table.add_row(f"{alpha:g}{name}", *shown, f"{size}")
    return table


def draw(path: Path) -> None:
    """Four panels: the map of two scores, weights, their slopes, and support sizes, against alpha."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("the picture needs matplotlib: pip install 'tamis[plots]'") from None
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
    _draw_two_scores(top_left)
    alphas = torch.linspace(1.0, 3.0, 401, dtype=torch.float64)
    weights, slopes, _ = family(SCORES, alphas)
    _draw_lines(top_right, alphas, torch.where(weights > 0, weights, torch.nan), "weight")
    top_right.set_title("Six scores: a line ends where its weight becomes exactly 0")
    _draw_lines(bottom_left, alphas, torch.where(weights > 0, slopes, torch.nan), "d weight / d alpha")
    top_right.legend(frameon=False, ncols=2, fontsize=8, loc="center right")
    bottom_left.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    bottom_left.set_title("Slopes of these weights in alpha: what a head learns from")
    _draw_support(bottom_right)
    for panel in (top_left, top_right, bottom_left, bottom_right):
        panel.title.set_fontsize(10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_two_scores(panel: Any) -> None:
    gap = torch.linspace(-4, 4, 401, dtype=torch.float64)
    for alpha, colour in zip((1.0, 1.25, 1.5, 2.0, 4.0), COLOURS, strict=False):
        name = {1.0: "1  softmax", 2.0: "2  sparsemax"}.get(alpha, f"{alpha:g}")
        panel.plot(gap, functional.entmax(torch.stack([gap, 0 * gap], -1), alpha)[:, 0], color=colour, label=name)
    panel.set(xlabel="score of the first minus score of the second", ylabel="weight of the first")
    panel.set_title("Two scores: above alpha = 1 a large enough gap decides")
    panel.legend(title="alpha", frameon=False)


def _draw_lines(panel: Any, alphas: Tensor, values: Tensor, ylabel: str) -> None:
    for score, line, colour in zip(SCORES.tolist(), values.T, COLOURS, strict=True):
        panel.plot(alphas, line, color=colour, label=f"score {score:g}")
    panel.set(xlabel="alpha", ylabel=ylabel)


def _draw_support(panel: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    alphas = torch.linspace(1.01, 2.0, 34, dtype=torch.float64)
    for scale, colour in zip((0.5, 1.0, 2.0, 4.0), COLOURS, strict=False):
        rows = scale * torch.randn(64, 512, generator=generator, dtype=torch.float64)
        sizes = [functional.entmax_threshold(rows, alpha.item())[1].double().mean() for alpha in alphas]
        panel.plot(alphas, sizes, color=colour, label=f"{scale:g}")
    panel.set(xlabel="alpha", ylabel="mean support size", yscale="log")
    panel.set_title("How many of 512 random scores keep a weight")
    panel.legend(title="standard deviation of the scores", frameon=False, ncols=2)
