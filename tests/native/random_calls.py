"""Calls of attention drawn at random over all options, for comparison with the dense form in fp64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from tamis.native import library

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"C++ kernels are {library.status()}")
RULES = ("entmax", "entmax", "entmax", "learned", "per query", "relu", "squared_relu", "leaky_relu")
LENGTHS = (1, 2, 5, 16, 17, 31, 48, 65, 100, 129, 200, 333)
ROUNDING = 2.0**-24
"""What rounding to fp32 moves a number by at most, relative to it."""


@dataclass(frozen=True)
class Drawn:
    """Inputs in fp64, and what makes the call."""

    inputs: dict[str, Tensor]
    """query, key and value, and alpha and slopes where they have gradients."""
    rule: str
    numbers: dict[str, float]
    options: dict[str, Any]

    def run(self, dtype: torch.dtype, probe: Tensor, **more: Any) -> list[Tensor]:
        """The output and all gradients, in fp64."""
        leaves = {name: self._as(name, x, dtype).requires_grad_() for name, x in self.inputs.items()}
        out = tamis.attention(leaves["query"], leaves["key"], leaves["value"], **self.given(leaves), **more)
        gradients = torch.autograd.grad(out, list(leaves.values()), probe.to(out.dtype))
        return [x.detach().double() for x in (out, *gradients)]

    def given(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The rule and the options of a call with these inputs."""
        options = self.options | ({"alibi_slopes": leaves["slopes"]} if "slopes" in leaves else {})
        if "alpha" in leaves or self.rule == "entmax":
            return {"rule": tamis.Entmax(leaves.get("alpha", self.numbers["alpha"])), **options}
        activation = tamis.Activation(self.rule, self.numbers["bias"], bool(self.numbers["per_count"]))
        return {"rule": activation, **options}

    def slope_terms(self, probe: Tensor) -> Tensor:
        """What is added up to the gradients of slopes, (B, H, Lq, Lk): those of scores, times distances, in fp64."""
        query, key, value = (self.inputs[name] for name in ("query", "key", "value"))
        given = self.given(self.inputs)
        mask = given.pop("attn_mask", torch.zeros(()))
        additive = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        # As much as is added to a score, so its gradient is that of the score.
        bias = additive.double().expand(*query.shape[:3], key.shape[2]).clone().requires_grad_()
        out = tamis.attention(query, key, value, attn_mask=bias, backend="dense", **given)
        [gradients] = torch.autograd.grad(out, [bias], probe)
        # The scores of queries that are 0, under slopes of 1.
        plain = {name: x for name, x in given.items() if name not in ("rule", "alibi_slopes")}
        ones = torch.ones(query.shape[1], dtype=torch.float64)
        scores, _ = tamis.attention_scores(torch.zeros_like(query), key, alibi_slopes=ones, **plain)
        return gradients * scores

    @staticmethod
    def _as(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return x.to(dtype if name in ("query", "key", "value") else wide).detach().clone()


def draw(seed: int, lengths: Sequence[int] = LENGTHS, rules: Sequence[str] = RULES) -> Drawn:
    """Everything follows from the seed."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        # What fp32 holds exactly, so that both computations begin with the same numbers.
        return torch.randn(shape, generator=generator).double()

    packed = chance.random() < 0.15
    batch = 1 if packed else chance.choice((1, 2, 3))
    key_heads, groups = chance.choice(((1, 1), (2, 1), (1, 3), (2, 2)))
    keys = chance.choice(lengths)
    queries = keys if chance.random() < 0.5 else chance.choice(lengths)
    dim, value_dim = chance.choice((1, 7, 16, 20, 64, 80)), chance.choice((1, 5, 16, 48, 64))
    heads = key_heads * groups
    sharpness = chance.choice((0.3, 1.0, 3.0))
    inputs = {
        "query": randn(batch, heads, queries, dim) * sharpness,
        "key": randn(batch, key_heads, keys, dim),
        "value": randn(batch, key_heads, keys, value_dim),
    }
    if chance.random() < 0.3:  # as projections lie in memory
        inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    rule = chance.choice(rules)
    numbers = {
        "alpha": chance.choice((1.0, 1.01, 1.1, 1.25, 1.5, 1.5, 1.7, 2.0)),
        "bias": chance.choice((0.0, 0.5, -0.5)),
        "per_count": chance.random() < 0.5,
    }
    if rule == "learned":
        inputs["alpha"] = 1.0 + torch.rand(heads, generator=generator).double() * 0.7
    if rule == "per query":
        inputs["alpha"] = 1.0 + torch.rand(batch, heads, queries, 1, generator=generator).double() * 0.7
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": chance.random() < 0.5}
    if chance.random() < 0.2:
        options["window"] = chance.choice((0, 3, (20, None), (None, 2), (40, 5)))
    if chance.random() < 0.3:
        inputs["slopes"] = torch.rand(batch if chance.random() < 0.3 else 1, heads, generator=generator).double() ** 3
    if chance.random() < 0.25:
        shape = [size if chance.random() < 0.6 else 1 for size in (batch, heads, queries, keys)]
        mask = torch.rand(shape, generator=generator) < 0.8
        additive = torch.where(mask, torch.randn(shape, generator=generator), -math.inf)
        options["attn_mask"] = mask if chance.random() < 0.5 else additive
    if packed:
        options |= _packed(chance, queries, keys)
    elif chance.random() < 0.2:
        options["key_lengths"] = torch.randint(0, keys + 1, (batch,), generator=generator)
    if not packed and chance.random() < 0.2:
        rows = batch if chance.random() < 0.5 else 1
        options["query_positions"] = torch.randint(0, keys + 9, (rows, queries), generator=generator)
        if chance.random() < 0.6:
            options["key_positions"] = torch.randint(0, keys + 9, (rows, keys), generator=generator)
    if chance.random() < 0.2:
        options["scale"] = chance.choice((0.3, -0.2, 0.0))
    return Drawn(inputs, rule, numbers, options)


def _packed(chance: random.Random, queries: int, keys: int) -> dict[str, Any]:
    count = chance.choice((1, 2, 4))
    bounds = {
        name: torch.tensor([0, *sorted(chance.randint(0, total) for _ in range(count))])
        for name, total in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys))
    }
    return {"cu_seqlens_q": bounds["cu_seqlens_q"]} if queries == keys and chance.random() < 0.5 else bounds


def check(seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    """Compare the native kernel with the dense form in fp64, and name the seed where they differ."""
    drawn = draw(seed)
    inputs = drawn.inputs
    probe = torch.randn(
        (*inputs["query"].shape[:3], inputs["value"].shape[3]), generator=torch.Generator().manual_seed(seed)
    ).double()
    got = drawn.run(dtype, probe, backend="native", **more)
    want = drawn.run(torch.float64, probe, backend="dense")
    # An error of rounding may move a weight near the edge of the support, whose slope is steep: few, and small.
    solved = drawn.rule in ("entmax", "learned", "per query")
    for name, ours, exact in zip(("out", *inputs), got, want, strict=True):
        assert bool(ours.isfinite().all()), f"seed {seed}: {name} is not finite"
        error, size = (ours - exact).norm().item(), exact.norm().item()
        share = min({"out": 1e-5, "slopes": 1e-4}.get(name, 1e-3), 1e-3 if solved else 2e-5)
        allowed = share * size
        if name == "slopes":  # one number for each head, of terms that may cancel: it cannot be better than they are
            terms = drawn.slope_terms(probe)
            added, sizes = (x.sum((2, 3)).sum_to_size(exact.shape) for x in (terms, terms.abs()))
            assert (added - exact).norm() <= 1e-9 * sizes.norm(), f"seed {seed}: other terms than those of the slopes"
            most = (1e-3 if solved else 2e-5) * size
            allowed = min(most, max(allowed, ROUNDING * sizes.norm().item()))
        assert error <= allowed + 1e-6 * math.sqrt(exact.numel()), (
            f"seed {seed}: {name} is off by {error:g} of {size:g}, allowed {allowed:g}"
        )
