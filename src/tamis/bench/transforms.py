"""`tamis bench transforms`: the transforms beside torch.softmax and, where installed, their peers.

On a GPU the row kernels, timed by events, the loss beside cross-entropy, and what it costs to learn alpha.  A peer that
fails is recorded with its error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.bench.rows import Row, Transform, passes, peer, softmax
from tamis.bench.rows import run as run_on_cpu
from tamis.bench.timing import event_times, machine, peak_gpu_memory, reason, save

TARGET = (8192, 32768)
"""What the claims are about: measured first, and with alpha learned too."""
GPU_SHAPES = (TARGET, (8192, 4096), (4096, 50257), (32768, 1024), (2048, 131072), (65536, 128))
GPU_ALPHAS = (1.5, 2.0, 1.3, 1.05)
GPU_SCALES = (1.0, 0.1)
"""Deviations of normal scores: few and many of them get weight."""
CHECKED = 64
"""Rows whose weights are compared with those in fp64."""


def run(output: Path | None, *, repeats: int, threads: int, device: str | None = None) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device}")
    torch.manual_seed(0)
    if device == "cuda":
        _run_gpu(output, repeats)
    else:
        run_on_cpu(output, repeats, threads)


# ---------------------------------------------------------------------------------------------------------------
# The row kernels on a GPU


def _run_gpu(output: Path | None, repeats: int) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tamis bench transforms --device cuda needs a CUDA device")
    rows: list[Row] = []

    def keep() -> None:  # as it goes: what was measured should not be lost
        if output is not None:
            save(output / "transforms-gpu.json", {"benchmark": "row kernels", "machine": machine(), "rows": rows})

    cases = [(shape, dtype) for shape in GPU_SHAPES for dtype in (torch.float32, torch.bfloat16)]
    for shape, dtype in cases:
        rows += _gpu_rows(shape, dtype, repeats)
        keep()
    # Some tune themselves for long: last, so that not the rest is lost if somebody loses patience.
    for shape, dtype in cases:
        own = [row for row in rows if (row["shape"], row["dtype"]) == (shape, str(dtype))]
        _add_peers(own, _scores(shape, dtype, GPU_SCALES[0]), repeats)
        keep()
    _print_gpu(rows)


def _scores(shape: tuple[int, int], dtype: torch.dtype, scale: float) -> Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


def _gpu_rows(shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> list[Row]:
    todo = [("weights", _gpu_weights, scale) for scale in GPU_SCALES] + [("loss", _gpu_loss, GPU_SCALES[0])]
    if shape == TARGET:
        todo.append(("learned alpha", _gpu_learned, GPU_SCALES[0]))
    rows: list[Row] = []
    for name, measure, scale in todo:
        scores = _scores(shape, dtype, scale)
        for alpha in GPU_ALPHAS:
            label: Row = {"shape": shape, "dtype": str(dtype), "scale": scale, "alpha": alpha}
            try:
                rows += [label | row for row in measure(scores, alpha, repeats)]
            except Exception as error:  # ours fails: the other cases should not be lost with this one
                rows.append(label | {"pass": name, "unsupported": {"tamis": reason(error)}})
    return rows


def _gpu_weights(scores: Tensor, alpha: float, repeats: int) -> list[Row]:
    """Times of one alpha, in microseconds."""

    def ours(z: Tensor) -> Tensor:
        return functional.entmax(z, alpha, backend="triton")

    exact = functional.entmax(scores[:CHECKED].double(), alpha)
    error = _distance(ours(scores), exact)
    _refuse(error, 1e-5 if scores.dtype == torch.float32 else 2e-2)
    results = []
    for name, wrap in passes(scores).items():
        row: Row = {"pass": name, "zeros": (exact == 0.0).double().mean().item(), "errors": {"tamis": error}}
        row |= _beside(wrap(ours), "softmax", wrap(softmax), repeats)
        if name == "forward":  # read once, written once
            size = scores.numel() * scores.element_size()
            row["terabytes_per_second"] = 2 * size / row["tamis"]["median_us"] / 1e6
        results.append(row)
    return results


def _gpu_loss(scores: Tensor, alpha: float, repeats: int) -> list[Row]:
    """The loss beside cross-entropy, forward and backward; the peak of memory includes the gradient."""
    leaf = scores.detach().requires_grad_()
    target = torch.randint(scores.shape[1], scores.shape[:1], device=scores.device)

    def ours(z: Tensor, count: int | None = None) -> Tensor:
        return functional.entmax_loss(z[:count], target[:count], alpha, backend="triton")

    exact = functional.entmax_loss(scores[:CHECKED].double(), target[:CHECKED], alpha).item()
    error = abs(ours(scores, CHECKED).item() / exact - 1.0)
    _refuse(error, 1e-5 if scores.dtype == torch.float32 else 2e-2)
    calls = {
        "tamis": lambda: torch.autograd.grad(ours(leaf), leaf),
        "cross_entropy": lambda: torch.autograd.grad(F.cross_entropy(leaf, target), leaf),
    }
    row: Row = {"pass": "loss", "errors": {"tamis": error}}
    row |= _beside(calls["tamis"], "cross_entropy", calls["cross_entropy"], repeats)
    size = scores.numel() * scores.element_size()
    row["peak_memory_over_input"] = {name: peak_gpu_memory(call) / size for name, call in calls.items()}
    return [row]


def _gpu_learned(scores: Tensor, alpha: float, repeats: int) -> list[Row]:
    """Forward and backward where every row has an alpha of its own, which gets a gradient too."""
    leaf, upstream = scores.detach().requires_grad_(), torch.randn_like(scores)
    alphas = torch.full((len(scores), 1), alpha, device=scores.device, requires_grad=True)

    def gradients(z: Tensor, alphas: Tensor, upstream: Tensor, backend: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(functional.entmax(z, alphas, backend=backend), (z, alphas), upstream)

    def ours() -> tuple[Tensor, ...]:
        return gradients(leaf, alphas, upstream, "triton")

    z, a = (x.detach()[:CHECKED].double().requires_grad_() for x in (leaf, alphas))
    exact = gradients(z, a, upstream[:CHECKED].double(), "reference")[1]
    # Rounded scores may lie at the threshold, where the gradient jumps: at alpha = 2 in bf16 in one row of fourteen.
    threshold, _ = functional.entmax_threshold(z.detach(), alpha)
    clear = ((alpha - 1.0) * z.detach() - threshold).abs().amin(-1) > 1e-9
    error = ((ours()[1][:CHECKED] - exact)[clear].norm() / exact[clear].norm()).item()
    _refuse(error, 1e-3 if scores.dtype == torch.float32 else 2e-2)
    row: Row = {"pass": "forward+backward, learned alpha", "errors": {"tamis": error}}
    return [row | _beside(ours, "softmax", passes(scores)["forward+backward"](softmax), repeats)]


def _beside(ours: Callable[[], object], name: str, dense: Callable[[], object], repeats: int) -> Row:
    times = {"tamis": event_times(ours, repeats), name: event_times(dense, repeats)}
    return {**times, f"over_{name}": times["tamis"]["median_us"] / times[name]["median_us"]}


def _distance(weights: Tensor, exact: Tensor) -> float:
    return (weights[: len(exact)].double() - exact).abs().sum(-1).max().item()


def _refuse(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise RuntimeError(f"off by {error:g}: not timed")


def _add_peers(rows: list[Row], scores: Tensor, repeats: int) -> None:
    """Times of the peers, at one alpha; of one that is not exact to 1e-3, or 2e-2 in bf16, only its error."""
    alpha = 1.5
    exact = functional.entmax(scores[:CHECKED].double(), alpha)
    tolerance = 1e-3 if scores.dtype == torch.float32 else 2e-2
    peers = {"entmax": peer(alpha), "adasplash": _adasplash(alpha)}
    timed = passes(scores)
    for row in rows:
        if row["pass"] not in timed or (row["alpha"], row["scale"]) != (alpha, GPU_SCALES[0]):
            continue
        for name, other in peers.items():
            if other is None:
                continue
            try:
                row["errors"][name] = _distance(other(scores), exact)
                if row["errors"][name] <= tolerance:
                    row[name] = event_times(timed[row["pass"]](other), repeats)
            except Exception as error:  # a peer that cannot do this is part of the result
                row.setdefault("unsupported", {})[name] = reason(error)


def _adasplash(alpha: float) -> Transform | None:
    """Its entmax over rows, which takes 1 < alpha <= 2."""
    try:
        module: Any = importlib.import_module("adasplash")
    except ImportError:
        return None
    function = getattr(module, "triton_entmax", None)
    return None if function is None else lambda z: function(z, alpha)


def _print_gpu(rows: list[Row]) -> None:
    table = Table(title="row kernels on a GPU, microseconds (median)")
    columns = ("shape", "dtype", "scale", "alpha", "pass", "tamis", "softmax or CE", "ratio", "entmax", "adasplash")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        shown = ["x".join(map(str, row["shape"])), row["dtype"].removeprefix("torch.")]
        shown += [f"{row['scale']:g}", f"{row['alpha']:g}", row["pass"]]
        dense = "cross_entropy" if row["pass"] == "loss" else "softmax"
        ratio = f"{row[f'over_{dense}']:.2f}x" if dense in row else "-"
        table.add_row(*shown, _us(row, "tamis"), _us(row, dense), ratio, _us(row, "entmax"), _us(row, "adasplash"))
    console = Console(width=140)
    console.print(table)
    for row in rows:
        for name, why in row.get("unsupported", {}).items():
            console.print(f"{name}, {row['shape']}, {row['dtype']}, {row['alpha']}, {row['pass']}: {why}", markup=False)


def _us(row: Row, name: str) -> str:
    return f"{row[name]['median_us']:.0f}" if name in row else "-"
