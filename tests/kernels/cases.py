"""Calls of fused attention that together try every pair of features, and exact results to compare with."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.attention.call import check_call
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.attention.statistics import dense_statistics, row_statistics
from tamis.functional import attention, attention_weights, attention_with_statistics, entmax_attention
from tamis.kernels import dispatch
from tamis.kernels.attention.arguments import ELEMENTWISE_RULES

FACTORS: dict[str, tuple[Any, ...]] = {
    "rule": (1.5, 2.0, 1.3, 1.0, "learned", "near one", "relu", "squared_relu", "sigmoid"),
    "lengths": ((37, 37), (64, 64), (1, 50), (20, 100), (130, 40), (33, 150), (70, 300)),
    "head_dims": ((16, 16), (64, 64), (24, 40), (80, 128), (256, 160)),
    "groups": (1, 2),
    "structure": ("full", "causal", "window", "causal window", "alibi", "causal alibi", "positions", "packed"),
    "mask": ("none", "boolean", "padding", "additive", "lengths"),
    "dropout": (0.0, 0.3),
    "layout": ("contiguous", "heads last", "odd strides"),
}
HEADS = 4


def covering(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which every pair of values of two factors occurs: greedy, each the best of many random ones."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        candidates = [{name: rng.randrange(len(factors[name])) for name in names} for _ in range(60)]
        a, i, b, j = min(missing)
        for candidate in candidates:
            candidate[a], candidate[b] = i, j
        best = max(candidates, key=lambda c: len(missing & set(pairs(c, names))))
        missing -= set(pairs(best, names))
        cases.append({name: factors[name][best[name]] for name in names})
    return cases


def parameters(cases: list[dict[str, Any]], every: int) -> list[Any]:
    """The cases as parameters of a test, of which one in so many is not slow."""
    slow = pytest.mark.slow
    return [pytest.param(case, id=describe(case), marks=slow if i % every else ()) for i, case in enumerate(cases)]


def pairs(case: dict[str, int], names: list[str]) -> Iterator[tuple[str, int, str, int]]:
    return ((a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2))


def describe(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "_") for value in case.values())


class Problem:
    """Inputs and options of one case."""

    def __init__(self, case: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(describe(case).encode()))
        packed = case["structure"] == "packed"
        batch = 1 if packed else 2
        num_q, num_k = case["lengths"]
        d, d_v = case["head_dims"]
        self.dtype, self.device = dtype, device

        def draw(heads: int, length: int, dim: int) -> Tensor:
            x = torch.randn(batch, heads, length, dim, generator=generator)
            if case["layout"] == "heads last":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            x = x.to(device, dtype)
            if case["layout"] == "odd strides":
                wide = torch.zeros(*x.shape[:3], 2 * dim + 1, device=device, dtype=dtype)
                wide[..., 1::2] = x
                x = wide[..., 1::2]
            return x

        key_heads = HEADS // case["groups"]
        self.query, self.key, self.value = draw(HEADS, num_q, d), draw(key_heads, num_k, d), draw(key_heads, num_k, d_v)
        self.grad = draw(HEADS, num_q, d_v)
        self.options: dict[str, Any] = {"enable_gqa": case["groups"] > 1}
        structure = case["structure"]
        self.options["is_causal"] = "causal" in structure
        if "window" in structure:
            self.options["window"] = (9, 4)
        if "alibi" in structure:
            self.options["alibi_slopes"] = torch.tensor([0.5, 0.1, 0.02, 0.0])
        if structure == "positions":
            self.options["is_causal"] = True
            self.options["query_positions"] = torch.randint(0, 50, (batch, num_q), generator=generator)
            self.options["key_positions"] = torch.randint(0, 50, (num_k,), generator=generator)
        if packed:
            # an empty sequence, one without keys, and tokens after the last
            self.options["cu_seqlens_q"] = torch.tensor([0, num_q // 3, num_q // 3, num_q - num_q // 4, num_q])
            self.options["cu_seqlens_k"] = torch.tensor([0, num_k // 2, num_k // 2 + 3, num_k - 2, num_k - 2])
        if case["mask"] == "boolean":
            mask = torch.rand(batch, 1, num_q, num_k, generator=generator) > 0.4
            mask[0, 0, 0] = False
            self.options["attn_mask"] = mask
        if case["mask"] == "padding":
            mask = torch.rand(batch, 1, 1, num_k, generator=generator) > 0.4
            mask[-1] = False
            self.options["attn_mask"] = mask
        if case["mask"] == "additive":
            mask = torch.randn(HEADS, num_q, num_k, generator=generator)
            self.options["attn_mask"] = mask.masked_fill(mask > 1.0, -torch.inf).to(dtype)
        if case["mask"] == "lengths" and not packed:
            self.options["key_lengths"] = torch.tensor([num_k // 2, 0])[:batch]
        self.options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        self.dropout = case["dropout"]
        name, alphas = case["rule"], {"learned": [1.2, 1.5, 1.9, 2.0], "near one": [1.0, 1.0001, 1.01, 1.1]}
        self.rule: Rule = Entmax(torch.tensor(alphas[name], device=device) if name in alphas else name)
        if name in ACTIVATIONS:
            self.rule = Activation(name, bias=-1.0 if name == "sigmoid" else 0.0)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """Query, key, value and a learned alpha, as leaves of a graph, with their strides."""
        tensors = [x.detach().to(dtype).requires_grad_() for x in (self.query, self.key, self.value)]
        alpha = getattr(self.rule, "alpha", None)
        if isinstance(alpha, Tensor):
            tensors.append(alpha.detach().to(torch.float64 if dtype == torch.float64 else torch.float32))
            tensors[-1].requires_grad_()
        return tensors

    def rule_of(self, leaves: list[Tensor]) -> Rule:
        return Entmax(leaves[3]) if len(leaves) > 3 else self.rule

    def kept(self, seed: int) -> Tensor:
        """Dropout factors as the kernels define them: a hash of the seed, the head and the indices."""
        batch, heads, num_q = self.query.shape[:3]
        num_k = self.key.shape[2]
        low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        q, k, head = torch.arange(num_q), torch.arange(num_k), torch.arange(batch * heads)
        if "cu_seqlens_k" in self.options:  # keys are counted within their sequence
            starts = self.options["cu_seqlens_k"].cpu()
            k = k - starts[torch.searchsorted(starts, k, right=True).clamp(max=len(starts) - 1) - 1]
        by_row = mix((mix(q ^ low) + mix(head ^ high)[:, None]) & 0xFFFFFFFF) | 1
        bits = (by_row[:, :, None] * (mix((k + high) & 0xFFFFFFFF) | 1)) & 0xFFFFFFFF
        kept = torch.where(bits < int(self.dropout * 2**32), 0.0, 1.0 / (1.0 - self.dropout))
        return kept.view(batch, heads, num_q, num_k).to(self.device)

    def dense(self, compute: torch.dtype, seed: int) -> list[Tensor]:
        """Output and gradients from all weights at once, products in `compute`; the oracle at fp64."""
        leaves = self.leaves(compute)
        exact = {
            k: v.to(compute) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in self.options.items()
        }
        weights = attention_weights(*leaves[:2], rule=self.rule_of(leaves), **exact)
        weights = weights.to(compute)
        if self.dropout > 0.0:
            weights = weights * self.kept(seed).to(compute)
        value = leaves[2].repeat_interleave(leaves[0].shape[1] // leaves[2].shape[1], 1)
        out = weights @ value
        return [out, *torch.autograd.grad(out, leaves, self.grad.to(compute))]


ACTIVATIONS = ELEMENTWISE_RULES
SEED = 0x1234_5678_9ABC_DEF0 >> 2
NAMES = ("output", "d query", "d key", "d value", "d alpha")


@contextmanager
def poisoned() -> Iterator[None]:
    """Empty memory is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attention_of(problem: Problem, leaves: list[Tensor]) -> Tensor:
    options = {"rule": problem.rule_of(leaves), "dropout_p": problem.dropout, "backend": "triton", **problem.options}
    return attention(*leaves[:3], **options)


