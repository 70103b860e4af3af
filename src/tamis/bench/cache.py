"""`tamis bench cache`: attention of one to sixteen queries to a long cache on a GPU, beside dense attention.

Keys are normal, so that weights lie anywhere: the worst case for reading values only where there are some.  Queries are
scaled until at most 2 % of the weights at alpha 1.5 are not zero, and once more to be sharper.  Times are replays of
captured CUDA graphs; outputs are checked against dense fp64 weights first.  A whole model reads one token a step too,
sparse and dense.
"""

from __future__ import annotations

import warnings
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
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.bench.kernels import graph_time
from tamis.bench.timing import event_times, kernel_times, machine, reason, save
from tamis.models.causal_lm import CausalLM, CausalLMConfig

HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
SUPPORT = 0.02
DENSE = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
UNUSED_BACKEND = ".*(kernel not used because|has been runtime disabled|fused kernels require)"
"""How torch warns of a backend that cannot take a call, which is told by an error too."""
OURS: dict[str, Rule] = {
    "alpha 1.5": Entmax(1.5),
    "alpha 2": Entmax(2.0),
    "alpha 1.3": Entmax(1.3),
    "relu": Activation("relu"),
}
MODEL = CausalLMConfig(
    vocab_size=32000, embed_dim=1024, num_heads=16, num_kv_heads=4, ffn_dim=4096, num_layers=12, position="rope"
)
MECHANISMS: dict[str, Any] = {"softmax": "softmax", "alpha 1.5": {"name": "entmax", "alpha": 1.5}, "relu": "rela"}


@dataclass(frozen=True)
class Case:
    context: int
    batch: int
    sharp: bool = False
    queries: int = 1
    """Queries of a sequence, such as the hypotheses of a beam: all see all of it."""


# What the claims are about comes first, so that it is there if somebody loses patience.
CASES = [
    Case(context, batch, sharp) for context in (131072, 32768, 8192) for batch in (1, 16) for sharp in (False, True)
]
CASES += [
    Case(context, batch, queries=queries) for context in (131072, 8192) for batch in (1, 16) for queries in (4, 16)
]
MODEL_CASES = [Case(context, batch) for context in (131072, 32768) for batch in (1, 8)]
BEFORE_MODELS = 2
"""Cases before the models': both of one sequence at the greatest length."""


def run(output: Path | None, cases: list[Case] | None = None, model_cases: list[Case] | None = None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tamis bench cache needs a CUDA device")
    record: dict[str, Any] = {"benchmark": "cache", "machine": machine(), "dtype": "bfloat16", "heads": HEADS}
    record |= {"key_heads": KEY_HEADS, "head_dim": HEAD_DIM, "page": PAGE, "model": asdict(MODEL)}
    record |= {"rows": [], "models": []}
    cases = CASES if cases is None else cases
    model_cases = MODEL_CASES if model_cases is None else model_cases
    todo = [("rows", row, case) for case in cases[:BEFORE_MODELS]]
    todo += [("models", model_row, case) for case in model_cases]
    todo += [("rows", row, case) for case in cases[BEFORE_MODELS:]]
    for name, measure, case in track(todo, "timing", console=Console(stderr=True)):
        record[name].append(measure(case))
        torch.cuda.empty_cache()
        if output is not None:  # as it goes, so that nothing is lost
            save(output / "cache-gpu.json", record)
    _print(record)


@torch.no_grad()
def row(case: Case, device: str = "cuda") -> dict[str, Any]:
    cache = Cache(case, device)
    measured: dict[str, Any] = {"support": cache.support(), "errors": cache.errors()}
    dense, ours = cache.dense(), cache.ours()
    if case == CASES[0]:  # once: they take twelve to fifty times as long as the best
        dense |= cache.slow_dense()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNUSED_BACKEND, UserWarning)
        times = {name: _time(call) for name, call in dense.items()}
    times |= {name: _time(call) for name, call in ours.items()}
    best = min(time["us"] for name, time in times.items() if name in dense and "us" in time)
    over = {name: time["us"] / best for name, time in times.items() if "us" in time}
    measured["kernels_us"] = kernel_times(ours["alpha 1.5"])
    return {**asdict(case), **measured, "times": times, "over_best_dense": over}


