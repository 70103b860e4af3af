"""The contract of attention, on the C++ kernels: the cases of tests/attention in the dtypes that they take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import (
    CASES,
    FUNCTIONS,
    LONG_CASES,
    MASK_SHAPES,
    Case,
    bools,
    call,
    hidden_rows,
    leaf,
    oracle,
    randn,
    rule_options,
    visible_pairs,
)
from native.random_calls import needs_kernels

pytestmark = needs_kernels
NAMES = [name for name in FUNCTIONS if name != "sigmoid"]
every_rule = pytest.mark.parametrize("name", NAMES)
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def native(name: str, inputs: tuple[Tensor, ...] | list[Tensor], **options: Any) -> Tensor:
    return call(name, inputs, backend="native", **options)


@every_rule
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("case", [*CASES, *(f"long {case}" for case in LONG_CASES)])
def test_every_case(name: str, case: str, dtype: torch.dtype) -> None:
    case = LONG_CASES[case.removeprefix("long ")] if case.startswith("long ") else CASES[case]
    inputs = case.inputs(dtype)
    expected = oracle(*(x.double() for x in inputs), **case.arguments, **rule_options(name))
    out = native(name, inputs, **case.arguments)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])


@every_rule
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_every_shape(name: str, shape: tuple[int, ...], additive: bool) -> None:
    inputs, mask = CASES["cross"].inputs(torch.float32), bools(*shape, seed=3)
    mask = torch.where(mask, randn(*shape, seed=4).float(), -math.inf) if additive else mask
    expected = oracle(*(x.double() for x in inputs), attn_mask=mask, **rule_options(name))
    torch.testing.assert_close(native(name, inputs, attn_mask=mask).double(), expected, **CLOSE[torch.float32])


@every_rule
@pytest.mark.parametrize("case", hidden_rows())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_rows_are_zero(name: str, case: str, dtype: torch.dtype) -> None:
    options = hidden_rows()[case]
    leaves = [leaf(x) for x in CASES["cross"].inputs(dtype)]
    empty = ~visible_pairs((2, 4, 6, 9), **options).any(-1)
    out = native(name, leaves, **options)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert bool((out[empty] == 0.0).all())
    assert bool((gradients[0][empty] == 0.0).all())
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))


@every_rule
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("how", ["mask", "key_lengths", "causal", "packed"])
@pytest.mark.parametrize("length", [6, 150])
def test_garbage_in_hidden_keys_stays_hidden(name: str, garbage: float, how: str, length: int) -> None:
    case = Case(batch=1 if how == "packed" else 2, queries=length, keys=length + 3)
    query, key, value = case.inputs(torch.float32)
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.arange(length + 3) < length},
        "key_lengths": {"key_lengths": torch.tensor([length, length - 2])},
        "causal": {"is_causal": True, "query_positions": torch.arange(length)},
        "packed": {"cu_seqlens_q": torch.tensor([0, length]), "cu_seqlens_k": torch.tensor([0, length])},
    }[how]
    leaves = [leaf(x) for x in (query, key, value)]
    spoiled = [leaf(x) for x in (query, key, value)]
    with torch.no_grad():
        for x in spoiled[1:]:
            x[:, :, length:] = garbage
    results = []
    for some in (spoiled, leaves):
        out = native(name, some, **options)
        results.append((out, *torch.autograd.grad(out.sum(), some)))
    for got, want in zip(*results, strict=True):
        # Rows with many weights are multiplied in another order where that garbage might be met.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * want.abs().max().item())


@every_rule
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [2, 0])
def test_empty(name: str, sizes: tuple[int, int], is_causal: bool, batch: int) -> None:
    inputs = [leaf(x) for x in Case(batch=batch, queries=sizes[0], keys=sizes[1]).inputs(torch.float32)]
    out = native(name, inputs, is_causal=is_causal)
    assert out.shape == (batch, 4, sizes[0], 5)
    assert bool((out == 0.0).all())
    for gradient, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert gradient.shape == x.shape
        assert bool((gradient == 0.0).all())


@every_rule
def test_no_heads_and_no_columns(name: str) -> None:
    assert native(name, Case(heads=0, key_heads=0).inputs(torch.float32), is_causal=True).shape == (2, 0, 7, 5)
    assert native(name, Case(value_dim=0).inputs(torch.float32)).shape == (2, 4, 7, 0)
    inputs = Case(dim=0).inputs(torch.float32)
    expected = oracle(*(x.double() for x in inputs), scale=1.0, **rule_options(name))
    torch.testing.assert_close(native(name, inputs, scale=1.0).double(), expected, **CLOSE[torch.float32])


@every_rule
def test_inputs_of_any_layout(name: str) -> None:
    case = CASES["gqa"]
    plain = case.inputs(torch.float32)
    across = [x.mT.contiguous().mT for x in plain]
    merged = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    wanted = None
    for layout in (plain, across, merged):
        leaves = [leaf(x).detach().requires_grad_() if x.is_contiguous() else x.requires_grad_() for x in layout]
        out = native(name, leaves, **case.arguments)
        probe = randn(5, 6, 4, 2, seed=9).float().permute(3, 2, 1, 0)
        found = (out, *torch.autograd.grad(out, leaves, probe))
        wanted = wanted or found
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)
        with torch.no_grad():
            assert torch.equal(native(name, leaves, **case.arguments), out)


@every_rule
def test_expanded_inputs(name: str) -> None:
    query, key, value = CASES["cross"].inputs(torch.float32)
    key, value = key[:1, :1].expand(2, 4, -1, -1), value[:1, :1].expand(2, 4, -1, -1)
    expected = oracle(query.double(), key.double(), value.double(), **rule_options(name))
    torch.testing.assert_close(native(name, (query, key, value)).double(), expected, **CLOSE[torch.float32])


@every_rule
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_equals_separate_calls(name: str, is_causal: bool) -> None:
    lengths_q, lengths_k, spare = (30, 0, 5, 1), (40, 2, 3, 1), 2
    case = Case(batch=1, key_heads=2, queries=sum(lengths_q) + spare, keys=sum(lengths_k) + spare)
    query, key, value = (leaf(x) for x in case.inputs(torch.float32))
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0])
    options = {"is_causal": is_causal, "enable_gqa": True, "alibi_slopes": slopes, "window": (13, 12)}
    cu_q, cu_k = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)) for lengths in (lengths_q, lengths_k))
    packed = native(name, (query, key, value), **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k.int())
    parts = zip(query[:, :, :-spare].split(lengths_q, 2), *(x[:, :, :-spare].split(lengths_k, 2) for x in (key, value)))  # noqa: B905
    expected = torch.cat([native(name, part, **options) for part in parts], 2)
    torch.testing.assert_close(packed[:, :, :-spare], expected)
    assert bool((packed[:, :, -spare:] == 0.0).all())
    probe = randn(*packed.shape, seed=9).float()
    got = torch.autograd.grad(packed, (query, key, value), probe)
    want = torch.autograd.grad(expected, (query, key, value), probe[:, :, :-spare])
    for gradient, separate in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, separate, rtol=1e-5, atol=1e-5)
        assert bool((gradient[:, :, -spare:] == 0.0).all())


@every_rule
def test_cached_steps_equal_the_full_forward(name: str) -> None:
    """However keys lie in memory; a row alone is added up in another order than a block of rows."""
    query, key, value = Case(queries=150, keys=150, dim=16, value_dim=16).inputs(torch.float32)
    options = {"is_causal": True, "window": 140}
    full = native(name, (query, key, value), **options)
    for t in (0, 1, 7, 64, 100, 149):
        own, seen = query[:, :, t : t + 1], value[:, :, : t + 1]
        for some in (key[:, :, : t + 1], key[:, :, : t + 1].mT.contiguous().mT):
            step = native(name, (own, some, seen), **options)
            torch.testing.assert_close(step, full[:, :, t : t + 1], rtol=3e-6, atol=3e-6 * float(full.abs().max()))


@every_rule
@pytest.mark.parametrize("scale", [None, 0.0])
@pytest.mark.parametrize("queries", [1, 65])
def test_what_is_not_a_number_stays_in_its_row(name: str, scale: float | None, queries: int) -> None:
    query, key, value = (leaf(x) for x in Case(queries=queries, keys=300, dim=8).inputs(torch.float32))
    with torch.no_grad():
        query[0, 1, -1, 3] = math.nan
    out = native(name, (query, key, value), scale=scale, is_causal=queries > 1)
    expected = torch.zeros(2, 4, queries, dtype=torch.bool)
    expected[0, 1, -1] = True
    assert torch.equal(out.isnan().any(-1), expected)
    for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
        touched = gradient.isnan().flatten(2).any(-1)
        touched[0, 1] = False
        assert not touched.any()


def test_rows_sum_to_one_however_many_near_ties() -> None:
    query = torch.zeros(1, 1, 3, 16)
    query[..., 0] = torch.tensor([1e-3, 1.0, 30.0])
    key = torch.randn(1, 1, 5000, 16)
    for alpha in (1.0, 1.05, 1.3, 1.5, 2.0):
        out = native("entmax", (query, key, torch.ones(1, 1, 5000, 16)), alpha=alpha)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0.0, atol=1e-5)


def test_one_infinite_score_takes_all() -> None:
    query, key = torch.full((1, 1, 1, 16), 1e30), torch.randn(1, 1, 200, 16)
    key[0, 0, 7] = 1e30
    out = native("entmax", (query, key, torch.arange(200.0)[None, None, :, None].expand(1, 1, 200, 16)))
    assert bool((out == 7.0).all())