def fused(problem: Problem) -> list[Tensor]:
    """Output and gradients from the kernels, in memory that was filled with NaN."""
    leaves = problem.leaves(problem.dtype)
    with poisoned():
        out = attention_of(problem, leaves)
        return [out, *torch.autograd.grad(out, leaves, problem.grad)]


def decoded(problem: Problem) -> list[Tensor]:
    """The output alone, as decoding has it."""
    with poisoned(), torch.no_grad():
        return [attention_of(problem, problem.leaves(problem.dtype))]


def check(problem: Problem, run: Callable[[Problem], list[Tensor]] = fused) -> list[Tensor]:
    """At most twice the error of dense attention in the same dtype, and a floor of rounding; what passed."""
    floor = 2e-6 if problem.dtype == torch.float32 else 1e-4
    exact = problem.dense(torch.float64, SEED)
    dense = problem.dense(problem.dtype, SEED)
    results = run(problem)
    for name, ours, theirs, truth in zip(NAMES, results, dense, exact, strict=False):
        assert ours.shape == truth.shape
        bound = 2.0 * error(theirs, truth) + floor
        assert error(ours, truth) <= bound, f"{name}: {error(ours, truth):.1e}, allowed {bound:.1e}"
    return results


def error(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm().clamp(min=1e-6)).item()


