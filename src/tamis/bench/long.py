"""`tamis bench kernels`: entmax attention on long rows on a GPU, beside its peers.

Keys and queries come in topics: a run of 64 tokens attends to the runs of its own topic, so that with T topics one tile
in T holds weights.  Every row is checked against dense fp64 weights, and says how many tiles and weights were not zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from tamis.attention.rules import Entmax, Rule
from tamis.bench.timing import launched_times, machine, save

HEADS, RUN = 16, 64
DENSE = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
TOPICS = (1, 2, 3, 6, 20)


@dataclass(frozen=True)
class Case:
    length: int
    dim: int
    causal: bool = True
    topics: int = 1
    alibi: bool = False

    @property
    def batch(self) -> int:
        return max(1, 16384 // self.length)


CASES = [Case(16384, dim, causal, topics) for dim in (64, 128) for causal in (True, False) for topics in TOPICS]
CASES += [Case(length, dim, True, topics) for length in (4096, 65536) for dim in (64, 128) for topics in (3, 20)]
CASES += [Case(length, 64, alibi=True) for length in (16384, 32768, 65536)]


def run(output: Path | None, cases: list[Case] | None = None, kind: type[Inputs] | None = None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tamis bench kernels needs a CUDA device")
    cases, kind = cases or CASES, kind or Inputs
    rows: list[dict[str, Any]] = []
    for case in track(cases, "timing", console=Console(stderr=True)):
        inputs = kind(case)
        rows.append(inputs.row())
        _save(output, kind.file, rows)
        inputs.drop()
    # Those tune themselves for minutes at every length: last, so that the rest is not lost with them.
    for row, case in zip(rows, cases, strict=True):
        if kind.has_peers(case):
            row["times"] |= kind(case).peers()
            _save(output, kind.file, rows)
    _print(rows, *kind.ours)
    if output is not None and len({case.topics for case in cases}) > 1:
        draw(rows, output / f"{kind.file}.png", kind.ours)


def _save(output: Path | None, name: str, rows: list[dict[str, Any]]) -> None:
    if output is not None:
        record = {"benchmark": "kernels, long rows", "machine": machine(), "dtype": "bfloat16", "heads": HEADS}
        save(output / f"{name}.json", {**record, "rows": rows})


class Inputs:
    """Tensors of one case, and the calls that take them."""

    file = "kernels-long-gpu"
    ours: tuple[str, ...] = ("alpha 1.5", "learned alpha")
    rule: tuple[Any, ...] = ("squares", 0.5)
    """The first of ours, as the kernels are told."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        half, runs = case.dim // 2, -(-case.length // RUN)
        topic = torch.randint(case.topics, (runs,), generator=self.generator, device="cuda").repeat_interleave(RUN)
        centres = torch.randint(0, 2, (HEADS, case.topics, half), generator=self.generator, device="cuda") * 2.0 - 1.0
        # Of a token's dimensions half say its topic, 64 for its own in every score, and half are noise of variance 1.
        centres *= (64.0 * case.dim**0.5 / half) ** 0.5
        self.query, self.key = (self._leaf(centres[:, topic], self._noise(half) * 2**0.25) for _ in range(2))
        self.value = self._leaf(self._noise(case.dim))
        self.grad = torch.randn_like(self.value)
        self.alphas = torch.linspace(1.1, 1.9, HEADS, device="cuda", requires_grad=True)
        # Slopes of ALiBi, all of which reach much less far than the shortest of the lengths.
        self.slopes = 2.0 ** -torch.linspace(0.5, 4.0, HEADS, device="cuda") if case.alibi else None

    def _noise(self, dim: int) -> Tensor:
        return torch.randn(HEADS, self.case.length, dim, generator=self.generator, device="cuda")

    def _leaf(self, *parts: Tensor) -> Tensor:
        x = torch.cat(parts, -1)[None].to(torch.bfloat16)
        return x.expand(self.case.batch, -1, -1, -1).contiguous().requires_grad_()

    def drop(self) -> None:
        del self.query, self.key, self.value, self.grad
        torch.cuda.empty_cache()

    def row(self) -> dict[str, Any]:
        times: dict[str, Any] = {}
        if self.slopes is None:
            for name, backend in DENSE.items():
                times[name] = self._time(partial(self._dense, backend))
        for name in self.ours:
            leaves = (self.alphas,) if name == "learned alpha" else ()
            times[name] = self._time(partial(self._ours, name), leaves)
        return {**asdict(self.case), "batch": self.case.batch, **self._sparsity(), "times": times}

    @staticmethod
    def has_peers(case: Case) -> bool:
        return case.length == 16384 and case.causal and not case.alibi

    def peers(self) -> dict[str, Any]:
        """AdaSplash 1 and 2, if installed, the latter with as few iterations as make every row's mass one to the next
        number of bf16, in which it is given."""
        try:
            import adasplash
        except ImportError:
            return {}
        ones = torch.ones_like(self.value)
        found: dict[str, Any] = {}
        for count in (1, 2, 3, 4, 6, 8):
            second = partial(adasplash.adasplash_v2, niter=count)
            with torch.no_grad():
                error = (second(self.query, self.key, ones).float() - 1.0).abs().max().item()
            if error <= 2**-7 or count == 8:
                call = partial(second, self.query, self.key, self.value)
                found["adasplash 2"] = {**self._time(call), "iterations": count, "mass_error": error}
                break
        first = partial(adasplash.adasplash_v1, self.query, self.key, self.value, alpha=1.5, is_causal=True, niter=10)
        return found | {"adasplash 1": self._time(first)}

    def _dense(self, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=self.case.causal)

    def _rule(self, name: str) -> Rule:
        return Entmax(self.alphas if name == "learned alpha" else 1.5)

    def _ours(self, name: str) -> Tensor:
        options: dict[str, Any] = {"is_causal": self.case.causal, "alibi_slopes": self.slopes, "backend": "triton"}
        return functional.attention(self.query, self.key, self.value, rule=self._rule(name), **options)

    def _time(self, call: Callable[[], Tensor], extra: tuple[Tensor, ...] = ()) -> dict[str, Any]:
        leaves = (self.query, self.key, self.value, *extra)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(), leaves, self.grad)

        try:
            with torch.no_grad():
                forward = device_time(call)
            result = {"forward_ms": forward, "training_forward_ms": device_time(call), "both_ms": device_time(both)}
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            return {**result, "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
        except (
            RuntimeError,
            ValueError,
            AssertionError,
        ) as error:  # of a peer, a result
            return {"unsupported": str(error).strip().splitlines()[-1][:120]}

    @torch.no_grad()
    def _sparsity(self) -> dict[str, Any]:
        """Shares of tiles and of weights that are not zero in the first of ours, and errors in the last outputs."""
        from tamis.kernels.attention import launch
        from tamis.kernels.attention.arguments import Arguments

        scale, right = self.case.dim**-0.5, 0 if self.case.causal else -1
        tensors: list[Any] = [self.query, self.key, self.value, *[None] * 4, self.slopes, *[None] * 5]
        arguments = Arguments._make([*tensors, *self.rule, 0.0, scale, -1, right, 0.0, False])
        bits = launch.forward(arguments, True)[3]
        runs = self.case.length // RUN
        tiles = (bits[..., None] >> torch.arange(32, device="cuda") & 1).flatten(3)[..., :runs].float()
        pairs = runs * (runs + 1) / 2 if self.case.causal else runs * runs
        last = slice(self.case.length - 128, None)
        query, key, value = (x[:1, :2].double() for x in (self.query, self.key, self.value))
        slopes = None if self.slopes is None else self.slopes[:2].double()
        shares, errors = {}, {}
        for name in self.ours:
            rule = Entmax(self.alphas[:2].double()) if name == "learned alpha" else self._rule(name)
            weights = functional.attention_weights(
                query[:, :, last], key, is_causal=self.case.causal, alibi_slopes=slopes, rule=rule
            )
            exact = weights @ value
            ours = self._ours(name)[:1, :2, last].double()
            shares[name] = (weights != 0.0).double().mean().item()
            errors[name] = ((ours - exact).norm() / exact.norm()).item()
            if not errors[name] < 5e-3:
                raise RuntimeError(f"{self.case}: {name} is off by {errors[name]:g}")
        return {
            "tiles": (tiles.sum((-1, -2)) / pairs).mean().item(),
            "weights": shares[self.ours[0]],
            "errors": errors,
        }


def device_time(call: Callable[[], object], repeats: int = 9) -> float:
    """Milliseconds of one call, the median of many."""
    for _ in range(2):
        call()
    return sorted(launched_times(call, repeats))[repeats // 2]


def over(row: dict[str, Any], name: str, peer: str, what: str = "both_ms") -> float | None:
    own, other = (row["times"].get(x, {}).get(what) for x in (name, peer))
    return None if own is None or other is None else own / other


def _print(rows: list[dict[str, Any]], first: str, *others: str) -> None:
    table = Table(title=f"{first}: bf16, H {HEADS}; times over those of SDPA")
    columns = ("N", "D", "", "tiles", "weights", "forward ms", "/ flash", "/ cudnn", "both ms", "/ flash", "/ cudnn")
    for column in (*columns, *(f"{other} / {first}" for other in others), "MiB / flash"):
        table.add_column(column, justify="right")
    for row in rows:
        shown = [str(row["length"]), str(row["dim"]), "causal" if row["causal"] else "full"]
        shown += ["alibi" if row["alibi"] else f"{row['tiles']:.2f}", f"{row['weights']:.1e}"]
        for what in ("forward_ms", "both_ms"):
            shown.append(f"{row['times'][first][what]:.2f}")
            shown += [_ratio(over(row, first, peer, what)) for peer in DENSE]
        shown += [_ratio(over(row, other, first)) for other in others]
        table.add_row(*shown, _ratio(over(row, first, "sdpa flash", "peak_mib")))
    Console(width=140).print(table)


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}x"


def draw(rows: list[dict[str, Any]], path: Path, ours: tuple[str, ...]) -> None:
    """Time of forward and backward against the share of tiles with weights, every peer in it, one panel a head size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install 'tamis[plots]'") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, dim in zip(panels, (64, 128), strict=True):
        own = [
            row for row in rows if row["length"] == 16384 and row["causal"] and row["dim"] == dim and not row["alibi"]
        ]
        own.sort(key=lambda row: row["tiles"])
        for name in dict.fromkeys(name for row in own for name in row["times"]):
            points = [(r["tiles"], r["times"][name]["both_ms"]) for r in own if "both_ms" in r["times"].get(name, {})]
            if points and name != "adasplash 1":  # several times above all others
                style = "-" if name in ours else "--"
                panel.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
        panel.set(title=f"head size {dim}", xlabel="share of 64 x 64 tiles that hold weights")
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("forward + backward, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"Exact sparse attention at 16,384 tokens (causal, bf16, {HEADS} heads)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"written: {path}")
