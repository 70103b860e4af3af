"""The CPU part of `tamis bench transforms`: rows and their loss beside torch's dense ones, for each build of kernels.

Every build of the C++ kernels that this CPU can run is timed in a process of its own, or with TAMIS_NATIVE set to one
("0": plain torch) that alone; its results join those of the others in the file.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.bench.timing import alternate, machine, reason, save
from tamis.native import library

FILE = "transforms-cpu.json"
PLAIN = "0"
"""What TAMIS_NATIVE is for plain torch."""


@dataclass(frozen=True)
class Case:
    """One row of the table: scores, what is timed on them, and which share of the dense time is asked of it."""

    shape: tuple[int, int]
    scale: float
    alpha: float
    kind: str = "forward"
    """Or "forward+backward", "learned alpha" (the same with an alpha of its own for each row) or "loss"."""
    target: float | None = None


CASES = (
    *(Case((4096, 512), 1.0, alpha, target=most) for alpha, most in ((1.5, 1.2), (2.0, 1.0), (1.3, 3.5), (1.1, 5.0))),
    *(Case((4096, 512), 3.0, alpha, target=most) for alpha, most in ((1.5, 0.9), (2.0, 0.7), (1.3, 2.5), (1.1, 4.0))),
    *(Case((64, 32000), 1.0, alpha, target=most) for alpha, most in ((1.5, 0.6), (1.3, 0.8))),
    *(Case(shape, 1.0, a, target=most) for shape in ((4096, 64), (16384, 32)) for a, most in ((1.5, 2.5), (1.3, 7.0))),
    Case((4096, 512), 1.0, 1.5, "forward+backward", 1.5),
    Case((4096, 512), 1.0, 1.5, "learned alpha", 4.0),
    Case((512, 32000), 1.0, 1.5, "loss", 1.0),
    *(Case(shape, 1.0, a) for shape in ((4096, 60), (4096, 500), (64, 30001)) for a in (1.5, 1.3)),
)
PEER_SHAPE = (4096, 512)
"""Where the `entmax` package is timed too."""
MEMORY_ALPHAS = (1.5, 2.0, 1.3, 1.05)

Transform = Callable[[Tensor], Tensor]
Call = Callable[[], object]
Row = dict[str, Any]


def run(output: Path | None, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    named = os.environ.get(library.VARIABLE)
    if named in (PLAIN, *library.NAMES.values()) or not library.status().built:
        measure(output, library.status().loaded or "plain", repeats)
        return
    for name in library.status().built:
        command = [sys.executable, "-m", "tamis", "bench", "transforms", "--device", "cpu"]
        command += ["--repeats", str(repeats), "--threads", str(threads)]
        command += ["--output", str(output)] if output is not None else []
        found = subprocess.run(command, env=os.environ | {library.VARIABLE: name}, stderr=subprocess.PIPE, text=True)
        if found.returncode:  # not every CPU runs every build
            print(f"{name}: {reason(RuntimeError(found.stderr))}")


def measure(output: Path | None, build: str, repeats: int) -> None:
    """Time all cases with the build that is loaded."""
    if build != "plain":
        library.load()  # raises where it is not to be had
    keep_memory()
    torch.manual_seed(0)
    rows = [time_case(case, repeats) for case in CASES]
    memory = {str(alpha): _memory_factor(alpha) for alpha in MEMORY_ALPHAS}
    show(build, rows, memory)
    if output is not None:
        record = _before(output / FILE)
        record["builds"][build] = {"rows": rows, "peak_memory_over_input": memory}
        save(output / FILE, record)


def keep_memory() -> None:
    """Have freed memory stay with the process: else what was freed before decides whether results lie in fresh pages,
    which cost more than softmax.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # of glibc
        never_map, trim_threshold = -4, -1
        mallopt(never_map, 0)
        mallopt(trim_threshold, 2**31 - 1)


def _before(path: Path) -> Row:
    """The record of other builds on this machine, or an empty one."""
    record: Row = {"benchmark": "transforms", "machine": machine(), "builds": {}}
    if path.is_file():
        old: Row = json.loads(path.read_text())
        if old.get("machine") == record["machine"] and "builds" in old:
            return old
    return record