def mix(x: Tensor) -> Tensor:
    """The kernels' scrambling of 32 bits, in 64-bit integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def check_statistics(problem: Problem) -> None:
    """What a kernel counts against what the plain path observes, and that the output is the same with it.

    To the bit in the interpreter; a kernel that counts is compiled on its own, and may round in another order.
    """
    compiled = problem.device == "cuda"
    inputs = (problem.query, problem.key, problem.value)
    exact = [x.double().cpu() for x in inputs]
    settings = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in problem.options.items()}
    alpha = getattr(problem.rule, "alpha", None)
    settings["rule"] = Entmax(alpha.cpu()) if isinstance(alpha, Tensor) else problem.rule
    _, expected = attention_with_statistics(*exact, **settings)
    # A GPU takes for zero what fp32 can only hold as a denormal number: such weights may count or not.
    weights = attention_weights(*exact[:2], **settings)
    del settings["rule"]
    counted = dense_statistics(
        weights.where(weights > (1e-37 if compiled else 0.0), 0.0), check_call(*exact, **settings).visibility
    )
    call = check_call(*inputs, **problem.options)
    out, rows = dispatch.attend(call, problem.rule.bind(call), counted=True)
    plain = dispatch.attend(call, problem.rule.bind(call))[0]
    assert error(out, plain.double()) <= 2e-6 if compiled else torch.equal(out, plain)
    found = row_statistics(rows, call.visibility)
    for field in dataclasses.fields(expected):
        ours, *bounds = (getattr(x, field.name).cpu() for x in (found, expected, counted))
        between = ours.clamp(torch.minimum(*bounds), torch.maximum(*bounds))
        torch.testing.assert_close(ours, between, rtol=1e-3, atol=1e-4, msg=field.name)


def plant(rule: str, lengths: tuple[int, int], run: int, dtype: torch.dtype, device: str = "cpu") -> Problem:
    """A causal problem in which one run of keys in five has weights in a run of queries, and others have none."""
    case = {name: values[0] for name, values in FACTORS.items()}
    problem = Problem({**case, "rule": rule, "lengths": lengths, "groups": 2, "structure": "causal"}, dtype, device)
    problem.value, problem.grad = problem.value[:1, :1], problem.grad[:1, :2]
    for name, heads, low in (("query", 2, -1.0), ("key", 1, 0.0)):
        x = getattr(problem, name)[:1, :heads].float() * 0.1
        own = torch.arange(5) == (torch.arange(x.shape[2]) // run % 5)[:, None]
        x[..., :5] += 3.0 * torch.where(own, 1.0, low).to(device)
        setattr(problem, name, x.to(dtype))
    return problem


ADVERSARIAL = ("equal", "one above", "large", "near ties")


def check_mass(kind: str, alpha: float, n: int) -> None:
    """Of a row of n scores that are hard to solve, the weights sum to one."""
    scores = {
        "equal": torch.zeros(n),
        "one above": torch.where(torch.arange(n) == 3, 0.0, -1.0 / (alpha - 1.0) + 1e-3),
        "large": torch.linspace(990.0, 1000.0, n),
        "near ties": 1.0 + 1e-6 * torch.arange(n),
    }[kind]
    query, key, ones = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, n, 16), torch.ones(1, 1, n, 16)
    with poisoned():
        out = entmax_attention(query, key, ones, scores.view(1, 1, 1, n), alpha=alpha, backend="triton")
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.0, atol=1e-5)
