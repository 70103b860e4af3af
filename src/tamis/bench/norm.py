"""`tamis bench kernels --norm`: the norm of ReLA and its gate on a GPU, beside its plain operations and F.rms_norm.

Times are replays of captured CUDA graphs.  A copy says what memory allows: it reads and writes what the forward pass
does, and the backward pass moves half as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from tamis.bench.kernels import graph_time
from tamis.bench.timing import machine, save
from tamis.kernels.rela_norm import ops
from tamis.mechanisms.rela import EPSILON, ReLANorm, plain_norm

CASES = [(tokens, channels) for tokens in (65536, 8192) for channels in (512, 1024, 2048)]
TOLERANCE = 2e-2
"""Largest error of bf16, relative to the greatest number."""


def run(output: Path | None, cases: list[tuple[int, int]] | None = None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tamis bench kernels --norm needs a CUDA device")
    rows = []
    for tokens, channels in track(cases or CASES, "timing", console=Console(stderr=True)):
        rows.append(row(tokens, channels))
        if output is not None:
            record = {"benchmark": "kernels, norm of ReLA", "machine": machine(), "dtype": "bfloat16"}
            save(output / "kernels-norm-gpu.json", {**record, "rows": rows})
    _print(rows)


def row(tokens: int, channels: int, device: str = "cuda") -> dict[str, Any]:
    torch.manual_seed(0)
    norm = ReLANorm(channels, 64).to(device)
    z, grad = (torch.randn(tokens, channels, device=device).relu().to(torch.bfloat16) for _ in range(2))
    z.requires_grad_()
    gain, gate = norm.parameters()
    leaves = (z, gain, gate)
    torch.compiler.reset()  # one shape is compiled after the other
    compiled = torch.compile(plain_norm)
    calls: dict[str, Callable[[], Tensor]] = {
        "tamis": lambda: ops.rela_norm(*leaves, EPSILON, plain_norm),
        "plain": lambda: plain_norm(*leaves),
        "compiled": lambda: compiled(*leaves),
        "rms_norm": lambda: F.rms_norm(z, (channels,), gain.to(z.dtype), EPSILON),
    }

    def both(call: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(), leaves[: 2 if call is calls["rms_norm"] else 3], grad)

    errors = _errors(leaves, grad, [calls["tamis"](), *both(calls["tamis"])])
    times = {}
    with torch.no_grad():
        copy = graph_time(lambda: z.clone())
        for name, call in calls.items():
            times[name] = {"forward_us": graph_time(call)}
    for name, call in calls.items():
        times[name]["both_us"] = graph_time(partial(both, call))
    return {"tokens": tokens, "channels": channels, "copy_us": copy, "times": times, "errors": errors}


def _errors(leaves: tuple[Tensor, ...], grad: Tensor, found: list[Tensor]) -> dict[str, float]:
    """Return the errors of output and gradients against fp64, relative to the greatest number; refuse wrong ones."""
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    y = plain_norm(*exact_leaves)
    errors = {}
    exact = (y, *torch.autograd.grad(y, exact_leaves, grad.double()))
    for name, ours, wanted in zip(("y", "dz", "dgain", "dgate"), found, exact, strict=True):
        errors[name] = ((ours.double() - wanted).abs().max() / wanted.abs().max()).item()
        if not errors[name] < TOLERANCE:
            raise RuntimeError(f"{name} is off by {errors[name]:g}")
    return errors


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title="norm of ReLA with its gate, bf16; microseconds, and over copies of as many bytes")
    names = list(rows[0]["times"])
    for column in ("tokens", "channels", "copy", *names, *(f"{name}, both" for name in names)):
        table.add_column(column, justify="right")
    for line in rows:
        shown = [str(line["tokens"]), str(line["channels"]), f"{line['copy_us']:.0f}"]
        for what, copies in (("forward_us", 1.0), ("both_us", 2.5)):
            for name in names:
                us = line["times"][name][what]
                shown.append(f"{us:.0f} ({us / line['copy_us'] / copies:.2f}x)")
        table.add_row(*shown)
    Console(width=150).print(table)
