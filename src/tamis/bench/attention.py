"""`tamis bench attention`: attention on the CPU beside `F.scaled_dot_product_attention`, sentences and longer texts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.attention.rules import Entmax
from tamis.bench.timing import alternate, machine, peak_memory, save

HEADS, HEAD_DIM = 8, 64
SIZES = ((64, 32), (64, 128), (8, 1024))  # sequences and their length
LONG = 16384


def run(output: Path | None, *, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    long = _long()  # first: its memory should not hide in what the others leave behind
    rows = [_case(batch, length, causal, repeats) for batch, length in SIZES for causal in (False, True)]
    table = Table(title=f"forward+backward on CPU, fp32, H {HEADS}, D {HEAD_DIM}: times over SDPA's softmax")
    names = [name for name in rows[0]["over_sdpa"] if name != "sdpa"]
    for column in ("B", "L", "causal", "SDPA ms", *names):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = (f"{row['over_sdpa'][name]:.2f}x" for name in names)
        sizes = (str(row[name]) for name in ("batch", "length", "causal"))
        table.add_row(*sizes, f"{row['times']['sdpa']['min_ms']:.1f}", *ratios)
    console = Console(width=110)
    console.print(table)
    seconds = " + ".join(f"{long[name]:.1f} s" for name in ("forward_s", "backward_s"))
    memory = "?" if long["peak_bytes"] is None else f"{long['peak_bytes'] / 1e6:.0f} MB"
    console.print(f"alpha 1.5, causal, one head, {LONG} x {LONG}: {seconds}, {memory} more at the peak")
    if output is not None:
        record = {
            "benchmark": "attention",
            "machine": machine(),
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "rows": rows,
            "long": long,
        }
        save(output / "attention-cpu.json", record)


def _long() -> dict[str, Any]:
    """Forward and backward of one long head: memory is linear in its length."""
    query, key, value = (torch.randn(1, 1, LONG, HEAD_DIM, requires_grad=True) for _ in range(3))
    times = [time.perf_counter()]

    def both() -> None:
        out = functional.entmax_attention(query, key, value, is_causal=True)
        times.append(time.perf_counter())
        out.sum().backward()
        times.append(time.perf_counter())

    peak = peak_memory(both)
    return {
        "length": LONG,
        "forward_s": times[1] - times[0],
        "backward_s": times[2] - times[1],
        "peak_bytes": peak,
        "inputs_bytes": 4 * sum(x.numel() for x in (query, key, value)),
    }


def _case(batch: int, length: int, causal: bool, repeats: int) -> dict[str, Any]:
    query, key, value = (torch.randn(batch, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    upstream = torch.randn_like(query)
    alphas = (1.0 + torch.rand(HEADS)).requires_grad_()

    def both(attention: Callable[[], Tensor], *more: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(), (query, key, value, *more), upstream)

    def entmax(alpha: float | Tensor) -> Callable[[], Tensor]:
        return lambda: functional.entmax_attention(query, key, value, is_causal=causal, alpha=alpha)

    calls = {
        "sdpa": both(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)),
        "alpha 1.5": both(entmax(1.5)),
        "alpha 2": both(entmax(2.0)),
        "alpha 1.3": both(entmax(1.3)),
        "learned alpha": both(entmax(alphas), alphas),
        "relu": both(lambda: functional.relu_attention(query, key, value, is_causal=causal)),
    }
    _check(query, key, value, causal)
    times = alternate(calls, repeats)
    base = times["sdpa"]["min_ms"]
    ratios = {name: time["min_ms"] / base for name, time in times.items()}
    return {"batch": batch, "length": length, "causal": causal, "times": times, "over_sdpa": ratios}


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    """Refuse to time what is not right: agreement with dense weights in fp64, on two sequences."""
    q, k, v = (x[:2].detach() for x in (query, key, value))
    for alpha in (1.3, 1.5, 2.0):
        ours = functional.entmax_attention(q, k, v, is_causal=causal, alpha=alpha).double()
        exact = functional.attention_weights(q.double(), k.double(), is_causal=causal, rule=Entmax(alpha)) @ v.double()
        error = ((ours - exact).norm() / exact.norm()).item()
        if not error <= 1e-5:
            raise RuntimeError(f"alpha {alpha}: output off by {error:g}: not timed")
