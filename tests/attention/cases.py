"""A naive float64 oracle of attention, masks entry by entry and entmax by bisection, and calls of every kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.functional import entmax_attention, relu_attention, softmax_attention

INF = math.inf
ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")
EXACT = {"rtol": 0.0, "atol": 1e-10}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bools(*shape: int, seed: int = 0, share: float = 0.6) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def visible_pairs(shape: tuple[int, int, int, int], **o: Any) -> Tensor:
    """(B, H, Lq, Lk), True where a key is seen: the contract, one entry at a time."""
    batch, _, queries, keys = shape
    mask = o.get("attn_mask")
    mask = None if mask is None else mask.detach().expand(shape).tolist()
    window = o.get("window")
    before, after = window if isinstance(window, tuple) else (window, window)
    before, after = (INF if side is None or side == -1 else side for side in (before, after))
    lengths, cu_q, cu_k = o.get("key_lengths"), o.get("cu_seqlens_q"), o.get("cu_seqlens_k")
    position = pair_positions(shape, **o)
    cu_k = cu_q if cu_k is None else cu_k

    def seen(b: int, i: int, j: int) -> bool:
        pi, pj = position(b, i, j)
        return (
            not (o.get("is_causal") and pj > pi)
            and pi - pj <= before
            and pj - pi <= after
            and (lengths is None or j < lengths[b])
            and (cu_q is None or segment(cu_q, i) == segment(cu_k, j) is not None)
        )

    def shown(entry: bool | float) -> bool:
        return entry if isinstance(entry, bool) else entry > -INF

    pairs = [[[seen(b, i, j) for j in range(keys)] for i in range(queries)] for b in range(batch)]
    together = torch.tensor(pairs, dtype=torch.bool).reshape(batch, 1, queries, keys).expand(shape)
    if mask is None:
        return together
    entries = [[[[shown(entry) for entry in row] for row in rows] for rows in heads] for heads in mask]
    return together & torch.tensor(entries, dtype=torch.bool).reshape(shape)


def segment(cu: Tensor, token: int) -> int | None:
    spans = zip(cu.tolist(), cu.tolist()[1:], strict=False)
    return next((number for number, (start, stop) in enumerate(spans) if start <= token < stop), None)


def pair_positions(shape: tuple[int, int, int, int], **o: Any) -> Callable[[int, int, int], tuple[int, int]]:
    queries, keys = shape[2:]
    given_q, given_k = o.get("query_positions"), o.get("key_positions")
    cu_q, cu_k = o.get("cu_seqlens_q"), o.get("cu_seqlens_k")
    cu_k = cu_q if cu_k is None else cu_k

    def of(positions: Tensor, b: int, index: int) -> int:
        row = positions if positions.ndim == 1 else positions[b % positions.shape[0]]
        return int(row[index])

    def both(b: int, i: int, j: int) -> tuple[int, int]:
        if cu_q is not None and given_q is None:
            number = segment(cu_q, i)
            if number is None or number != segment(cu_k, j):
                return 0, 0  # hidden anyway
            return i - int(cu_q[number + 1]), j - int(cu_k[number + 1])
        if given_q is None and given_k is None:
            return i - queries, j - keys
        pj = j if given_k is None else of(given_k, b, j)
        return of(given_k if given_q is None else given_q, b, i), pj

    return both


def oracle_scores(query: Tensor, key: Tensor, seen: Tensor, scale: float | None, **o: Any) -> Tensor:
    """Scores in float64; whatever is hidden is 0, not -inf."""
    batch, heads, queries, keys = seen.shape
    query, key = query.double(), key.double().repeat_interleave(heads // key.shape[1], 1)
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (query.shape[3] ** -0.5 if scale is None else scale)
    mask, slopes = o.get("attn_mask"), o.get("alibi_slopes")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + torch.where(mask > -INF, mask, 0.0).double()
    if slopes is not None:
        position = pair_positions(tuple(seen.shape), **o)
        pairs = [[[position(b, i, j) for j in range(keys)] for i in range(queries)] for b in range(batch)]
        distance = [[[abs(pi - pj) for pi, pj in row] for row in rows] for rows in pairs]
        distance = torch.tensor(distance, dtype=torch.float64).reshape(batch, 1, queries, keys)
        slopes = slopes.double().expand(batch, heads)
        scores = scores - slopes[:, :, None, None] * distance
    return torch.where(seen, scores, 0.0)


def entmax_oracle(scores: Tensor, seen: Tensor, alpha: float | Tensor) -> Tensor:
    """Bisection for the threshold, then one Newton step, through which autograd sees its derivative."""
    e = torch.as_tensor(alpha, dtype=torch.float64) - 1.0
    e = e[None, :, None, None] if e.ndim == 1 else e
    e = e.expand(*scores.shape[:-1], 1)
    alive = seen.any(-1, keepdim=True)
    z = torch.where(seen, scores, -INF)
    z = torch.where(alive, z, 0.0)
    z = z - z.detach().amax(-1, keepdim=True)
    power = torch.where(e == 0.0, 0.5, e)
    x = power * torch.where(seen, z, -1e3)
    with torch.no_grad():
        low, high = torch.full_like(power, -1.0), -(float(scores.shape[-1]) ** -power)
        for _ in range(60):
            tau = (low + high) / 2.0
            above = (x - tau).clamp(min=0.0).pow(1.0 / power).sum(-1, keepdim=True) > 1.0
            low, high = torch.where(above, tau, low), torch.where(above, high, tau)
        slope = ((x - low).clamp(min=0.0).pow(1.0 / power - 1.0) * (x > low)).sum(-1, keepdim=True) / power
        slope = torch.where(alive, slope, 1.0)
    tau = low + ((x - low).clamp(min=0.0).pow(1.0 / power).sum(-1, keepdim=True) - 1.0) / slope
    p = (x - tau).clamp(min=0.0).pow(1.0 / power)
    return torch.where(seen & alive, torch.where(e == 0.0, z.softmax(-1), p), 0.0)


def activation_oracle(
    scores: Tensor, seen: Tensor, activation: str, bias: float = 0.0, divide_by_count: bool = False
) -> Tensor:
    x = scores + bias
    weights = {
        "relu": lambda: x.clamp(min=0.0),
        "squared_relu": lambda: x.clamp(min=0.0) ** 2,
        "leaky_relu": lambda: torch.maximum(x, 0.01 * x),
        "gelu": lambda: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "identity": lambda: x,
        "sigmoid": lambda: 1.0 / (1.0 + torch.exp(-x)),
    }[activation]()
    if divide_by_count:
        weights = weights / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, weights, 0.0)


def oracle_weights(query: Tensor, key: Tensor, *, scale: float | None = None, **o: Any) -> Tensor:
    o.pop("enable_gqa", None)
    rule = {name: o.pop(name) for name in ("activation", "bias", "divide_by_count") if name in o}
    alpha = o.pop("alpha", 1.5)
    seen = visible_pairs((*query.shape[:3], key.shape[2]), **o)
    scores = oracle_scores(query, key, seen, scale, **o)
    return activation_oracle(scores, seen, **rule) if rule else entmax_oracle(scores, seen, alpha)


def oracle(query: Tensor, key: Tensor, value: Tensor, **o: Any) -> Tensor:
    weights = oracle_weights(query, key, **o)
    return weights @ value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)


@dataclass(frozen=True)
class Case:
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 7
    keys: int = 7
    dim: int = 4
    value_dim: int = 5
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        shared = (self.batch, self.key_heads, self.keys)
        return (
            randn(self.batch, self.heads, self.queries, self.dim, seed=3 * seed, dtype=dtype) * 2.0,
            randn(*shared, self.dim, seed=3 * seed + 1, dtype=dtype),
            randn(*shared, self.value_dim, seed=3 * seed + 2, dtype=dtype),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"enable_gqa": True, **self.options} if self.heads != self.key_heads else self.options


def some_inf(mask: Tensor, seed: int) -> Tensor:
    return torch.where(bools(*mask.shape, seed=seed, share=0.7), mask, -INF)


def feature_cases(lq: int, lk: int) -> dict[str, Case]:
    """Self-attention of length lk and cross-attention of lq on lk; B = 2, H = 4."""
    cross = {"queries": lq, "keys": lk}
    square = {"queries": lk, "keys": lk}
    split = [0, lk // 3, lk // 3, lk - 1]
    split_q = [0, lq // 2, lq - 2, lq - 1]
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    jumps = torch.arange(lk) * 2 - 3
    per_batch = torch.stack([torch.arange(lk), (torch.arange(lk) - 2).clamp(min=0)])
    lengths = torch.tensor([lk - 2, 0])
    return {
        "full": Case(**square),
        "causal": Case(**square, options={"is_causal": True}),
        "cross": Case(**cross),
        "cross_causal": Case(**cross, options={"is_causal": True}),
        "more_queries_causal": Case(queries=lk, keys=lq, options={"is_causal": True}),
        "gqa": Case(**cross, key_heads=2, options={"is_causal": True}),
        "mqa": Case(**square, key_heads=1, options={"alibi_slopes": slopes}),
        "mask_causal": Case(**cross, options={"attn_mask": bools(2, 1, lq, lk, seed=5), "is_causal": True}),
        "bias_causal": Case(**cross, options={"attn_mask": some_inf(randn(4, lq, lk), 6), "is_causal": True}),
        "gqa_mask": Case(**cross, key_heads=2, options={"attn_mask": bools(2, 4, 1, lk, seed=7)}),
        "window": Case(**square, options={"window": 2}),
        "window_self": Case(**square, options={"window": 0}),
        "window_left": Case(**cross, options={"window": (3, None)}),
        "window_right": Case(**cross, options={"window": (-1, 1)}),
        "window_pair": Case(**cross, options={"window": (3, 1), "is_causal": True}),
        "window_unbounded": Case(**cross, options={"window": (None, -1)}),
        "alibi": Case(**cross, options={"alibi_slopes": slopes}),
        "alibi_batch": Case(
            **cross, options={"alibi_slopes": torch.stack([slopes, 2 * slopes + 0.1]), "is_causal": True}
        ),
        "alibi_bias": Case(**cross, options={"alibi_slopes": slopes, "attn_mask": some_inf(randn(lq, lk), 8)}),
        "query_positions": Case(**cross, options={"query_positions": torch.arange(lq) * 2, "is_causal": True}),
        "key_positions": Case(**square, options={"key_positions": jumps.flip(0), "is_causal": True, "window": (5, 0)}),
        "batch_positions": Case(
            **square,
            options={
                "query_positions": per_batch,
                "key_positions": per_batch.int(),
                "is_causal": True,
                "alibi_slopes": slopes,
            },
        ),
        "key_lengths": Case(**cross, options={"key_lengths": lengths}),
        "key_lengths_causal": Case(**cross, key_heads=2, options={"key_lengths": lengths.int(), "is_causal": True}),
        "packed": Case(
            **square, batch=1, options={"cu_seqlens_q": torch.tensor(split), "is_causal": True, "alibi_slopes": slopes}
        ),
        "packed_cross": Case(
            **cross,
            batch=1,
            key_heads=2,
            options={
                "cu_seqlens_q": torch.tensor(split_q, dtype=torch.int32),
                "cu_seqlens_k": torch.tensor([0, lk // 3, lk // 3, lk - 2], dtype=torch.int32),
                "is_causal": True,
                "window": (4, 0),
            },
        ),
        "scale": Case(**cross, options={"scale": 1.7}),
        "scale_zero": Case(**square, options={"scale": 0.0, "is_causal": True}),
        "scale_negative": Case(**square, options={"scale": -0.8}),
    }


CASES = feature_cases(6, 9)
LONG_CASES = feature_cases(37, 41) | {
    "many_batches": Case(batch=7, key_heads=2, queries=4, keys=4, options={"is_causal": True}),
    "many_heads": Case(queries=10, keys=6, options={"attn_mask": bools(2, 4, 10, 6)}),
}
MASK_SHAPES = (
    (9,),
    (6, 9),
    (1, 9),
    (6, 1),
    (4, 6, 9),
    (1, 6, 9),
    (4, 1, 9),
    (2, 4, 6, 9),
    (2, 1, 1, 9),
    (1, 4, 1, 9),
    (2, 1, 6, 1),
    (1, 1, 6, 9),
    (2, 4, 1, 1),
    (1, 1, 1, 1),
)
FUNCTIONS = {
    "entmax": (entmax_attention, {}),
    "sparsemax": (entmax_attention, {"alpha": 2.0}),
    "softmax": (softmax_attention, {}),
    "relu": (relu_attention, {"activation": "relu"}),
    "sigmoid": (relu_attention, {"activation": "sigmoid", "bias": -1.0, "divide_by_count": True}),
}

every_function = pytest.mark.parametrize("name", FUNCTIONS)


def rule_options(name: str) -> dict[str, Any]:
    return {"alpha": 1.0} if name == "softmax" else FUNCTIONS[name][1]


def call(name: str, inputs: tuple[Tensor, ...], **options: Any) -> Tensor:
    function, fixed = FUNCTIONS[name]
    return function(*inputs, **fixed, **options)


def differentiable(case: Case) -> tuple[list[Tensor], dict[str, Any], list[str]]:
    """q, k, v and what else of the options is differentiable, as leaves; the options left; their names."""
    inputs = [leaf(x) for x in case.inputs()]
    options, names = dict(case.arguments), []
    for name in ("attn_mask", "alibi_slopes"):
        if name in options and options[name].is_floating_point():
            inputs.append(leaf(options.pop(name)))
            names.append(name)
    return inputs, options, names


def check_gradients(function: Callable[..., Tensor], case: Case, **rule: Any) -> None:
    inputs, options, names = differentiable(case)
    expected_rule = dict(rule)
    if isinstance(rule.get("alpha"), Tensor):
        inputs.append(leaf(rule.pop("alpha")))
        names.append("alpha")
        expected_rule.pop("alpha")
    if function is softmax_attention:
        expected_rule = {"alpha": 1.0}
    tensors = dict(zip(names, inputs[3:], strict=True))
    out = function(*inputs[:3], **options, **rule, **tensors)
    expected = oracle(*inputs[:3], **options, **expected_rule, **tensors)
    probe = randn(*out.shape, seed=9)
    got = torch.autograd.grad(out, inputs, probe)
    want = torch.autograd.grad(expected, inputs, probe)
    for name, gradient, reference_gradient in zip(["q", "k", "v", *names], got, want, strict=True):
        torch.testing.assert_close(
            gradient, reference_gradient, rtol=0.0, atol=1e-9, msg=lambda m, name=name: f"d{name}: {m}"
        )


def output_and_gradients(name: str, case: Case, **rule: Any) -> list[Tensor]:
    inputs, options, names = differentiable(case)
    if "alpha" in rule:
        inputs.append(leaf(rule.pop("alpha")))
        names.append("alpha")
    out = call(name, inputs[:3], **options, **rule, **dict(zip(names, inputs[3:], strict=True)))
    return [out.detach(), *torch.autograd.grad(out, inputs, randn(*out.shape, seed=9))]


def hidden_rows() -> dict[str, dict[str, Any]]:
    """Options under which some queries of (2, 4, 6, 9) see no key."""
    rows = torch.ones(6, 1, dtype=torch.bool)
    rows[2:4] = False
    additive = torch.zeros(2, 1, 6, 9)
    additive[0, :, 1] = -INF
    return {
        "bool": {"attn_mask": rows},
        "additive": {"attn_mask": additive},
        "all_additive": {"attn_mask": torch.full((6, 9), -INF)},
        "key_lengths": {"key_lengths": torch.tensor([0, 3])},
        "positions": {"query_positions": torch.arange(6) - 2, "is_causal": True},
        "window": {"query_positions": torch.arange(6) + 7, "window": 1},
        "alibi": {"attn_mask": additive, "alibi_slopes": torch.full((4,), 0.5)},
    }


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
