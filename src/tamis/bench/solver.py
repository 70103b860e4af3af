"""`tamis bench solver`: the steps the solver takes and how exact its three forms are, for docs/mathematics.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis.bench.timing import machine, save
from tamis.transforms import solver

WIDTHS = (64, 512, 8192)
ALPHAS = (1.05, 1.3, 1.5, 2.0)
FORMS: dict[str, tuple[Callable[..., None], tuple[float, ...]]] = {
    "near one": (solver._near_one_form, (1 + 1e-6, 1.001, 1.01, 1.05, 1.125, 1.3, 1.5, 2.0)),
    "threshold": (solver._threshold_form, (1.05, 1.125, 1.3, 1.5, 2.0)),
    "edge": (solver._edge_form, (2.0, 4.0, 10.0, 32.0)),
}


def run(output: Path | None, *, rows: int) -> None:
    torch.set_num_threads(1)
    evaluations = [_count(alpha, width, warm, rows) for warm in (True, False) for alpha in ALPHAS for width in WIDTHS]
    errors = [_error(name, alpha) for name, (_, alphas) in FORMS.items() for alpha in alphas]
    console = Console(width=110)
    table = Table(title="full-width evaluations of the mass, median / largest")
    for column in ("alpha", *(f"n = {n}" for n in WIDTHS), *(f"cold, n = {n}" for n in WIDTHS)):
        table.add_column(column, justify="right")
    for alpha in ALPHAS:
        own = [row for row in evaluations if row["alpha"] == alpha]
        table.add_row(f"{alpha:g}", *(f"{row['median']:g} / {row['largest']}" for row in own))
    console.print(table)
    table = Table(title="L1 distance from fp64, worst of four kinds of rows of 8192")
    for column in ("form", "alpha", "error"):
        table.add_column(column, justify="right")
    for row in errors:
        table.add_row(row["form"], f"{row['alpha']:.7g}", f"{row['error']:.0e}")
    console.print(table)
    if output is not None:
        record = {"benchmark": "solver", "machine": machine(), "evaluations": evaluations, "errors": errors}
        save(output / "solver-cpu.json", record)


@contextmanager
def _counting(width: int) -> Iterator[list[int]]:
    """Counts calls of the mass methods on rows of this width."""
    count = [0]
    classes: tuple[Any, ...] = (solver._Powers, solver._Squares, solver._Identity, solver._Relative)
    originals = [kind.mass for kind in classes]

    def counted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mass(self: Any, unknown: Tensor) -> Tensor:
            full = self.d if isinstance(self, solver._Relative) else unknown
            count[0] += full.shape[-1] == width
            return original(self, unknown)

        return mass

    for kind, original in zip(classes, originals, strict=True):
        kind.mass = counted(original)
    try:
        yield count
    finally:
        for kind, original in zip(classes, originals, strict=True):
            kind.mass = original


def _count(alpha: float, width: int, warm: bool, rows: int) -> dict[str, Any]:
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    least = solver._WARM_WIDTH
    counts = []
    solver._WARM_WIDTH = least if warm else width + 1
    try:
        for row in scores:
            with _counting(width) as count:
                solver.solve_rows(row[None], alpha - 1.0)
            counts.append(count[0])
    finally:
        solver._WARM_WIDTH = least
    return {"alpha": alpha, "n": width, "warm": warm, "median": statistics.median(counts), "largest": max(counts)}


def _error(name: str, alpha: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 8192, generator=generator)
    lifted = torch.where(torch.arange(8192) == 0, 0.5, 1e-4 * noise)
    worst = 0.0
    for scores in (noise, 0.1 * noise, 1e-4 * noise, lifted):
        row_max = scores.amax(-1, keepdim=True)
        weights, scratch = torch.empty_like(scores), torch.empty(3, *scores.shape)
        FORMS[name][0](scores, row_max, solver._group_maxima(scores), alpha - 1.0, weights, scratch)
        exact = solver.solve_rows(scores.double(), alpha - 1.0)[0]
        error = (weights - exact).abs().sum(-1).max().item()
        if not math.isfinite(error):
            raise RuntimeError(f"the {name} form gives no weights at alpha {alpha}")
        worst = max(worst, error)
    return {"form": name, "alpha": alpha, "error": worst}
