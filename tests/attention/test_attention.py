"""The attention functions against a naive float64 oracle: masks entry by entry, entmax by bisection."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

import tamis.attention.reference as reference
from tamis.attention.masks import Visibility
from tamis.attention.rules import EntmaxRule
from tamis.functional import attention_weights, entmax_attention, relu_attention, softmax_attention

INF = math.inf
ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")
EXACT = {"rtol": 0.0, "atol": 1e-10}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bools(*shape: int, seed: int = 0, share: float = 0.6) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


# ---------------------------------------------------------------------------------------------------------------
# The oracle


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


# ---------------------------------------------------------------------------------------------------------------
# Cases: every feature at one size


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


@every_function
@pytest.mark.parametrize("case", CASES)
def test_forward(name: str, case: str) -> None:
    inputs = CASES[case].inputs()
    out = call(name, inputs, **CASES[case].arguments)
    torch.testing.assert_close(out, oracle(*inputs, **CASES[case].arguments, **rule_options(name)), **EXACT)


@pytest.mark.parametrize("name", ["entmax", "softmax", "sigmoid"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float_inf"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_of_every_shape(name: str, shape: tuple[int, ...], kind: str, is_causal: bool) -> None:
    mask = bools(*shape, seed=len(shape)) if kind == "bool" else randn(*shape, seed=1)
    if kind == "float_inf":
        mask = some_inf(mask, 2)
    inputs = Case(queries=6, keys=9).inputs()
    options = {"attn_mask": mask, "is_causal": is_causal}
    expected = oracle(*inputs, **options, **rule_options(name))
    torch.testing.assert_close(call(name, inputs, **options), expected, **EXACT)


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.12, 1.13, 1.25, 1.5, 1.7, 2.0])
@pytest.mark.parametrize("case", ["causal", "gqa", "bias_causal"])
def test_forward_of_every_alpha(alpha: float, case: str) -> None:
    inputs = CASES[case].inputs()
    options = {**CASES[case].arguments, "alpha": alpha}
    torch.testing.assert_close(entmax_attention(*inputs, **options), oracle(*inputs, **options), **EXACT)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1, 1), (6, 1), (2, 1, 1, 1), (2, 4, 6, 1)], ids=str)
def test_alpha_tensors_broadcast(shape: tuple[int, ...]) -> None:
    alpha = 1.0 + torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = CASES["cross_causal"]
    options = {**case.arguments, "alpha": alpha}
    torch.testing.assert_close(entmax_attention(*case.inputs(), **options), oracle(*case.inputs(), **options), **EXACT)


def test_mixed_alpha_per_head() -> None:
    alpha = torch.tensor([1.0, 1.05, 1.5, 2.0])
    inputs = CASES["gqa"].inputs()
    out = entmax_attention(*inputs, **CASES["gqa"].arguments, alpha=alpha)
    for head, value in enumerate(alpha.double()):
        expected = oracle(*inputs, **CASES["gqa"].arguments, alpha=float(value))
        torch.testing.assert_close(out[:, head], expected[:, head], **EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [0.0, -0.7])
@pytest.mark.parametrize("divide_by_count", [False, True])
@pytest.mark.parametrize("case", ["gqa", "mask_causal", "packed_cross"])
def test_activations(activation: str, bias: float, divide_by_count: bool, case: str) -> None:
    rule = {"activation": activation, "bias": bias, "divide_by_count": divide_by_count}
    arguments = {**CASES[case].arguments, **rule}
    inputs = [leaf(x) for x in CASES[case].inputs()]
    out, expected = relu_attention(*inputs, **arguments), oracle(*inputs, **arguments)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(*out.shape, seed=9)
    for got, want in zip(torch.autograd.grad(out, inputs, probe), torch.autograd.grad(expected, inputs, probe)):  # noqa: B905
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("divide_by_count", [False, True])
def test_minus_inf_in_an_additive_mask_hides_whatever_the_activation(activation: str, divide_by_count: bool) -> None:
    """`Masked weights are 0 whatever the activation`, and -inf masks."""
    rule = {"activation": activation, "divide_by_count": divide_by_count}
    inputs = [leaf(x) for x in CASES["bias_causal"].inputs()]
    mask = CASES["bias_causal"].options["attn_mask"]
    additive = leaf(mask)
    out = relu_attention(*inputs, attn_mask=additive, is_causal=True, **rule)
    expected = oracle(*inputs, attn_mask=mask, is_causal=True, **rule)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(*out.shape, seed=9)
    *got, d_mask = torch.autograd.grad(out, [*inputs, additive], probe)
    for gradient, want in zip(got, torch.autograd.grad(expected, inputs, probe), strict=True):
        torch.testing.assert_close(gradient, want, **EXACT)
    assert bool((d_mask[mask == -INF] == 0.0).all())


@every_function
@pytest.mark.parametrize("lowest", [torch.float32, torch.float64])
def test_masks_at_the_lowest_float_hide(name: str, lowest: torch.dtype) -> None:
    """What transformers writes into additive masks."""
    hide = ~bools(6, 9, seed=4)
    hide[:, 0] = False
    inputs = CASES["cross"].inputs()
    additive = torch.zeros(6, 9, dtype=torch.float64).masked_fill(hide, torch.finfo(lowest).min)
    torch.testing.assert_close(call(name, inputs, attn_mask=additive), oracle_of_mask(name, inputs, ~hide))


def oracle_of_mask(name: str, inputs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    options = dict(rule_options(name))
    if options.pop("divide_by_count", False):  # lowest floats weigh nothing, but count as seen
        return oracle(*inputs, attn_mask=mask, **options) / inputs[1].shape[2]
    return oracle(*inputs, attn_mask=mask, **options)


@every_function
@pytest.mark.parametrize("lengths", [(1, 1), (63, 63), (100, 63), (63, 100), (1, 100), (100, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_odd_lengths(name: str, lengths: tuple[int, int], is_causal: bool) -> None:
    inputs = Case(batch=1, heads=2, key_heads=1, queries=lengths[0], keys=lengths[1]).inputs()
    options = {"is_causal": is_causal, "enable_gqa": True}
    expected = oracle(*inputs, **options, **rule_options(name))
    torch.testing.assert_close(call(name, inputs, **options), expected, **EXACT)


@every_function
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [2, 0])
def test_empty(name: str, sizes: tuple[int, int], is_causal: bool, batch: int) -> None:
    inputs = [leaf(x) for x in Case(batch=batch, queries=sizes[0], keys=sizes[1]).inputs()]
    out = call(name, inputs, is_causal=is_causal)
    assert out.shape == (batch, 4, sizes[0], 5)
    assert bool((out == 0.0).all())
    for gradient, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert gradient.shape == x.shape
        assert bool((gradient == 0.0).all())


@every_function
def test_no_heads(name: str) -> None:
    inputs = Case(heads=0, key_heads=0).inputs()
    assert call(name, inputs, is_causal=True).shape == (2, 0, 7, 5)


@every_function
def test_non_contiguous_inputs(name: str) -> None:
    case = CASES["gqa"]
    plain = case.inputs()
    strided = [leaf(x.transpose(1, 2).contiguous().transpose(1, 2)) for x in plain]
    assert not any(x.is_contiguous() for x in strided)
    dense = [leaf(x) for x in plain]
    out, expected = call(name, strided, **case.arguments), call(name, dense, **case.arguments)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(5, 6, 4, 2, seed=9).permute(3, 2, 1, 0)
    pairs = zip(torch.autograd.grad(out, strided, probe), torch.autograd.grad(expected, dense, probe), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, **EXACT)


@every_function
def test_expanded_inputs_and_masks(name: str) -> None:
    query, key, value = CASES["cross"].inputs()
    key, value = key[:1, :1].expand(2, 4, -1, -1), value[:1, :1].expand(2, 4, -1, -1)
    mask = bools(1, 1, 6, 1, seed=3).expand(2, 4, 6, 9)
    expected = oracle(query, key, value, attn_mask=mask, **rule_options(name))
    torch.testing.assert_close(call(name, (query, key, value), attn_mask=mask), expected, **EXACT)


@every_function
def test_arguments_stay_as_they_were(name: str) -> None:
    case = CASES["alibi_bias"]
    inputs = [leaf(x) for x in case.inputs()]
    before = [x.detach().clone() for x in (*inputs, *case.options.values())]
    call(name, inputs, **case.arguments).sum().backward()
    for x, old in zip((*inputs, *case.options.values()), before, strict=True):
        assert torch.equal(x.detach(), old)


# ---------------------------------------------------------------------------------------------------------------
# Packing


@every_function
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_equals_separate_calls(name: str, is_causal: bool) -> None:
    lengths_q, lengths_k, spare = (3, 0, 5, 1), (4, 2, 3, 1), 2
    case = Case(batch=1, key_heads=2, queries=sum(lengths_q) + spare, keys=sum(lengths_k) + spare)
    query, key, value = (leaf(x) for x in case.inputs())
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    options = {"is_causal": is_causal, "enable_gqa": True, "alibi_slopes": slopes, "window": (3, 2)}
    cu_q, cu_k = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)) for lengths in (lengths_q, lengths_k))
    packed = call(name, (query, key, value), **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k.int())
    parts = zip(query[:, :, :-spare].split(lengths_q, 2), *(x[:, :, :-spare].split(lengths_k, 2) for x in (key, value)))  # noqa: B905
    expected = torch.cat([call(name, part, **options) for part in parts], 2)
    torch.testing.assert_close(packed[:, :, :-spare], expected, **EXACT)
    assert bool((packed[:, :, -spare:] == 0.0).all())
    probe = randn(*packed.shape, seed=9)
    got = torch.autograd.grad(packed, (query, key, value), probe)
    want = torch.autograd.grad(expected, (query, key, value), probe[:, :, :-spare])
    for gradient, separate in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, separate, **EXACT)
        assert bool((gradient[:, :, -spare:] == 0.0).all())


@every_function
def test_cached_steps_equal_the_full_forward(name: str) -> None:
    """Bottom-right alignment: one new query against all keys so far."""
    query, key, value = CASES["causal"].inputs()
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    options = {"is_causal": True, "alibi_slopes": slopes, "window": 4}
    full = call(name, (query, key, value), **options)
    for t in range(query.shape[2]):
        step = call(name, (query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]), **options)
        torch.testing.assert_close(step, full[:, :, t : t + 1], **EXACT)


# ---------------------------------------------------------------------------------------------------------------
# Gradients


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


@every_function
@pytest.mark.parametrize("case", CASES)
def test_gradients(name: str, case: str) -> None:
    function, rule = FUNCTIONS[name]
    check_gradients(function, CASES[case], **rule)


@pytest.mark.parametrize("shape", [(), (4,), (6, 1), (2, 4, 6, 1), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("case", ["cross", "gqa", "alibi_bias", "key_lengths_causal", "window_pair"])
def test_gradients_of_alpha(shape: tuple[int, ...], case: str) -> None:
    spread = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check_gradients(entmax_attention, CASES[case], alpha=1.05 + 0.9 * spread)


@pytest.mark.parametrize("shape", [(9,), (6, 9), (4, 1, 9), (2, 1, 6, 1), (1, 4, 1, 1), (2, 4, 6, 9)], ids=str)
@pytest.mark.parametrize("name", ["entmax", "softmax", "sigmoid"])
def test_gradients_of_broadcast_masks(name: str, shape: tuple[int, ...]) -> None:
    function, rule = FUNCTIONS[name]
    mask = some_inf(randn(*shape), 3)
    check_gradients(function, Case(queries=6, keys=9, key_heads=2, options={"attn_mask": mask}), **rule)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.9])
def test_gradcheck(alpha: float) -> None:
    case = Case(batch=1, heads=2, key_heads=1, queries=3, keys=4, dim=2, value_dim=2)
    inputs = [leaf(x) for x in case.inputs()]
    alphas = leaf(torch.full((2,), alpha, dtype=torch.float64))
    mask, slopes = leaf(randn(3, 4, seed=7)), leaf(torch.tensor([0.3, 0.1], dtype=torch.float64))

    def function(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
        return entmax_attention(q, k, v, mask, is_causal=True, enable_gqa=True, alpha=alpha, alibi_slopes=slopes)

    assert gradcheck(function, (*inputs, alphas, mask, slopes))


def test_alpha_gradient_at_one_is_the_limit() -> None:
    """dp / dalpha at 1 = p (sum_j p_j ln^2 p_j - ln^2 p) / 2."""
    query, key, value = CASES["gqa"].inputs()
    alpha = leaf(torch.ones(4, dtype=torch.float64))
    probe = randn(2, 4, 6, 5, seed=9)
    out = entmax_attention(query, key, value, is_causal=True, enable_gqa=True, alpha=alpha)
    (got,) = torch.autograd.grad(out, alpha, probe)
    p = oracle_weights(query, key, is_causal=True, alpha=1.0)
    squares = torch.where(p > 0.0, p.clamp(min=1e-300).log() ** 2, 0.0)
    derivative = p * ((p * squares).sum(-1, keepdim=True) - squares) / 2.0
    expected = ((derivative @ value.repeat_interleave(2, 1)) * probe).sum((0, 2, 3))
    torch.testing.assert_close(got, expected, **EXACT)


def test_only_what_requires_grad_gets_one() -> None:
    query, key, value = CASES["bias_causal"].inputs()
    mask = leaf(CASES["bias_causal"].options["attn_mask"])
    out = entmax_attention(query, key, value, mask)
    out.sum().backward()
    assert mask.grad is not None
    assert query.grad is key.grad is value.grad is None
    assert not entmax_attention(query, key, value, mask.detach()).requires_grad


@every_function
def test_half_precision_gradients_have_the_dtype_of_their_input(name: str) -> None:
    inputs = [leaf(x) for x in CASES["cross"].inputs(torch.bfloat16)]
    mask, slopes = leaf(randn(6, 9, dtype=torch.float32)), leaf(randn(4, dtype=torch.float32).abs())
    call(name, inputs, attn_mask=mask, alibi_slopes=slopes).sum().backward()
    assert [x.grad.dtype for x in inputs] == [torch.bfloat16] * 3
    assert mask.grad.dtype == slopes.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------
# The blocked path, the path of one block, and the dense path are one function


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    def set_blocks(tiny: bool) -> None:
        monkeypatch.setattr(reference, "_BLOCK", 200 if tiny else 1 << 30)
        monkeypatch.setattr(reference, "_KEEP", 0 if tiny else 1 << 30)

    return set_blocks


def output_and_gradients(name: str, case: Case, **rule: Any) -> list[Tensor]:
    inputs, options, names = differentiable(case)
    if "alpha" in rule:
        inputs.append(leaf(rule.pop("alpha")))
        names.append("alpha")
    out = call(name, inputs[:3], **options, **rule, **dict(zip(names, inputs[3:], strict=True)))
    return [out.detach(), *torch.autograd.grad(out, inputs, randn(*out.shape, seed=9))]


@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
@pytest.mark.parametrize("case", LONG_CASES)
def test_blocks_change_nothing(name: str, case: str, tiny_blocks: Callable[[bool], None]) -> None:
    case = LONG_CASES[case]
    rule = {}
    if name == "entmax":
        spread = torch.rand(case.batch, 4, case.queries, 1, generator=torch.Generator().manual_seed(2))
        rule["alpha"] = 1.0 + spread.double()
    tiny_blocks(False)
    whole = output_and_gradients(name, case, **rule)
    tiny_blocks(True)
    inputs = case.inputs()
    anything = Visibility(num_queries=case.queries, num_keys=case.keys, device=inputs[0].device)
    walk = reference.Walk(*inputs[:2], EntmaxRule(0.5), anything, 1.0)
    assert walk.rows < case.queries or walk.head_step < case.key_heads or walk.batch_step < case.batch
    for got, want in zip(output_and_gradients(name, case, **rule), whole, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (5, 1)])
@pytest.mark.parametrize("window", [None, (-1, -1), (2, -1), (-1, 1), (0, 0), (1, 3), (20, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_are_as_narrow_as_what_they_see(
    queries: int, keys: int, window: tuple[int, int] | None, is_causal: bool
) -> None:
    everything, device = slice(None), torch.device("cpu")
    visibility = Visibility(num_queries=queries, num_keys=keys, device=device, window=window, is_causal=is_causal)
    keep, _ = visibility.block(everything, everything, everything)
    seen = torch.ones(queries, keys, dtype=torch.bool) if keep is None else keep[0, 0]
    for start, stop in itertools.combinations(range(queries + 1), 2):
        sight = visibility.keys_in_sight(slice(start, stop))
        found = seen[start:stop].any(0).nonzero()[:, 0].tolist()
        assert 0 <= sight.start < sight.stop <= keys
        if found:
            assert (sight.start, sight.stop) == (found[0], found[-1] + 1)
        narrow, _ = visibility.block(everything, everything, slice(start, stop), sight)
        assert narrow is None or torch.equal(narrow[0, 0], seen[start:stop, sight])


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_packed_sequences_see_those_of_their_queries(is_causal: bool) -> None:
    everything, device = slice(None), torch.device("cpu")
    bounds = torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 3, 4, 4, 8])  # without queries, without keys; a rest
    visibility = Visibility(num_queries=8, num_keys=9, device=device, cu_seqlens=bounds, is_causal=is_causal)
    keep, _ = visibility.block(everything, everything, everything)
    for start, stop in itertools.combinations(range(9), 2):
        sight = visibility.keys_in_sight(slice(start, stop))
        assert 0 <= sight.start < sight.stop <= 9
        hidden = keep[0, 0, start:stop].clone()
        hidden[:, sight] = False
        assert not hidden.any()
    assert [visibility.keys_in_sight(slice(*places)) for places in ((0, 2), (5, 6))] == [slice(0, 3), slice(4, 8)]


@pytest.mark.parametrize("keep", [0, 1 << 30])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_kept_weights_change_nothing(keep: int, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_KEEP", keep)
    check_gradients(entmax_attention, CASES["gqa"], alpha=alpha)


@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
@pytest.mark.parametrize("case", CASES)
def test_torch_func_takes_the_dense_path_to_the_same_result(name: str, case: str) -> None:
    case = CASES[case]
    inputs, options, names = differentiable(case)
    expected = output_and_gradients(name, case)

    def function(*tensors: Tensor) -> Tensor:
        return call(name, tensors[:3], **options, **dict(zip(names, tensors[3:], strict=True)))

    out, pullback = torch.func.vjp(function, *(x.detach() for x in inputs))
    for got, want in zip((out, *pullback(randn(*out.shape, seed=9))), expected, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
def test_forward_mode_takes_the_dense_path_too(name: str, grad: bool) -> None:
    query, key, value = Case().inputs()
    tangent = randn(*query.shape, seed=9)
    wanted = torch.func.jvp(lambda x: call(name, (x, key, value)), (query,), (tangent,))[1]
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad):
        out = call(name, (torch.autograd.forward_ad.make_dual(query, tangent), key, value))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, wanted, **EXACT)


# ---------------------------------------------------------------------------------------------------------------
# Special alphas


@pytest.mark.parametrize("alpha", [1.0, 1, torch.tensor(1.0), torch.ones(4), torch.ones(2, 4, 7, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_alpha_one_is_scaled_dot_product_attention(alpha: float | Tensor, is_causal: bool) -> None:
    inputs = [leaf(x) for x in Case(key_heads=2).inputs()]
    got = entmax_attention(*inputs, is_causal=is_causal, enable_gqa=True, alpha=alpha)
    want = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(got, want, **EXACT)
    probe = randn(*got.shape, seed=9)
    pairs = zip(torch.autograd.grad(got, inputs, probe), torch.autograd.grad(want, inputs, probe), strict=True)
    for gradient, of_sdpa in pairs:
        torch.testing.assert_close(gradient, of_sdpa, **EXACT)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", ["full", "causal", "cross", "scale", "scale_negative"])
def test_softmax_is_scaled_dot_product_attention(backend: str, case: str) -> None:
    inputs = CASES[case].inputs()
    want = F.scaled_dot_product_attention(*inputs, **CASES[case].arguments)
    torch.testing.assert_close(softmax_attention(*inputs, **CASES[case].arguments, backend=backend), want, **EXACT)


def test_alpha_two_is_sparsemax_attention() -> None:
    from oracles import sparsemax_by_sorting

    query, key, value = CASES["full"].inputs()
    weights = sparsemax_by_sorting(query @ key.mT / 2.0)
    assert bool((weights == 0.0).any())
    torch.testing.assert_close(entmax_attention(query, key, value, alpha=2.0), weights @ value, **EXACT)


# ---------------------------------------------------------------------------------------------------------------
# Precision


def naive(query: Tensor, key: Tensor, value: Tensor, rule: str) -> Tensor:
    """Every intermediate in the dtype of the inputs, but the weights solved for in float64."""
    from oracles import entmax15_by_sorting, sparsemax_by_sorting

    scores = (query @ key.mT) * query.shape[3] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INF)
    solve = {
        "softmax": lambda z: z.softmax(-1),
        "entmax": entmax15_by_sorting,
        "sparsemax": sparsemax_by_sorting,
        "relu": lambda z: z.relu(),
    }[rule]
    return solve(scores).to(scores.dtype) @ value


@pytest.mark.parametrize("name", ["softmax", "entmax", "sparsemax", "relu"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
)
def test_error_is_at_most_twice_that_of_a_dense_reference(name: str, dtype: torch.dtype, autocast: bool) -> None:
    inputs = Case(batch=1, heads=2, key_heads=2, queries=100, keys=100, dim=32, value_dim=32).inputs(dtype)
    exact = oracle(*inputs, is_causal=True, **rule_options(name))
    given = [x.float() for x in inputs] if autocast else inputs
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out = call(name, given, is_causal=True)
    assert out.dtype == dtype
    error, allowed = ((x.double() - exact) for x in (out, naive(*inputs, name)))
    assert error.abs().max() <= 2.0 * allowed.abs().max()
    assert error.square().mean() <= 4.0 * allowed.square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "entmax", "sparsemax", "relu"])
def test_gradient_error_is_at_most_twice_that_of_autograd(name: str, dtype: torch.dtype) -> None:
    case = Case(batch=1, heads=2, key_heads=2, queries=63, keys=63, dim=32, value_dim=32)
    probe = randn(1, 2, 63, 32, seed=9, dtype=dtype)

    def gradients(function: Callable[..., Tensor], to: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [leaf(x.to(to)) for x in case.inputs(dtype)]
        out = function(*inputs)
        return torch.autograd.grad(out, inputs, probe.to(out.dtype))

    def rounded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = torch.ones(63, 63, dtype=torch.bool).tril().expand(1, 2, 63, 63)
        scores = (query @ key.mT) * query.shape[3] ** -0.5
        options = rule_options(name)
        solve = activation_oracle if "activation" in options else entmax_oracle
        weights = solve(scores.double(), seen, **({"alpha": 1.5} | options if solve is entmax_oracle else options))
        return weights.to(dtype) @ value

    exact = gradients(lambda *x: oracle(*x, is_causal=True, **rule_options(name)), torch.float64)
    got = gradients(lambda *x: call(name, x, is_causal=True), dtype)
    allowed = gradients(rounded, dtype)
    for gradient, want, naively in zip(got, exact, allowed, strict=True):
        assert (gradient - want).square().mean() <= 4.0 * (naively - want).square().mean()


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0])
@pytest.mark.parametrize("size", [0.1, 30.0, 3000.0])
def test_fp32_weights_sum_to_one(alpha: float, size: float) -> None:
    query, key, _ = Case(queries=50, keys=300).inputs(torch.float32)
    weights = attention_weights(query * size, key, alpha=alpha, is_causal=True)
    assert weights.dtype == torch.float32
    assert (weights.double().sum(-1) - 1.0).abs().max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------
# Rows that see nothing, and garbage nobody sees


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


@every_function
@pytest.mark.parametrize("case", hidden_rows())
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        (torch.float64, "blocks"),
        (torch.float32, "resolved"),
        (torch.bfloat16, "blocks"),
        (torch.float16, "blocks"),
        (torch.float16, "dense"),
    ],
)
def test_masked_rows_are_zero(
    name: str, case: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = hidden_rows()[case]
    inputs = CASES["cross"].inputs(dtype)
    empty = ~visible_pairs((2, 4, 6, 9), **options).any(-1)
    assert bool(empty.any())
    probe = torch.ones(2, 4, 6, 5, dtype=dtype)
    if path == "resolved":
        monkeypatch.setattr(reference, "_KEEP", 0)
    out, pullback = torch.func.vjp(lambda *x: call(name, x, **options), *inputs) if path == "dense" else (None, None)
    if pullback is None:
        leaves = [leaf(x) for x in inputs]
        out = call(name, leaves, **options)
        gradients = torch.autograd.grad(out, leaves, probe)
    else:
        gradients = pullback(probe)
    assert bool((out[empty] == 0.0).all())
    assert bool(out.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][empty] == 0.0).all())
    if bool(empty.all()):
        assert all(bool((gradient == 0.0).all()) for gradient in gradients)


@pytest.mark.parametrize("case", hidden_rows())
def test_masked_rows_give_alpha_mask_and_slopes_no_gradient(case: str) -> None:
    options = hidden_rows()[case]
    empty = ~visible_pairs((2, 4, 6, 9), **options).any(-1)
    alpha = leaf(torch.full((2, 4, 6, 1), 1.5, dtype=torch.float64))
    slopes = leaf(torch.full((4,), 0.25, dtype=torch.float64))
    leaves = [alpha, slopes]
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = leaf(options["attn_mask"].double())
        leaves.append(options["attn_mask"])
    options["alibi_slopes"] = slopes
    out = entmax_attention(*CASES["cross"].inputs(), **options, alpha=alpha)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][empty] == 0.0).all())
    assert bool((gradients[0][~empty] != 0.0).any()) or bool(empty.all())
    if len(gradients) == 3:
        assert bool((gradients[2][options["attn_mask"] == -INF] == 0.0).all())


@every_function
@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 1e30])
@pytest.mark.parametrize("how", ["mask", "key_lengths", "causal", "packed"])
@pytest.mark.parametrize("path", ["blocks", "dense"])
def test_garbage_in_hidden_keys_stays_hidden(name: str, garbage: float, how: str, path: str) -> None:
    batch = 1 if how == "packed" else 2
    query, key, value = Case(batch=batch, queries=6, keys=9).inputs(torch.float32)
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.arange(9) < 6},
        "key_lengths": {"key_lengths": torch.tensor([6, 4])},
        "causal": {"is_causal": True, "query_positions": torch.arange(6)},
        "packed": {"cu_seqlens_q": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 6])},
    }[how]
    spoiled = key.clone()
    spoiled[:, :, 6:] = garbage

    def function(query: Tensor) -> Tensor:
        return call(name, (query, spoiled, value), **options)

    out = torch.func.vjp(function, query)[0] if path == "dense" else function(query)
    torch.testing.assert_close(out, call(name, (query, key, value), **options), rtol=0.0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------
# Dropout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_identity_values(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values under which the output is the weights."""
    query, key, _ = Case(queries=queries, keys=keys).inputs()
    return query, key, torch.eye(keys, dtype=torch.float64).expand(2, 4, keys, keys)


