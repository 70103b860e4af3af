"""`tamis bench kernels --short`: fused attention at translation lengths on a GPU, beside its peers.

Times are replays of captured CUDA graphs, which leave launch costs out; those are measured apart.  Outputs are checked
against dense fp64 weights.
"""

from __future__ import annotations

import time
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis import functional
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.bench.timing import event_times, machine, save

HEADS, HEAD_DIM, TOKENS = 8, 64, 8192
LENGTHS = (32, 64, 128, 256, 512)
SHAPES = ("full", "causal", "cross")
OURS = ("alpha 1.5", "alpha 2", "learned alpha", "relu")
DROPOUT = 0.1


def run_short(output: Path | None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tamis bench kernels needs a CUDA device")
    torch.manual_seed(0)
    cases = [(length, shape) for length in LENGTHS for shape in SHAPES]
    rows: list[dict[str, Any]] = []
    for length, shape in track(cases, "timing", console=Console(stderr=True)):
        rows.append(_Case(length, shape).row())
        if output is not None:  # as it goes: compiling takes minutes, and what was measured should not be lost
            save(output / "kernels-short-gpu.json", _record(rows))
    # Some tune themselves for long: last, so that not the rest is lost if somebody loses patience.
    for row in track(rows, "peers", console=Console(stderr=True)):
        _Case(row["length"], row["shape"]).add_peers(row)
        if output is not None:
            save(output / "kernels-short-gpu.json", _record(rows))
    _print(rows)
    if output is not None:
        draw(rows, output / "kernels-short-gpu.png")


def _record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "kernels, short rows",
        "machine": machine(),
        "dtype": "bfloat16",
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "tokens": TOKENS,
        "dropout": DROPOUT,
        "rows": rows,
    }


class _Case:
    """Inputs of one length and shape, and the calls that take them."""

    def __init__(self, length: int, shape: str) -> None:
        self.length, self.shape = length, shape
        self.causal = shape == "causal"
        keys = length * 3 // 4 if shape == "cross" else length  # a source sentence shorter than its translation
        batch = TOKENS // length

        def draw_one(count: int) -> Tensor:
            return torch.randn(batch, HEADS, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        self.query, self.key, self.value = draw_one(length), draw_one(keys), draw_one(keys)
        self.grad = torch.randn_like(self.query)
        self.alphas = torch.linspace(1.1, 1.9, HEADS, device="cuda", requires_grad=True)
        self.lengths = torch.randint(keys // 2, keys + 1, (batch,), device="cuda")

    def row(self) -> dict[str, Any]:
        times = {name: self._time(call, leaves) for name, (call, leaves) in self._calls().items()}
        base = times["sdpa flash"]["both_us"]
        return {
            "length": self.length,
            "shape": self.shape,
            "times": times,
            "over_flash": {name: t["both_us"] / base for name, t in times.items()},
            "padding_and_dropout_over_without": self._padding_and_dropout(),
            "errors": self._errors(),
        }

    def add_peers(self, row: dict[str, Any]) -> None:
        base = row["times"]["sdpa flash"]["both_us"]
        for name, (call, leaves) in self._peers().items():
            try:
                row["times"][name] = self._time(call, leaves)
                row["over_flash"][name] = row["times"][name]["both_us"] / base
            except Exception as error:  # a peer that cannot take this shape is part of the result
                row["times"][name] = {"unsupported": str(error).strip().splitlines()[-1][:120]}

    def _calls(self) -> dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]]:
        inputs = (self.query, self.key, self.value)

        def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
            def call() -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*inputs, is_causal=self.causal)

            return call

        calls: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
            "sdpa flash": (sdpa(SDPBackend.FLASH_ATTENTION), inputs),
            "sdpa cudnn": (sdpa(SDPBackend.CUDNN_ATTENTION), inputs),
        }
        for name in OURS:
            calls[name] = (partial(self._ours, name), self._leaves(name))
        return calls

    def _ours(self, name: str, **options: Any) -> Tensor:
        inputs = (self.query, self.key, self.value)
        options = {"is_causal": self.causal, "backend": "triton", **options}
        return functional.attention(*inputs, rule=_rule(name, self.alphas), **options)

    def _leaves(self, name: str) -> tuple[Tensor, ...]:
        alphas = (self.alphas,) if name == "learned alpha" else ()
        return (self.query, self.key, self.value, *alphas)

    def _peers(self) -> dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]]:
        """Other packages, if they are installed."""
        inputs = (self.query, self.key, self.value)
        peers: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {}
        try:
            from entmax import entmax15
        except ImportError:
            pass
        else:
            mask = torch.ones(self.length, self.key.shape[2], dtype=torch.bool, device="cuda").tril()

            def dense() -> Tensor:
                scores = (self.query @ self.key.mT).float() * HEAD_DIM**-0.5
                scores = scores.masked_fill(~mask, -1e9) if self.causal else scores
                return entmax15(scores, dim=-1).bfloat16() @ self.value

            peers["entmax package, alpha 1.5"] = (dense, inputs)
        if self.shape == "cross":  # adasplash reads beyond the keys where they are fewer than the queries
            return peers
        try:
            from adasplash import adasplash
        except ImportError:
            pass
        else:
            peers["adasplash, alpha 1.5"] = (lambda: adasplash(*inputs, alpha=1.5, is_causal=self.causal), inputs)
        return peers

    def _time(self, call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> dict[str, float | bool]:
        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(), leaves, self.grad)

        host = host_time(both)
        with torch.no_grad():
            forward, captured = gpu_time(call)
        return {
            "forward_us": forward,
            "both_us": gpu_time(both)[0],
            "eager_host_us": host,
            "captured": captured,
        }

    def _padding_and_dropout(self) -> dict[str, float]:
        def both(name: str, **options: Any) -> tuple[Tensor, ...]:
            return torch.autograd.grad(self._ours(name, **options), self._leaves(name), self.grad)

        extra = {"key_lengths": self.lengths, "dropout_p": DROPOUT}
        return {name: graph_time(partial(both, name, **extra)) / graph_time(partial(both, name)) for name in OURS}

    def _errors(self) -> dict[str, float]:
        """Relative error of two sequences' outputs; refuses what is not right."""
        q, k, v = (x[:2].detach().double() for x in (self.query, self.key, self.value))
        errors = {}
        for name in OURS:
            rule = _rule(name, self.alphas.detach().double())
            exact = functional.attention_weights(q, k, is_causal=self.causal, rule=rule) @ v
            ours = self._ours(name)[:2].detach().double()
            errors[name] = ((ours - exact).norm() / exact.norm()).item()
            if not errors[name] < 5e-3:
                raise RuntimeError(f"{name} at length {self.length}, {self.shape}: off by {errors[name]:g}")
        return errors


