"""`tamis bench transforms`: the transforms beside torch.softmax and, where installed, their peers.

On the CPU always; where there is a CUDA device also the row kernels on it, timed by events.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.bench.timing import alternate, event_times, machine, save

SHAPES = ((4096, 512), (4096, 64), (512, 64), (256, 8192))
ALPHAS = (1.5, 2.0, 1.3, 1.05)

GPU_SHAPES = ((65536, 128), (32768, 1024), (8192, 4096), (8192, 32768), (4096, 50257), (2048, 131072))
GPU_ALPHAS = (1.5, 2.0, 1.3, 1.05)
GPU_SCALES = (1.0, 0.1)
"""Of normal scores: few and many of them get weight."""

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
    if torch.cuda.is_available():
        _run_gpu(output, repeats)


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


# ---------------------------------------------------------------------------------------------------------------
# The row kernels on a GPU


def _run_gpu(output: Path | None, repeats: int) -> None:
    rows: list[dict[str, Any]] = []
    for shape in GPU_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for scale in GPU_SCALES:
                scores = (scale * torch.randn(shape, device="cuda")).to(dtype)
                rows += [row for alpha in GPU_ALPHAS for row in _gpu_case(scores, scale, alpha, repeats)]
            rows += _gpu_loss(shape, dtype, repeats)
        if output is not None:  # as it goes: what was measured should not be lost
            save(output / "transforms-gpu.json", {"benchmark": "row kernels", "machine": machine(), "rows": rows})
    _print_gpu(rows)


def _gpu_case(scores: Tensor, scale: float, alpha: float, repeats: int) -> list[dict[str, Any]]:
    """Times of one alpha, in microseconds; peers that are not exact to 1e-3 are named with their error, not timed."""
    exact = functional.entmax(scores[:64].double(), alpha)
    calls: dict[str, Transform] = {
        "tamis": lambda z: functional.entmax(z, alpha, backend="triton"),
        "softmax": lambda z: z.softmax(-1),
    }
    peer = _peer(alpha)
    if peer is not None:
        calls["entmax"] = peer
    splash = _adasplash(alpha)
    if splash is not None:
        calls["adasplash"] = splash
    errors: dict[str, Any] = {}
    for name, call in calls.items():
        if name != "softmax":
            try:
                weights = call(scores[:64]).double()
                errors[name] = (weights - exact).abs().sum(-1).max().item()
            except Exception as error:  # a peer that cannot take this shape is part of the result
                if name == "tamis":
                    raise
                errors[name] = str(error).strip().splitlines()[-1][:120]
    tolerance = 1e-5 if scores.dtype == torch.float32 else 2e-2
    if not errors["tamis"] <= tolerance:
        raise RuntimeError(f"alpha {alpha}, {tuple(scores.shape)}: weights off by {errors['tamis']:g}: not timed")
    fair = {name: call for name, call in calls.items() if name == "softmax" or _is_exact(errors[name], tolerance)}
    upstream = torch.randn_like(scores)
    leaf = scores.clone().requires_grad_()
    wraps: dict[str, Callable[[Transform], Callable[[], object]]] = {
        "forward": lambda call: lambda: call(scores),
        "forward+backward": lambda call: lambda: torch.autograd.grad(call(leaf), leaf, upstream),
    }
    results = []
    size = scores.numel() * scores.element_size()
    for name, wrap in wraps.items():
        times = {key: event_times(wrap(call), repeats) for key, call in fair.items()}
        row: dict[str, Any] = {"shape": tuple(scores.shape), "dtype": str(scores.dtype), "scale": scale}
        row |= {"alpha": alpha, "pass": name, "zeros": (exact == 0.0).double().mean().item(), "errors": errors}
        row |= times
        row["over_softmax"] = times["tamis"]["median_us"] / times["softmax"]["median_us"]
        if name == "forward":  # read once, written once
            row["terabytes_per_second"] = 2 * size / times["tamis"]["median_us"] / 1e6
        results.append(row)
    return results


def _gpu_loss(shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """The loss beside cross-entropy, forward and backward."""
    leaf = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    target = torch.randint(shape[1], shape[:1], device="cuda")
    cross = event_times(lambda: torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, target), leaf), repeats)
    results = []
    for alpha in GPU_ALPHAS:
        loss = partial(functional.entmax_loss, leaf, target, alpha, backend="triton")
        ours = event_times(lambda loss=loss: torch.autograd.grad(loss(), leaf), repeats)  # type: ignore[misc]
        row: dict[str, Any] = {"shape": shape, "dtype": str(dtype), "scale": 1.0, "alpha": alpha, "pass": "loss"}
        row |= {"tamis": ours, "cross_entropy": cross, "over_cross_entropy": ours["median_us"] / cross["median_us"]}
        results.append(row)
    return results


def _is_exact(error: float | str, tolerance: float) -> bool:
    return not isinstance(error, str) and error <= max(tolerance, 1e-3)


def _adasplash(alpha: float) -> Transform | None:
    """Its entmax over rows, which takes 1 < alpha <= 2."""
    try:
        module: Any = importlib.import_module("adasplash")
    except ImportError:
        return None
    function = getattr(module, "triton_entmax", None)
    return None if function is None else lambda z: function(z, alpha)


def _print_gpu(rows: list[dict[str, Any]]) -> None:
    table = Table(title="row kernels on a GPU, microseconds (median)")
    for column in (
        "shape",
        "dtype",
        "scale",
        "alpha",
        "pass",
        "tamis",
        "softmax or CE",
        "ratio",
        "entmax",
        "adasplash",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        base = row.get("softmax") or row["cross_entropy"]
        peers = (f"{row[name]['median_us']:.0f}" if name in row else "-" for name in ("entmax", "adasplash"))
        table.add_row(
            "x".join(map(str, row["shape"])),
            row["dtype"].removeprefix("torch."),
            f"{row['scale']:g}",
            f"{row['alpha']:g}",
            row["pass"],
            f"{row['tamis']['median_us']:.0f}",
            f"{base['median_us']:.0f}",
            f"{row['tamis']['median_us'] / base['median_us']:.2f}x",
            *peers,
        )
    Console(width=130).print(table)
