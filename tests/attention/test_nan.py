"""What is not a number stays in its row: it is neither hidden nor handed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from tamis import (
    Activation,
    Entmax,
    Rule,
    Softmax,
    Softpick,
    attention,
    attention_scores,
    attention_weights,
    entmax_attention,
    relu_attention,
    softmax_attention,
)
from tamis.attention.rules import ACTIVATIONS

FUNCTIONS = [
    pytest.param(softmax_attention, id="softmax"),
    pytest.param(partial(softmax_attention, backend="reference"), id="softmax-reference"),
    *(pytest.param(partial(entmax_attention, alpha=alpha), id=f"entmax{alpha}") for alpha in (1.0, 1.1, 1.5, 2.0)),
    *(pytest.param(partial(relu_attention, activation=name), id=name) for name in ACTIVATIONS),
    *(
        pytest.param(partial(relu_attention, activation=name, backend="dense"), id=f"{name}-dense")
        for name in ACTIVATIONS
    ),
    pytest.param(partial(attention, rule=Softpick()), id="softpick"),
]
MASKS: dict[str, Callable[..., Tensor | None]] = {
    "none": lambda *shape: None,
    "boolean": lambda *shape: torch.ones(shape, dtype=torch.bool),
    "additive": lambda *shape: torch.zeros(shape),
}


def inputs(num_queries: int, num_keys: int, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, num_queries, 8), (2, 2, num_keys, 8), (2, 2, num_keys, 8))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_query_that_is_not_a_number(function: Callable[..., Tensor], dtype: torch.dtype, scale: float | None):
    for (num_queries, num_keys), mask, causal, grad in product(
        ((1, 0), (3, 0), (1, 3), (3, 3), (20, 3), (20, 20), (65, 300)), MASKS, (False, True), (False, True)
    ):
        query, key, value = inputs(num_queries, num_keys, dtype, grad)
        expected = torch.zeros(2, 2, num_queries, dtype=torch.bool)
        with torch.no_grad():
            query[0, 1, -1, 3] = torch.nan
        expected[0, 1, -1] = num_keys > 0
        out = function(query, key, value, MASKS[mask](num_queries, num_keys), is_causal=causal, scale=scale)
        assert torch.equal(out.isnan().any(-1), expected), (num_queries, num_keys, mask, causal, grad)
        if num_keys == 0:
            assert (out == 0.0).all()


@pytest.mark.parametrize("rule", [Softmax(), Entmax(1.5), Softpick(), *map(Activation, ACTIVATIONS)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_weights_and_scores_of_a_query_that_is_not_a_number(rule: Rule, mask: str):
    query, key, _ = inputs(5, 7, torch.float32, False)
    query[0, 1, 2, 3] = torch.nan
    expected = torch.zeros(2, 2, 5, dtype=torch.bool)
    expected[0, 1, 2] = True
    given = MASKS[mask](5, 7)
    assert torch.equal(attention_weights(query, key, attn_mask=given, rule=rule).isnan().any(-1), expected)
    scores, visible = attention_scores(query, key, given)
    assert torch.equal(scores.isnan().all(-1), expected)
    assert visible.all()


@pytest.mark.parametrize("name", ["leaky_relu", "gelu", "identity"])
def test_what_a_mask_hides_may_be_anything(name: str):
    """-inf in a mask hides a key from activations that do not send -inf to 0, whatever its score is."""
    query, key, value = inputs(3, 5, torch.float32, False)
    key[0, 1, 4] = torch.nan
    mask = torch.zeros(3, 5)
    mask[:, 4] = -torch.inf
    for backend in ("blocked", "dense"):
        out = relu_attention(query, key, value, mask, activation=name, backend=backend)
        expected = relu_attention(query, key[:, :, :4], value[:, :, :4], activation=name, backend=backend)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_key_that_is_not_a_number(function: Callable[..., Tensor], scale: float | None):
    for (num_queries, num_keys), mask in product(((1, 3), (20, 3), (65, 300)), MASKS):
        query, key, value = inputs(num_queries, num_keys, torch.float32, False)
        key[0, 1, num_keys // 2, 3] = torch.nan
        out = function(query, key, value, MASKS[mask](num_queries, num_keys), scale=scale)
        assert out[0, 1].isnan().any(-1).all()
        assert not out[1].isnan().any()
        assert not out[0, 0].isnan().any()


def test_a_query_that_is_not_a_number_under_vmap():
    query, key, value = inputs(5, 7, torch.float32, False)
    query[1, 0, 2] = torch.nan
    out = torch.vmap(softmax_attention)(query[:, None], key[:, None], value[:, None])
    assert out.isnan().any(-1).nonzero().tolist() == [[1, 0, 0, 2]]