def _rule(name: str, alphas: Tensor) -> Rule:
    if name == "relu":
        return Activation("relu")
    return Entmax(alphas if name == "learned alpha" else float(name.removeprefix("alpha ")))


def graph_time(call: Callable[[], object], replays: int = 20) -> float:
    """Microseconds of one call, from replays of a graph that holds several, median of many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    repeats = 8
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
    except Exception:
        generator.graphsafe_set_state(before)  # the one at hand would take itself to be captured for ever
        raise
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return sorted(times)[replays // 2]


def gpu_time(call: Callable[[], object]) -> tuple[float, bool]:
    """Microseconds of one call, and whether a graph could hold it; if not, the gaps between its kernels count."""
    try:
        return graph_time(call), True
    except RuntimeError:
        torch.cuda.synchronize()
    return event_times(call, 20)["median_us"], False


def host_time(call: Callable[[], object], repeats: int = 50) -> float:
    """Microseconds that the host spends on a call launched without a graph."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e6 / repeats


def _print(rows: list[dict[str, Any]]) -> None:
    title = f"forward+backward over SDPA flash: bf16, H {HEADS}, D {HEAD_DIM}, B x L = {TOKENS}"
    table = Table(title=title)
    for column in ("L", "", "flash us", "cudnn", *OURS, "padding and dropout"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = row["over_flash"]
        cudnn = f"{ratio['sdpa cudnn']:.2f}x" if "sdpa cudnn" in ratio else "-"
        extra = f"{min(row['padding_and_dropout_over_without'].values()):.2f}-"
        extra += f"{max(row['padding_and_dropout_over_without'].values()):.2f}x"
        ours = (f"{ratio[name]:.2f}x" for name in OURS)
        table.add_row(
            str(row["length"]), row["shape"], f"{row['times']['sdpa flash']['both_us']:.0f}", cudnn, *ours, extra
        )
    Console(width=120).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Times over SDPA flash by length, one panel per shape."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install 'tamis[plots]'") from None
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(SHAPES), sharey=True)
    for panel, shape in zip(panels, SHAPES, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        for name in OURS:
            panel.plot([r["length"] for r in own], [r["over_flash"][name] for r in own], marker="o", label=name)
        panel.axhline(1.0, color="black", linewidth=1, linestyle=":")
        panel.set(title=shape, xscale="log", xlabel="length", xticks=LENGTHS, xticklabels=[str(x) for x in LENGTHS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time over FlashAttention-2")
    panels[0].set_ylim(bottom=0.0)
    panels[-1].legend(frameon=False)
    figure.suptitle("Forward + backward of fused sparse attention (bf16, 8 heads of 64, 8192 tokens)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"written: {path}")
