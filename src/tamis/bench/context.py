"""`tamis bench context`: what one long text costs, in time and memory, to learn from and to continue.

One model, of the size of `recipes/lm-novels.toml`, with four kinds of attention and one text of random tokens:

    step       forward, cross-entropy, backward and AdamW
    prefill    the whole text into the cache, with the logits of every place
    decode     one token after the other behind it

Flash attention takes no bias, so it cannot run NAPE's ALiBi heads: the fastest dense model is one with RoPE.  Weights
are those a model starts with.  What a sparse kernel skips depends on the scores, so the share of keys with a weight is
measured too; a trained model has another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend

from tamis.bench.timing import machine, peak_memory, save
from tamis.bench.train import Dense
from tamis.evaluation.dispersion import measure_dispersion
from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.nn.attention import Attention
from tamis.nn.cache import ModelCache
from tamis.nn.modes import evaluating

SIZE = {"vocab_size": 8000, "embed_dim": 512, "num_heads": 8, "ffn_dim": 1536, "num_layers": 6}
FLASH = "softmax, RoPE, flash"
ARMS: dict[str, dict[str, Any]] = {
    FLASH: {"mechanism": "softmax", "position": "rope"},
    "softmax, NAPE": {"mechanism": "softmax", "position": "nape"},
    "1.5-entmax, NAPE": {"mechanism": {"name": "entmax", "alpha": 1.5}, "position": "nape"},
    "ASEntmax, NAPE": {"mechanism": "asentmax", "position": "nape"},
}
OBSERVED = 32
"""Rows at the end of the text in which keys with a weight are counted."""


def run(
    output: Path | None,
    *,
    length: int = 1 << 16,
    new: int = 32,
    repeats: int = 3,
    size: dict[str, Any] | None = None,
    device: str | None = None,
) -> None:
    """`new` tokens are written after a text of `length`; `size` are settings of CausalLMConfig."""
    if min(length, new, repeats) < 1:
        raise ValueError(f"length, new and repeats must be at least 1, got {length}, {new} and {repeats}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = SIZE | (size or {})
    rows = []
    for name, arm in ARMS.items():
        rows.append(
            {"arm": name} | _measured(_built(name, CausalLMConfig(**sizes, **arm), place), length, new, repeats)
        )
        if output is not None:  # what is there stays if a later arm does not end
            settings = {"length": length, "new": new, "repeats": repeats, "size": sizes, "precision": _precision(place)}
            record = {"benchmark": "one long text", "machine": machine(), "settings": settings, "rows": rows}
            save(output / f"context-{'gpu' if place.type == 'cuda' else place.type}.json", record)
    table = Table(title=f"one text of {length:,} tokens, {_precision(place)}, on {place.type}")
    for column in ("attention", "step s", "GB", "prefill s", "GB", "decode ms/token", "GB", "keys with a weight"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for row in rows:
        table.add_row(row["arm"], *_cells(row))
    Console(width=120).print(table)


def _precision(place: torch.device) -> str:
    return "bf16" if place.type == "cuda" else "fp32"


def _built(name: str, config: CausalLMConfig, place: torch.device) -> CausalLM:
    torch.manual_seed(0)
    model = CausalLM(config).to(place)
    if name == FLASH:
        for module in model.modules():
            if isinstance(module, Attention):
                module.mechanism = Dense(SDPBackend.FLASH_ATTENTION if place.type == "cuda" else None)
    return model


def _measured(model: CausalLM, length: int, new: int, repeats: int) -> dict[str, Any]:
    device = next(model.parameters()).device
    text = torch.randint(model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    inputs = text[:, :-1]
    found: dict[str, Any] = {"parameters": model.num_parameters(), "density": None}
    with torch.autocast(device.type, torch.bfloat16, enabled=_precision(device) == "bf16"):
        found["step"] = _step_cost(model, text, repeats)
        with evaluating(model):
            found["prefill"] = _cost(device, repeats, lambda: model(inputs, cache=model.new_cache())[:, -1].argmax(-1))
            cache = model.new_cache()
            if found["prefill"]["seconds"] is not None:
                model(inputs, cache=cache)
            found["decode"] = _cost(device, repeats, lambda: _decode(model, cache, text[:, -1:], length, new))
            if found["decode"]["seconds"] is not None:
                found["decode"]["seconds"] /= new
            if not any(isinstance(module, Dense) for module in model.modules()):
                sites = measure_dispersion(model, [inputs], length, OBSERVED).sites.values()
                supports = [support for site in sites for support in site.support]
                found["density"] = sum(supports) / len(supports) / length  # as if the last rows all saw that many
    return found


def _step_cost(model: CausalLM, text: Tensor, repeats: int) -> dict[str, float | None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.step()

    try:
        return _cost(text.device, repeats, step)
    finally:
        optimizer.zero_grad()


def _decode(model: CausalLM, cache: ModelCache, token: Tensor, length: int, new: int) -> None:
    cache.shorten(length)
    for _ in range(new):
        token = model(token, cache=cache).argmax(-1)


def _cost(device: torch.device, repeats: int, call: Callable[[], object]) -> dict[str, float | None]:
    """The median time of a call, and its memory: all that a GPU holds meanwhile, or what the process grows by."""
    try:
        call()
        memory = _peak(device, call)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {"seconds": None, "bytes": None}
    return {"seconds": statistics.median(times), "bytes": memory}


def _peak(device: torch.device, call: Callable[[], object]) -> int | None:
    if device.type != "cuda":
        return peak_memory(call)
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _cells(row: dict[str, Any]) -> list[str]:
    cells = []
    for phase, unit in (("step", 1.0), ("prefill", 1.0), ("decode", 1e3)):
        seconds, memory = row[phase]["seconds"], row[phase]["bytes"]
        cells += ["out of memory" if seconds is None else f"{seconds * unit:.3g}"]
        cells += ["-" if memory is None else f"{memory / 1e9:.2f}"]
    return [*cells, "all" if row["density"] is None else f"{row['density']:.2%}"]