def time_case(case: Case, repeats: int) -> Row:
    """Times of ours, of torch's, of the least that memory allows and, on one shape, of the peer."""
    scores = case.scale * torch.randn(case.shape)
    row: Row = asdict(case)
    ours = _ours(case)
    if case.kind == "loss":
        calls = _loss_calls(scores, case.alpha)
    else:
        row["mass_error"], row["disagreement"] = check(ours, scores, case.alpha)
        wrap = passes(scores)[case.kind if case.kind in passes(scores) else "forward+backward"]
        calls = {"tamis": wrap(ours), "dense": wrap(softmax), "floor": _floor(scores, case.kind)}
        if case.kind == "learned alpha":
            calls["tamis"] = _learned(scores, case.alpha)
        elif case.shape == PEER_SHAPE and (other := peer(case.alpha)) is not None:
            try:
                wrap(other)()
                calls["entmax"] = wrap(other)
            except Exception as error:  # a peer that cannot do this is part of the result
                row["unsupported"] = {"entmax": reason(error)}
    theirs = calls.pop("entmax", None)
    if theirs is not None:
        # Apart, and with a call in between: its megabytes push those of the next call out of the caches.
        beside = alternate({"entmax": theirs, "between": calls["tamis"], "tamis": calls["tamis"]}, repeats)
        row["entmax"] = beside["entmax"]
        row["faster_than_entmax"] = beside["entmax"]["min_ms"] / beside["tamis"]["min_ms"]
    row |= alternate(calls, repeats)
    row["over_dense"] = row["tamis"]["min_ms"] / row["dense"]["min_ms"]
    return row


def _ours(case: Case) -> Transform:
    return lambda z: functional.entmax(z, case.alpha)


def passes(scores: Tensor) -> dict[str, Callable[[Transform], Call]]:
    """By name, what makes of a transform the call to be timed."""
    leaf, upstream = scores.clone().requires_grad_(), torch.randn_like(scores)
    return {
        "forward": lambda call: lambda: call(scores),
        "forward+backward": lambda call: lambda: torch.autograd.grad(call(leaf), leaf, upstream),
    }


def _learned(scores: Tensor, alpha: float) -> Call:
    leaf, upstream = scores.clone().requires_grad_(), torch.randn_like(scores)
    alphas = torch.full((len(scores), 1), alpha, requires_grad=True)
    return lambda: torch.autograd.grad(functional.entmax(leaf, alphas), (leaf, alphas), upstream)


def _loss_calls(scores: Tensor, alpha: float) -> dict[str, Call]:
    """The loss beside cross-entropy, forward and backward."""
    leaf = scores.requires_grad_()
    target = torch.randint(scores.shape[1], scores.shape[:1])
    exact = functional.entmax_loss(scores[:8].detach().double(), target[:8], alpha, backend="reference").item()
    error = abs(functional.entmax_loss(scores[:8].detach(), target[:8], alpha).item() / exact - 1.0)
    if not error <= 1e-5:
        raise RuntimeError(f"the loss at alpha {alpha} is off by {error:g}: not timed")
    return {
        "tamis": lambda: torch.autograd.grad(functional.entmax_loss(leaf, target, alpha), leaf),
        "dense": lambda: torch.autograd.grad(F.cross_entropy(leaf, target), leaf),
        "floor": _floor(scores.detach(), "loss"),
    }


def _floor(scores: Tensor, kind: str) -> Call:
    """What reads and writes the same bytes, and does no more: results in fresh memory, as those of a transform are."""
    if kind == "forward":
        return scores.clone
    if kind == "loss":
        return lambda: (scores.amax(-1), scores.clone())
    return lambda: (scores.clone(), torch.add(scores, scores))


def softmax(z: Tensor) -> Tensor:
    return z.softmax(-1)


def peer(alpha: float) -> Transform | None:
    """The fastest way to the same weights in the `entmax` package."""
    try:
        entmax: Any = importlib.import_module("entmax")
    except ModuleNotFoundError:
        return None
    special = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}
    if alpha in special:
        return lambda z: special[alpha](z, -1)
    return lambda z: entmax.entmax_bisect(z, alpha, -1)


def check(ours: Transform, scores: Tensor, alpha: float) -> tuple[float, float]:
    """Refuse to time what is not right: mass, and agreement with the solution in fp64 by plain torch."""
    weights = ours(scores).double()
    mass_error = (weights.sum(-1) - 1.0).abs().max().item()
    exact = functional.entmax(scores.double(), alpha, backend="reference")
    disagreement = (weights - exact).abs().sum(-1).max().item()
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


def show(build: str, rows: list[Row], memory: dict[str, float | None]) -> None:
    table = Table(title=f"entmax on CPU ({build}), fp32, milliseconds (minimum of alternated calls)")
    for column in ("scores", "std", "alpha", "pass", "tamis", "dense", "floor", "over dense", "target", "over entmax"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for row in rows:
        table.add_row(
            "x".join(map(str, row["shape"])),
            f"{row['scale']:g}",
            f"{row['alpha']:g}",
            row["kind"],
            *(f"{row[name]['min_ms']:.2f}" for name in ("tamis", "dense", "floor")),
            f"{row['over_dense']:.2f}",
            "-" if row["target"] is None else f"{row['target']:g}",
            f"1/{row['faster_than_entmax']:.0f}" if "entmax" in row else "-",
        )
    console = Console(width=110)
    console.print(table)
    console.print("dense: softmax, or cross-entropy for the loss.  floor: the same bytes, read and written.")
    shown = ", ".join(f"alpha {alpha}: {factor:.2f}x" for alpha, factor in memory.items() if factor is not None)
    console.print(f"peak memory of a forward pass over its input: {shown or 'not known on this system'}")