def _time(call: Callable[[], object], seconds: float = 0.15) -> dict[str, Any]:
    """Microseconds of a call in a graph, or launched by the host where no graph can hold it, in about `seconds`."""
    try:
        launched = event_times(call, 5)["median_us"]
        replays = min(20, max(3, int(seconds * 1e6 / (8 * launched))))  # of eight calls
        try:
            return {"us": graph_time(call, replays), "captured": True}
        except RuntimeError:
            torch.cuda.synchronize()
            return {"us": launched, "captured": False}
    except Exception as error:  # what a peer cannot take is part of the result
        return {"unsupported": reason(error)}


class Cache:
    """Keys and values of one case, side by side and in pages, and the calls that read them."""

    def __init__(self, case: Case, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.query = self._normal(case.batch, HEADS, case.queries, HEAD_DIM)
        self.key, self.value = (self._normal(case.batch, KEY_HEADS, case.context, HEAD_DIM) for _ in range(2))
        self.alphas = torch.linspace(1.1, 1.9, HEADS, device=device)
        self.query *= 0.125
        while self.support() > SUPPORT:
            self.query *= 1.19
        if case.sharp:
            self.query *= 4.0
        self.lengths = torch.full((case.batch,), case.context, device=device)

    def _normal(self, *shape: int) -> Tensor:
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device, dtype=torch.bfloat16)

    def support(self) -> float:
        """The share of weights at alpha 1.5 that are not zero."""
        return (self._weights(Entmax(1.5)) > 0.0).double().mean().item()

    def _weights(self, rule: Rule) -> Tensor:
        """In fp64, those of the first sequence and the heads of its first key head."""
        group = HEADS // KEY_HEADS
        query, key = self.query[:1, :group].double(), self.key[:1, :1].double()
        return functional.attention_weights(query, key, enable_gqa=True, rule=rule)

    def errors(self) -> dict[str, float]:
        """Relative errors of the outputs; refuses what is not right."""
        group, found = HEADS // KEY_HEADS, {}
        calls = self.ours()
        rules = {**OURS, "learned alpha": Entmax(self.alphas[:group].double()), "pages": OURS["alpha 1.5"]}
        for name, rule in rules.items():
            exact = self._weights(rule) @ self.value[:1, :1].double()
            ours = calls[name]()[:1, :group].double()
            found[name] = ((ours - exact).norm() / exact.norm()).item()
            if not found[name] < 5e-3:
                raise RuntimeError(f"{name} is off by {found[name]:g}")
        return found

    def dense(self) -> dict[str, Callable[[], Tensor]]:
        """SDPA with query heads in groups, and with those of a group as queries of one head, which reads as little."""
        packed = self.query.view(self.query.shape[0], KEY_HEADS, -1, HEAD_DIM)
        calls: dict[str, Callable[[], Tensor]] = {}
        for name, backend in DENSE.items():
            calls[name] = partial(self._sdpa, backend, self.query)
            calls[f"{name}, packed"] = partial(self._sdpa, backend, packed)
        return calls

    def slow_dense(self) -> dict[str, Callable[[], Tensor]]:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention)
        return {
            "sdpa math": partial(self._sdpa, SDPBackend.MATH, self.query),
            "flex": lambda: flex(self.query, self.key, self.value, enable_gqa=True),
        }

    def _sdpa(self, backend: SDPBackend, query: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, self.key, self.value, enable_gqa=query is self.query)

    def ours(self) -> dict[str, Callable[[], Tensor]]:
        calls: dict[str, Callable[[], Tensor]] = {}
        ours = partial(functional.attention, self.query, self.key, self.value, enable_gqa=True, backend="triton")
        for name, rule in {**OURS, "learned alpha": Entmax(self.alphas)}.items():
            calls[name] = partial(ours, rule=rule)
        slopes = 2.0 ** -torch.linspace(0.5, 8.0, HEADS, device=self.query.device)
        key, value, table = self._pages()
        norms = key.float().norm(dim=-1).amax(1)
        paged = partial(functional.paged_attention, self.query, key, value, table, self.lengths, backend="triton")
        calls["pages"] = paged
        calls["pages, alibi"] = partial(paged, alibi_slopes=slopes)
        calls["pages, alibi, norms"] = partial(paged, alibi_slopes=slopes, page_norms=norms)
        return calls

    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same keys and values in pages that lie in any order, and the table of where they are."""
        batch, count = self.key.shape[0], self.key.shape[2] // PAGE
        order = torch.randperm(batch * count, generator=self.generator, device=self.key.device)
        place = order.argsort().view(batch, count)
        pools = (
            x.view(batch, KEY_HEADS, count, PAGE, HEAD_DIM).permute(0, 2, 3, 1, 4).flatten(0, 1)[order]
            for x in (self.key, self.value)
        )
        return *pools, place.int()  # type: ignore[return-value]


@torch.no_grad()
def model_row(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Tokens a second of a whole model whose cache is full of normal keys and values."""
    speeds = {}
    for name, mechanism in MECHANISMS.items():
        torch.manual_seed(0)
        config = CausalLMConfig(**{**asdict(MODEL), "mechanism": mechanism})
        model = CausalLM(config).to(device, torch.bfloat16).eval()
        cache = model.new_cache()
        head_dim = config.embed_dim // config.num_heads
        shape = (case.batch, config.num_kv_heads or config.num_heads, case.context, head_dim)
        for layer in cache.layers:
            layer.self_attention.append(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)))
        tokens = torch.randint(config.vocab_size, (case.batch, 1), device=device)

        def step(model: CausalLM = model, cache: Any = cache, tokens: Tensor = tokens) -> Tensor:
            cache.shorten(case.context)  # every step is the same one
            return model(tokens, cache=cache)

        time = _time(step)
        speeds[name] = {**time, **({"tokens_per_s": case.batch / time["us"] * 1e6} if "us" in time else {})}
        del model, cache, step
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"context": case.context, "batch": case.batch, "speeds": speeds}


