"""Gradients of queries, keys, values, masks, slopes and alphas against the oracle's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from attention.cases import (
    CASES,
    EXACT,
    FUNCTIONS,
    Case,
    call,
    check_gradients,
    every_function,
    leaf,
    oracle_weights,
    randn,
    some_inf,
)
from tamis.functional import entmax_attention, relu_attention


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
    for x, grad in zip(leaves, expected, strict=True):
        assert torch.equal(x.grad, grad)


def test_saved_tensor_hooks_see_the_kept_weights():
    query, key, value = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        out = entmax_attention(query, key, value, backend="blocked")
    assert (12, 6) in seen
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
