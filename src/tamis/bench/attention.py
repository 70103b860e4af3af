"""`tamis bench attention`: attention on the CPU beside `F.scaled_dot_product_attention`, sentences and longer texts."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis import functional
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.bench.timing import alternate, machine, peak_memory, save
from tamis.native import status

HEADS = 8
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Random inputs, and what is computed of them."""

    batch: int
    length: int
    rules: tuple[str, ...] = ("alpha 1.5", "learned")
    causal: bool = False
    sharpness: float = 1.0
    """What queries are multiplied by."""
    head_dim: int = 64


CASES = (
    Case(64, 32),
    Case(64, 128),
    Case(8, 1024, ("alpha 1.5", "learned", "relu")),
    Case(8, 1024, causal=True, sharpness=3.0),
    Case(1, 4096, causal=True, sharpness=3.0),
    Case(64, 128, ("alpha 1.1",)),
    Case(8, 1024, ("alpha 1.1",)),
    Case(64, 36),
    Case(64, 100),
    Case(8, 1000),
    Case(64, 128, head_dim=80),
)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Lengths of the picture: one causal text of random queries and keys."""
ALIBI = (4, 8192, 16384)  # heads, and the two lengths
DECODING = (16, 32768, 0.3)  # heads, keys, and what makes about one key in a hundred have a weight
MEMORY = 4096


def run(output: Path | None, *, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    memory = _memory()  # first: it should not hide in what the others leave behind
    record: dict[str, Any] = {
        "benchmark": "attention",
        "machine": machine(),
        "native": status().loaded,
        "heads": HEADS,
        "peak_bytes": memory,
        "rows": [_row(case, repeats) for case in CASES],
        "alibi": _alibi(repeats),
        "decoding": _decoding(repeats),
        "lengths": [_row(Case(1, length, causal=True), max(2, repeats // 3)) for length in LENGTHS],
    }
    _print(record)
    if output is not None:
        name = f"attention-cpu-{record['native'] or 'plain'}"
        save(output / f"{name}.json", record)
        draw(record, output / f"{name}.png")


def _row(case: Case, repeats: int) -> dict[str, Any]:
    """Forward and backward, and the share of weights that are not 0."""
    shape = (case.batch, HEADS, case.length, case.head_dim)
    query, key, value = (torch.randn(shape) for _ in range(3))
    query.mul_(case.sharpness)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    upstream = torch.randn(shape)

    def both(attention: Callable[[], Tensor], *more: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(), (*inputs, *more), upstream)

    calls = {"sdpa": both(lambda: F.scaled_dot_product_attention(*inputs, is_causal=case.causal))}
    densities = {}
    for name in case.rules:
        rule, parameters = _rule(name)
        _check(inputs, rule, case.causal)
        densities[name] = _density(inputs, rule, case.causal)
        calls[name] = both(_attention(inputs, rule, case.causal), *parameters)
    # Short calls are more at the mercy of the machine, and cost little to repeat.
    times = alternate(calls, repeats * (8 if case.length * case.batch < 4096 else 1))
    return {
        "batch": case.batch,
        "length": case.length,
        "head_dim": case.head_dim,
        "causal": case.causal,
        "sharpness": case.sharpness,
        "density": densities,
        "times": times,
        "over_sdpa": {name: times[name]["min_ms"] / times["sdpa"]["min_ms"] for name in case.rules},
    }


def _attention(inputs: Inputs, rule: Rule, causal: bool) -> Callable[[], Tensor]:
    return lambda: functional.attention(*inputs, rule=rule, is_causal=causal)


def _rule(name: str) -> tuple[Rule, tuple[Tensor, ...]]:
    """A rule by its name, and the parameters that it has gradients of."""
    if name == "relu":
        return Activation("relu"), ()
    if name == "learned":
        alphas = torch.linspace(1.05, 1.9, HEADS).requires_grad_()
        return Entmax(alphas), (alphas,)
    return Entmax(float(name.removeprefix("alpha "))), ()


def _density(inputs: Inputs, rule: Rule, causal: bool) -> float:
    query, key, value = (x[:2] for x in inputs)
    return (
        1.0 - functional.attention_statistics(query, key, value, rule=rule, is_causal=causal).zero_share.mean().item()
    )


def _check(inputs: Inputs, rule: Rule, causal: bool) -> None:
    """Refuse to time what is not right: agreement with dense weights in fp64, on two sequences of up to 512 tokens."""
    q, k, v = (x[:2, :, :512].detach() for x in inputs)
    ours = functional.attention(q, k, v, is_causal=causal, rule=rule).double()
    weights = functional.attention_weights(q.double(), k.double(), is_causal=causal, rule=rule)
    exact = weights @ v.double()
    error = ((ours - exact).norm() / exact.norm()).item()
    if not error <= 1e-5:
        raise RuntimeError(f"{rule}: output off by {error:g}: not timed")


def _memory() -> dict[str, int | None]:
    """Bytes by which the process grows at most, of one causal text."""
    peaks: dict[str, int | None] = {}
    attentions: dict[str, Callable[..., Tensor]] = {
        "sdpa": F.scaled_dot_product_attention,
        "alpha 1.5": functional.entmax_attention,
        "learned": lambda *x, **o: functional.attention(*x, rule=_rule("learned")[0], **o),
    }
    for name, attention in attentions.items():
        inputs = [torch.randn(1, HEADS, MEMORY, 64, requires_grad=True) for _ in range(3)]
        attention(*(x[:, :, :64] for x in inputs), is_causal=True).sum().backward()  # starts threads
        for x in inputs:
            x.grad = None
        gc.collect()
        _give_back()
        peaks[name] = peak_memory(lambda a=attention, x=inputs: a(*x, is_causal=True).sum().backward())  # type: ignore[misc]
    return peaks


def _give_back() -> None:
    """Hand memory that nobody uses back to the system, or the next call would seem to need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _alibi(repeats: int) -> dict[str, Any]:
    """Whether time grows with the length alone: keys out of reach are not looked at."""
    heads, *lengths = ALIBI
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    calls: dict[str, Callable[[], object]] = {}
    for length in lengths:
        query, key, value, upstream = (torch.randn(1, heads, length, 64, requires_grad=True) for _ in range(4))

        def both(query: Tensor = query, key: Tensor = key, value: Tensor = value, up: Tensor = upstream) -> object:
            out = functional.entmax_attention(query, key, value, is_causal=True, alibi_slopes=slopes)
            return torch.autograd.grad(out, (query, key, value), up)

        calls[str(length)] = both
    times = alternate(calls, repeats)
    first, second = (times[str(length)]["min_ms"] for length in lengths)
    return {"heads": heads, "lengths": lengths, "times": times, "ratio": second / first}