@every_function
@pytest.mark.parametrize("block", [200, 1 << 19])
def test_dropout_keeps_or_scales(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK", block)
    inputs = with_identity_values(64, 64)
    plain = call(name, inputs)
    dropped = call(name, inputs, dropout_p=0.3, generator=seeded())
    kept = dropped != 0.0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.7, **EXACT)
    positive = plain > 0.0
    share = (kept & positive).sum() / positive.sum()
    assert abs(float(share) - 0.7) < 5.0 * math.sqrt(0.21 / float(positive.sum()))
    assert torch.equal(dropped, call(name, inputs, dropout_p=0.3, generator=seeded()))
    assert not torch.equal(dropped, call(name, inputs, dropout_p=0.3, generator=seeded(1)))
    if name == "softmax":  # every weight is positive: blocks must not repeat one another
        rows = kept.reshape(-1, 64)
        assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]


@every_function
def test_dropout_calls_differ_and_follow_the_global_seed(name: str) -> None:
    inputs = with_identity_values(9, 9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (call(name, inputs, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(0)
        again = call(name, inputs, dropout_p=0.5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@every_function
@pytest.mark.parametrize("generator", [False, True])
def test_dropout_of_nothing_and_of_everything(name: str, generator: bool) -> None:
    inputs = [leaf(x) for x in CASES["cross"].inputs()]
    drawn = seeded() if generator else None
    torch.testing.assert_close(call(name, inputs, dropout_p=0.0, generator=drawn), call(name, inputs), **EXACT)
    nothing = call(name, inputs, dropout_p=1.0, generator=drawn)
    assert bool((nothing == 0.0).all())
    assert all(bool((x == 0.0).all()) for x in torch.autograd.grad(nothing.sum(), inputs))


def test_no_dropout_draws_nothing() -> None:
    generator = seeded()
    before = generator.get_state()
    entmax_attention(*CASES["cross"].inputs(), generator=generator)
    assert torch.equal(generator.get_state(), before)


@every_function
@pytest.mark.parametrize("block", [200, 1 << 19])
@pytest.mark.parametrize("keep", [0, 1 << 25])
def test_dropout_gradient_uses_the_same_mask(name: str, block: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK", block)
    monkeypatch.setattr(reference, "_KEEP", keep)
    inputs = [leaf(x) for x in Case(heads=2, key_heads=1, queries=18, keys=7, dim=2, value_dim=2).inputs()]
    directions = [randn(*x.shape, seed=20 + i) for i, x in enumerate(inputs)]
    probe = randn(2, 2, 18, 2, seed=9)

    def loss(step: float) -> Tensor:
        moved = [x + step * d for x, d in zip(inputs, directions, strict=True)]
        options = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.4, "generator": seeded(3)}
        return (call(name, moved, **options) * probe).sum()

    gradients = torch.autograd.grad(loss(0.0), inputs)
    got = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        want = float(loss(1e-7) - loss(-1e-7)) / 2e-7
    assert got == pytest.approx(want, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# torch.compile, memory


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("entmax", "gqa"),
        ("entmax", "bias_causal"),
        ("entmax", "window_pair"),
        ("softmax", "mask_causal"),
        ("sigmoid", "window_pair"),
    ],
)
def test_compile(name: str, case: str) -> None:
    torch._dynamo.reset()
    case = CASES[case]
    inputs, options, names = differentiable(case)

    def function(*tensors: Tensor) -> Tensor:
        return call(name, tensors[:3], **options, **dict(zip(names, tensors[3:], strict=True)))

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    gradients = torch.autograd.grad(out, inputs, randn(*out.shape, seed=9))
    for got, want in zip((out, *gradients), output_and_gradients(name, case), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("case", ["bool", "additive"])
def test_compile_with_alpha_and_masked_rows(case: str) -> None:
    torch._dynamo.reset()
    inputs = [leaf(x) for x in (*CASES["cross"].inputs(), torch.full((4,), 1.3, dtype=torch.float64))]
    options = hidden_rows()[case]

    def function(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
        return entmax_attention(query, key, value, **options, alpha=alpha)

    probe = randn(2, 4, 6, 5, seed=9)
    results = []
    for run in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, probe)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


MEMORY = """
import resource, torch
from tamis.functional import {function}
def run(n):
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]
    {function}(*x, is_causal={causal}).square().sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = run(64)
print((run(8192) - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["entmax_attention", "relu_attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_not_quadratic(function: str, causal: bool) -> None:
    """8192 x 8192 scores alone would be 256 MB; weights, gradients and masks of that size over a gigabyte."""
    script = MEMORY.format(function=function, causal=causal)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 600.0


# ---------------------------------------------------------------------------------------------------------------
# Theory


def of_scores(scores: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Attention of queries (Lq) whose scores are exactly those given, (Lk): head_dim 1, query 1."""
    query = torch.ones(1, 1, 1, 1, dtype=scores.dtype)
    return entmax_attention(query, scores[None, None, :, None], values[None, None], scale=1.0, **options)[0, 0, 0]


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [1, 50, 1000])
def test_losing_keys_change_nothing(alpha: float, dtype: torch.dtype, extra: int) -> None:
    scores, values = randn(20, dtype=dtype), randn(20, 3, seed=1, dtype=dtype)
    losing = scores.max() - 1.0 / (alpha - 1.0) - randn(extra, seed=2, dtype=dtype).abs()
    longer = of_scores(
        torch.cat([scores, losing]), torch.cat([values, randn(extra, 3, seed=3, dtype=dtype)]), alpha=alpha
    )
    tolerance = 4.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(longer, of_scores(scores, values, alpha=alpha), rtol=0.0, atol=tolerance)
    diluted = of_scores(torch.cat([scores, losing]), torch.ones(20 + extra, 1, dtype=dtype).cumsum(0), alpha=1.0)
    assert diluted > of_scores(scores, torch.ones(20, 1, dtype=dtype).cumsum(0), alpha=1.0)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("k", [1, 2, 7, 16])
@pytest.mark.parametrize("n", [20, 500])
def test_plateaus_of_one_over_k(alpha: float, k: int, n: int) -> None:
    """k equal scores get exactly 1 / k each iff the others are k^-(a-1) / (a-1) below, whatever their number."""
    gap = k ** -(alpha - 1.0) / (alpha - 1.0)
    identity = torch.eye(n, dtype=torch.float64)
    scores = torch.zeros(n, dtype=torch.float64)
    for factor, plateau in ((1.0 + 1e-9, True), (0.9, False)):
        scores[k:] = -gap * factor
        weights = of_scores(scores, identity, alpha=alpha)
        assert bool((weights[k:] == 0.0).all()) is plateau
        if plateau:
            torch.testing.assert_close(weights[:k], torch.full((k,), 1.0 / k, dtype=torch.float64), rtol=0, atol=1e-15)
        else:
            assert weights[:k].sum() < 1.0 - 1e-6


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_entropy_is_bounded_by_the_support(alpha: float) -> None:
    query, key, _ = Case(queries=40, keys=200).inputs()
    weights = attention_weights(query, key, alpha=alpha)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    support = (weights > 0.0).sum(-1).double()
    assert bool((entropy <= support.log() + 1e-12).all())
    assert support.mean() < 150


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("slope", [0.0625, 0.3, 1.0])
def test_alibi_horizon(alpha: float, slope: float) -> None:
    """Zero from distance R = (z_max - z_min + 1 / (a - 1)) / m on; with two keys the last non-zero is ceil(R) - 1."""
    n, low, high = 400, -0.4, 1.1
    radius = (high - low + 1.0 / (alpha - 1.0)) / slope
    slopes = torch.tensor([slope], dtype=torch.float64)
    identity = torch.eye(n, dtype=torch.float64)
    scores = low + (high - low) * torch.rand(n, generator=seeded(), dtype=torch.float64)
    options = {"alpha": alpha, "alibi_slopes": slopes, "is_causal": True}
    weights = of_scores(scores, identity, **options)
    spread = float(scores.max() - scores.min())
    beyond = torch.arange(n).flip(0) >= (spread + 1.0 / (alpha - 1.0)) / slope
    assert bool(beyond.any())
    assert bool((weights[beyond] == 0.0).all())
    for distance in range(1, n):
        pair = torch.zeros(n, dtype=torch.bool)
        pair[[n - 1, n - 1 - distance]] = True
        scores = torch.where(torch.arange(n) == n - 1, low, torch.full((n,), high, dtype=torch.float64))
        if abs(distance - radius) > 1e-9 and abs(distance - radius) < 3:
            far = of_scores(scores, identity, **options, attn_mask=pair)[n - 1 - distance]
            assert bool(far > 0.0) is (distance <= math.ceil(radius) - 1)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(activation, use_reentrant):
    leaves = [torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3)]

    def attention(query, key, value):
        if activation is None:
            return entmax_attention(query, key, value, is_causal=True)
        return relu_attention(query, key, value, activation=activation)

    expected = torch.autograd.grad(attention(*leaves).sum(), leaves)
    torch.utils.checkpoint.checkpoint(attention, *leaves, use_reentrant=use_reentrant).sum().backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_saved_tensor_hooks_see_the_kept_weights():
    query, key, value = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        out = entmax_attention(query, key, value)
    assert (12, 6) in seen
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
