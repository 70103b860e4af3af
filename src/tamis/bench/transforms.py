"""`tamis bench transforms`: the transforms beside torch.softmax and, where installed, the `entmax` package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.bench.timing import alternate, machine, save

SHAPES = ((4096, 512), (4096, 64), (512, 64), (256, 8192))
ALPHAS = (1.5, 2.0, 1.3, 1.05)

Transform = Callable[[Tensor], Tensor]


def run(output: Path | None, *, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for alpha in ALPHAS for row in _case(shape, alpha, repeats)]
    memory = {str(alpha): _memory_factor(alpha) for alpha in ALPHAS}
    _print(rows, memory)
    if output is not None:
        record = {"benchmark": "transforms", "machine": machine(), "rows": rows, "peak_memory_over_input": memory}
        save(output / "transforms-cpu.json", record)


def _case(shape: tuple[int, int], alpha: float, repeats: int) -> list[dict[str, Any]]:
    scores = torch.randn(shape)
    upstream = torch.randn(shape)
    ours: Transform = lambda z: functional.entmax(z, alpha)  # noqa: E731
    mass_error, disagreement = _check(ours, scores, alpha)
    calls: dict[str, Transform] = {"tamis": ours, "softmax": lambda z: z.softmax(-1)}
    peer = _peer(alpha)
    if peer is not None:
        calls["entmax"] = peer

    def forward(call: Transform) -> Callable[[], object]:
        return lambda: call(scores)

    def both(call: Transform) -> Callable[[], object]:
        leaf = scores.clone().requires_grad_()
        return lambda: torch.autograd.grad(call(leaf), leaf, upstream)

    results = []
    for name, wrap in (("forward", forward), ("forward+backward", both)):
        times = alternate({key: wrap(call) for key, call in calls.items()}, repeats)
        row: dict[str, Any] = {"shape": shape, "alpha": alpha, "pass": name, **times}
        row["over_softmax"] = times["tamis"]["min_ms"] / times["softmax"]["min_ms"]
        if peer is not None:
            row["faster_than_entmax"] = times["entmax"]["min_ms"] / times["tamis"]["min_ms"]
        row["mass_error"], row["disagreement"] = mass_error, disagreement
        results.append(row)
    return results


def _peer(alpha: float) -> Transform | None:
    """The fastest way to the same weights in the `entmax` package."""
    try:
        entmax: Any = importlib.import_module("entmax")
    except ModuleNotFoundError:
        return None
    special = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}
    if alpha in special:
        return lambda z: special[alpha](z, -1)
    return lambda z: entmax.entmax_bisect(z, alpha, -1)


def _check(ours: Transform, scores: Tensor, alpha: float) -> tuple[float, float]:
    """Refuse to time what is not right: mass, and agreement with the solution in fp64."""
    weights = ours(scores).double()
    mass_error = (weights.sum(-1) - 1.0).abs().max().item()
    disagreement = (weights - functional.entmax(scores.double(), alpha)).abs().sum(-1).max().item()
    if not (mass_error <= 1e-5 and disagreement <= 1e-5):
        raise RuntimeError(f"alpha {alpha}: mass off by {mass_error:g}, weights by {disagreement:g}: not timed")
    return mass_error, disagreement


_MEMORY = """
import torch
from tamis import functional
from tamis.bench.timing import peak_memory
scores = torch.randn(32768, 512)
with torch.no_grad():
    functional.entmax(torch.randn(64, 64), {alpha})  # what is loaded once is not the call's
    peak = peak_memory(lambda: functional.entmax(scores, {alpha}))
print("" if peak is None else peak / (scores.numel() * scores.element_size()))
"""


def _memory_factor(alpha: float) -> float | None:
    """Peak memory of a forward pass, output included, over the size of its input.

    In a process of its own: memory that earlier calls freed would be used again and not show.
    """
    command = [sys.executable, "-c", _MEMORY.format(alpha=alpha)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return float(printed) if printed else None


def _print(rows: list[dict[str, Any]], memory: dict[str, float | None]) -> None:
    table = Table(title="entmax on CPU, fp32, milliseconds (minimum of alternated calls)")
    for column in ("shape", "alpha", "pass", "tamis", "entmax", "faster", "softmax", "over softmax"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for row in rows:
        peer = row.get("entmax")
        table.add_row(
            "x".join(map(str, row["shape"])),
            f"{row['alpha']:g}",
            row["pass"],
            f"{row['tamis']['min_ms']:.2f}",
            f"{peer['min_ms']:.2f}" if peer else "-",
            f"{row['faster_than_entmax']:.1f}x" if peer else "-",
            f"{row['softmax']['min_ms']:.2f}",
            f"{row['over_softmax']:.1f}x",
        )
    console = Console(width=110)
    console.print(table)
    shown = ", ".join(f"alpha {alpha}: {factor:.2f}x" for alpha, factor in memory.items() if factor is not None)
    console.print(f"peak memory of a forward pass over its input: {shown or 'not known on this system'}")