def _decoding(repeats: int) -> dict[str, Any]:
    """One query to a cache, whose keys lie as they came and, as Tamis keeps them, across."""
    heads, length, sharpness = DECODING
    query = torch.randn(1, heads, 1, 64) * sharpness
    key, value = (torch.randn(1, heads, length, 64) for _ in range(2))
    across = key.mT.contiguous().mT
    with torch.inference_mode():
        density = functional.attention_statistics(query, key).support_size.mean().item() / length
        times = alternate(
            {
                "sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
                "alpha 1.5": lambda: functional.entmax_attention(query, key, value),
                "alpha 1.5, keys across": lambda: functional.entmax_attention(query, across, value),
            },
            repeats * 4,
        )
    base = times["sdpa"]["min_ms"]
    ratios = {name: some["min_ms"] / base for name, some in times.items()}
    return {"heads": heads, "keys": length, "density": density, "times": times, "over_sdpa": ratios}


def _print(record: dict[str, Any]) -> None:
    build = record["native"] or "none: plain torch"
    table = Table(title=f"forward+backward on CPU, fp32, H {HEADS}: times over SDPA's softmax; C++ kernels {build}")
    for column in ("B", "L", "D", "", "q", "rule", "density", "SDPA ms", "over SDPA"):
        table.add_column(column, justify="right")
    for row in record["rows"]:
        for name, ratio in row["over_sdpa"].items():
            table.add_row(
                *(str(row[key]) for key in ("batch", "length", "head_dim")),
                "causal" if row["causal"] else "full",
                f"x{row['sharpness']:g}",
                name,
                f"{row['density'][name]:.3f}",
                f"{row['times']['sdpa']['min_ms']:.1f}",
                f"{ratio:.2f}",
            )
    console = Console(width=110)
    console.print(table)
    alibi, decoding, peaks = record["alibi"], record["decoding"], record["peak_bytes"]
    first, second = alibi["lengths"]
    console.print(
        f"ALiBi, alpha 1.5, {alibi['heads']} heads: {alibi['ratio']:.2f} times as long at {second} as at {first}"
    )
    rest = ", ".join(f"{name} {ratio:.2f}" for name, ratio in decoding["over_sdpa"].items() if name != "sdpa")
    sizes = f"{decoding['heads']} heads, {decoding['keys']} keys, {decoding['density']:.1%} with a weight"
    console.print(f"one query, {sizes}, over SDPA: {rest}")
    if peaks["sdpa"]:
        rest = ", ".join(f"{name} {peak / peaks['sdpa']:.2f}" for name, peak in peaks.items() if name != "sdpa")
        console.print(f"peak memory at {MEMORY} tokens over SDPA's {peaks['sdpa'] / 1e6:.0f} MB: {rest}")


def draw(record: dict[str, Any], path: Path) -> None:
    """Time against length, dense and sparse."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install 'tamis[plots]'") from None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = [row["length"] for row in record["lengths"]]
    names = {"sdpa": "softmax (SDPA)", "alpha 1.5": "alpha 1.5", "learned": "learned, 1.05 to 1.9"}
    for name, label in names.items():
        left.plot(lengths, [row["times"][name]["min_ms"] for row in record["lengths"]], marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, forward + backward", xticks=lengths)
    for name in ("alpha 1.5", "learned"):
        right.plot(
            lengths, [row["over_sdpa"][name] for row in record["lengths"]], marker="o", color=f"C{len(right.lines) + 1}"
        )
    right.axhline(1.0, color="C0")
    right.set(xscale="log", xlabel="tokens", ylabel="time / softmax", ylim=(0.0, None), xticks=lengths)
    for panel in (left, right):
        panel.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    left.legend()
    machine = record["machine"]
    figure.suptitle(
        f"One causal text, {HEADS} heads of 64, fp32, {machine['threads']} cores of an {machine['cpu']}", fontsize=10
    )
    figure.savefig(path, dpi=130)
