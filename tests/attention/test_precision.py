"""Alphas with another name, and rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import (
    CASES,
    EXACT,
    INF,
    Case,
    activation_oracle,
    call,
    entmax_oracle,
    leaf,
    oracle,
    randn,
    rule_options,
)
from tamis.attention.rules import Entmax
from tamis.functional import attention_weights, entmax_attention, softmax_attention


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
    weights = attention_weights(query * size, key, rule=Entmax(alpha), is_causal=True)
    assert weights.dtype == torch.float32
    assert (weights.double().sum(-1) - 1.0).abs().max() < 1e-5
