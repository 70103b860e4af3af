"""Rules: what each computes, and what only the general function takes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tamis
from tamis import Activation, Entmax, Rule, Softmax, Softpick
from tamis.functional import attention_scores


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 9, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("rule", "function", "settings"),
    [
        (Entmax(1.3), tamis.entmax_attention, {"alpha": 1.3}),
        (Entmax(), tamis.entmax_attention, {}),
        (Softmax(), tamis.softmax_attention, {}),
        (Activation(), tamis.relu_attention, {}),
        (
            Activation("sigmoid", -1.0, True),
            tamis.relu_attention,
            {"activation": "sigmoid", "bias": -1.0, "divide_by_count": True},
        ),
    ],
)
def test_named_functions_are_the_general_one(rule: Rule, function, settings) -> None:
    for options in ({}, {"is_causal": True, "window": 4}, {"attn_mask": torch.arange(9) < 6}):
        assert torch.equal(tamis.attention(*inputs(), rule=rule, **options), function(*inputs(), **settings, **options))
    assert torch.equal(tamis.attention(*inputs()), tamis.entmax_attention(*inputs()))


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3, 1.0, -0.5])
@pytest.mark.parametrize("backend", ["blocked", "dense"])
def test_the_slope_of_a_leaky_relu(slope: float, backend: str) -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    rule = Activation("leaky_relu", 0.2, slope=slope)
    out = tamis.attention(*leaves, rule=rule, is_causal=True, backend=backend)
    scores = leaves[0] @ leaves[1].mT / math.sqrt(6) + 0.2
    expected = torch.where(scores > 0.0, scores, slope * scores).tril() @ leaves[2]
    torch.testing.assert_close(out, expected)
    for got, want in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, want)


def test_a_mechanism_with_a_slope_of_its_own() -> None:
    mechanism = tamis.mechanisms.build_mechanism({"name": "rela", "activation": "leaky_relu", "slope": 0.3}, 24, 4)
    query, key, value = inputs(torch.float32)
    torch.testing.assert_close(mechanism(query, key, value), F.leaky_relu(query @ key.mT / math.sqrt(6), 0.3) @ value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_softpick_is_the_formula(dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, 0, 3] = False
    query, key, value = inputs(dtype)
    out = tamis.attention(query, key, value, mask, is_causal=True, rule=Softpick(0.0))
    scores, visible = attention_scores(query.double(), key.double(), mask, is_causal=True)
    shifted = torch.where(visible, scores.exp() - 1.0, 0.0)
    total = shifted.abs().sum(-1, keepdim=True)
    expected = shifted.clamp(min=0.0) / torch.where(total > 0.0, total, 1.0)
    expected[total.expand_as(expected) == 0.0] = torch.nan if dtype is None else 0.0
    seeing = visible.any(-1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    want = (expected @ value.double())[seeing]
    torch.testing.assert_close(out.double()[seeing], want, rtol=tolerance, atol=tolerance)
    assert out.dtype == dtype


def test_softpick_takes_the_options_of_every_other_rule() -> None:
    query, key, value = inputs()
    plain = tamis.attention(query, key[:, :2], value[:, :2], rule=Softpick(), enable_gqa=True, window=(2, 1))
    repeated = [x[:, :2].repeat_interleave(2, 1) for x in (key, value)]
    torch.testing.assert_close(tamis.attention(query, *repeated, rule=Softpick(), window=(2, 1)), plain)
    pages = torch.randn(3, 16, 2, 6, dtype=torch.float64)
    paged = tamis.paged_attention(
        query[:, :, :1], pages, pages, torch.tensor([[2, 0], [1, 0]]), torch.tensor([20, 7]), rule=Softpick()
    )
    own = pages[1, :7].transpose(0, 1)[None].repeat_interleave(2, 1)
    torch.testing.assert_close(paged[1:], tamis.attention(query[1:, :, :1], own, own, rule=Softpick()))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, torch.tensor([1.1, 1.4, 1.7, 2.0])])
def test_scores_beyond_the_margin_have_no_weight(alpha: float | Tensor) -> None:
    rule = Entmax(alpha)
    query, key, _ = inputs()
    scores, _ = attention_scores(3.0 * query, key)
    margin = torch.as_tensor(rule.margin()).reshape(-1, 1, 1)
    beyond = scores <= scores.amax(-1, keepdim=True) - margin
    weights = tamis.attention_weights(3.0 * query, key, rule=rule)
    assert beyond.any()
    assert (weights[beyond] == 0.0).all()


def test_rules_without_a_margin() -> None:
    for rule in (Entmax(1.0), Entmax(torch.full((1, 4, 1, 1), 1.5)), Softmax(), Activation(), Softpick(), Rule()):
        assert rule.margin() is None
    assert Entmax(torch.tensor([1.0, 1.5])).margin().tolist() == [math.inf, 2.0]


def test_a_rule_of_some_heads() -> None:
    alpha = torch.tensor([1.1, 1.4, 1.7, 2.0])
    query, key, value = (x[:, 1:3] for x in inputs())
    whole = tamis.attention(*inputs(), rule=Entmax(alpha))[:, 1:3]
    part = tamis.attention(query, key, value, rule=Entmax(alpha).of_heads(slice(1, 3)))
    torch.testing.assert_close(part, whole)
    for rule in (Entmax(1.5), Entmax(torch.tensor(1.5)), Softmax(), Softpick()):
        assert rule.of_heads(slice(1, 3)) is rule


def test_entmax_at_one_is_softmax() -> None:
    """Whoever asks for it: one place decides it, and not every mechanism."""
    query, key, value = inputs()
    for alpha in (1.0, 1):
        assert tamis.attention_backends(query, key, value, rule=Entmax(alpha)).chosen == "sdpa"
        out = tamis.entmax_attention(query, key, value, is_causal=True, alpha=alpha)
        assert torch.equal(out, tamis.softmax_attention(query, key, value, is_causal=True))
    learned = torch.ones(4, dtype=torch.float64, requires_grad=True)
    assert tamis.attention_backends(query, key, value, rule=Entmax(learned)).chosen != "sdpa"
    tamis.attention(query, key, value, rule=Entmax(learned)).square().sum().backward()
    assert learned.grad is not None
    assert (learned.grad != 0.0).all()


def test_rules_are_values() -> None:
    assert Entmax(1.5) == Entmax()
    assert Activation("gelu", bias=-1.0) != Activation("gelu")
    assert repr(Softpick()) == "Softpick(eps=1e-06)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Entmax().alpha = 2.0


def test_a_rule_without_dense_says_so() -> None:
    class Empty(Rule):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define dense\(\)"):
        tamis.attention(*inputs(), rule=Empty())


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (Activation("leaky_relu", slope=math.nan), ValueError, "slope must be finite, got nan"),
        (Softpick("x"), TypeError, "eps must be a number, got str"),
        (Softpick(-1.0), ValueError, "eps must be finite and at least 0, got -1"),
    ],
    ids=str,
)
def test_settings_that_are_no_numbers(rule: Rule, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tamis.attention(*inputs(), rule=rule)