def _print(record: dict[str, Any]) -> None:
    shape = f"{HEADS} query heads, {KEY_HEADS} key heads of {HEAD_DIM}"
    ours = (*OURS, "learned alpha", "pages", "pages, alibi", "pages, alibi, norms")
    table = Table(title=f"few queries, bf16, {shape}: times over the best dense attention")
    for column in ("context", "batch", "queries", "support", "best dense", "us", *ours):
        table.add_column(column, justify="right")
    for line in record["rows"]:
        over = line["over_best_dense"]
        best = min((name for name in over if name.startswith(("sdpa", "flex"))), key=over.__getitem__)
        ratios = [f"{over[name]:.2f}x" if name in over else "-" for name in ours]
        us = f"{line['times'][best]['us']:.0f}"
        sizes = (str(line[name]) for name in ("context", "batch", "queries"))
        table.add_row(*sizes, f"{line['support']:.1%}", best, us, *ratios)
    Console(width=150).print(table)
    table = Table(title="tokens/s of a whole model")
    for column in ("context", "batch", *MECHANISMS):
        table.add_column(column, justify="right")
    for line in record["models"]:
        speeds = [f"{line['speeds'][name].get('tokens_per_s', float('nan')):.0f}" for name in MECHANISMS]
        table.add_row(str(line["context"]), str(line["batch"]), *speeds)
    Console(width=110).print(table)
