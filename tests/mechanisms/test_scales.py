"""Length-aware scales: what n is, how they start, and their precision."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanisms.cases import BATCH, EMBED, HEADS, QUERIES, adaptive_scale, inputs, make
from tamis.mechanisms import (
    AdaptiveScale,
    ASEntmaxAttention,
    ASSMaxAttention,
    EntmaxAttention,
    Inputs,
    Mechanism,
    SoftmaxAttention,
)


def linear_scale(mechanism: Mechanism, data: dict[str, Tensor], **options: Any) -> Tensor:
    """The factor (B, H, Lq) on the scores."""
    return mechanism.query_scale(Inputs(data["query"], data["key"], data["hidden"], options))


SCALED = ["asentmax", "asentmax-small", "asentmax-per-head", "assmax", "ssmax"]


def expected_scale(mechanism: Mechanism, hidden: Tensor, count: Tensor) -> Tensor:
    if isinstance(mechanism, ASEntmaxAttention):
        return adaptive_scale(mechanism.scale, hidden, count)
    return mechanism.s.double()[None, :, None] * torch.log(count.double() + 1.0)[:, None]


@pytest.mark.parametrize("name", SCALED)
def test_causal_rows_use_the_logarithm_of_i_plus_two(name: str):
    mechanism, data = make(name, torch.float64), inputs(torch.float64, 7, 7)
    count = torch.arange(1, 8).expand(BATCH, -1)  # log(n + 1) = log(i + 2)
    scale = linear_scale(mechanism, data, is_causal=True)
    expected = expected_scale(mechanism, data["hidden"], count).expand(BATCH, HEADS, 7)
    torch.testing.assert_close(scale.expand(BATCH, HEADS, 7), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, [9, 9, 9, 9, 9]),
        ({"is_causal": True}, [5, 6, 7, 8, 9]),
        ({"is_causal": True, "window": (2, 0)}, [3, 3, 3, 3, 3]),
        ({"window": 1}, [3, 3, 3, 3, 2]),
        ({"key_lengths": torch.tensor([4, 4])}, [4, 4, 4, 4, 4]),
        ({"is_causal": True, "query_positions": torch.tensor([0, 1, 2, 3, 8])}, [1, 2, 3, 4, 9]),
        ({"alibi_slopes": torch.ones(HEADS)}, [9, 9, 9, 9, 9]),
    ],
)
def test_the_count_is_of_visible_keys(name: str, options: dict[str, Any], count: list[int]):
    mechanism, data = make(name, torch.float64), inputs(torch.float64)
    scale = linear_scale(mechanism, data, **options)
    expected = expected_scale(mechanism, data["hidden"], torch.tensor(count).expand(BATCH, -1))
    shape = (BATCH, HEADS, QUERIES)
    torch.testing.assert_close(scale.expand(shape), expected.expand(shape), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SCALED)
def test_left_padding_does_not_change_the_result(name: str):
    mechanism, data = make(name), inputs(queries=6, keys=6)
    plain = mechanism(**data, is_causal=True)
    padded = {key: torch.cat([torch.full_like(x, 7.0).narrow(-2, 0, 3), x], -2) for key, x in data.items()}
    keep = (torch.arange(9) >= 3)[None, None, None, :]
    out = mechanism(**padded, is_causal=True, attn_mask=keep)
    torch.testing.assert_close(out[:, :, 3:], plain, atol=1e-6, rtol=1e-6)
    assert (out[:, :, :3] == 0.0).all()


@pytest.mark.parametrize("name", SCALED)
def test_packing_does_not_change_the_result(name: str):
    mechanism, data = make(name), inputs(queries=8, keys=8)
    data = {key: x[:1] for key, x in data.items()}
    bounds = [0, 3, 4, 8]
    packed = mechanism(**data, is_causal=True, cu_seqlens_q=torch.tensor(bounds))
    for start, stop in itertools.pairwise(bounds):
        part = {key: x.narrow(-2, start, stop - start) for key, x in data.items()}
        torch.testing.assert_close(packed[:, :, start:stop], mechanism(**part, is_causal=True), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", SCALED)
def test_a_cache_does_not_change_the_result(name: str):
    mechanism, data = make(name), inputs(queries=6, keys=6)
    full = mechanism(**data, is_causal=True)
    for i in range(6):
        row = mechanism(
            data["query"][:, :, i : i + 1],
            data["key"][:, :, : i + 1],
            data["value"][:, :, : i + 1],
            hidden=data["hidden"][:, i : i + 1],
            is_causal=True,
        )
        torch.testing.assert_close(row, full[:, :, i : i + 1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("init", ["paper", "small"])
def test_starts_of_the_adaptive_scale(init: str):
    torch.manual_seed(0)
    scale = AdaptiveScale(512, 8, init=init)
    assert scale.weight.shape == (16, 512)
    beta, gamma = scale.coefficients(torch.zeros(2, 3, 512))
    assert torch.equal(gamma, torch.zeros_like(gamma))
    if init == "paper":
        assert scale.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(scale.weight.mean().item()) < 1e-3
        assert torch.equal(scale.bias, torch.zeros(16))
        torch.testing.assert_close(beta, torch.full_like(beta, math.log(2.0)))
    else:
        assert torch.equal(scale.weight, torch.zeros(16, 512))
        torch.testing.assert_close(beta, torch.full_like(beta, 0.05))


def test_beta_is_positive_and_gamma_within_two():
    torch.manual_seed(0)
    scale = AdaptiveScale(EMBED, HEADS)
    nn.init.normal_(scale.weight, std=3.0)
    beta, gamma = scale.coefficients(torch.randn(2, 50, EMBED))
    assert beta.shape == gamma.shape == (2, HEADS, 50)
    assert (beta >= 0.0).all()
    assert gamma.abs().max() <= 2.0
    assert gamma.abs().max() > 1.9
    assert beta.max() > 5.0


def test_unscaled_heads_are_entmax():
    """With NAPE only the heads without a bias are scaled: the others are 1.5-entmax exactly."""
    mechanism, data = make("asentmax-some"), inputs()
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"])
    plain = EntmaxAttention(HEADS, 1.5).weights(data["query"], data["key"])
    assert torch.equal(weights[:, [0, 2]], plain[:, [0, 2]])
    assert not torch.equal(weights[:, [1, 3]], plain[:, [1, 3]])


def test_unscaled_heads_may_have_an_alpha_of_their_own():
    mechanism, data = make("asentmax-far"), inputs()
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"])
    plain = SoftmaxAttention().weights(data["query"], data["key"])
    torch.testing.assert_close(weights[:, [0, 2]], plain[:, [0, 2]])
    assert (weights[:, [0, 2]] > 0.0).all()
    assert (weights[:, [1, 3]] == 0.0).any()
    assert mechanism.bfloat16().alphas.dtype == torch.float32


def test_assmax_is_asentmax_at_alpha_one():
    torch.manual_seed(0)
    softmax = ASSMaxAttention(EMBED, HEADS, 0.7)
    entmax = ASEntmaxAttention(EMBED, HEADS, 1.0, 0.7)
    entmax.load_state_dict(softmax.state_dict())
    data = inputs()
    assert torch.equal(softmax(**data), entmax(**data))
    assert softmax.scale.delta == 0.7


def test_the_scale_is_kept_in_fp32_under_autocast():
    """Counts beyond 256 are no bf16 numbers."""
    torch.manual_seed(0)
    scale = AdaptiveScale(EMBED, HEADS)
    hidden, counts = torch.randn(1, 4, EMBED), torch.tensor([[[257, 259, 4097, 100_001]]])
    exact = scale(hidden, counts)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(scale(hidden, counts).float(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_scale_under_autocast(dtype: torch.dtype):
    """As accurate as those of a linear layer there."""
    torch.manual_seed(0)
    scale = AdaptiveScale(EMBED, HEADS).double()
    hidden, counts = torch.randn(3, 50, EMBED).to(dtype), torch.arange(1, 51)[None, None]
    grad = torch.randn(3, HEADS, 50)
    exact = hidden.double().requires_grad_()
    expected = torch.autograd.grad(scale(exact, counts), (exact, *scale.parameters()), grad.double())
    scale.float()
    own = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = scale(own, counts)
    found = torch.autograd.grad(out, (own, *scale.parameters()), grad)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 1e-2 * other.norm()


def test_the_scale_under_autocast_in_transforms():
    torch.manual_seed(0)
    scale, counts = AdaptiveScale(EMBED, HEADS), torch.arange(1, 51)[None, None]
    hidden = torch.randn(3, 2, 50, EMBED)

    def total(parameters: Any, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(scale, parameters, (hidden, counts)).sum()

    parameters = {name: parameter.detach() for name, parameter in scale.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(total), (None, 0))(parameters, hidden)
    for number, sample in enumerate(hidden):
        alone = torch.autograd.grad(total(dict(scale.named_parameters()), sample), tuple(scale.parameters()))
        for found, expected in zip(per_sample.values(), alone, strict=True):
            torch.testing.assert_close(found[number], expected, atol=1e-3, rtol=1e-2)


def test_the_scale_compiles_under_autocast_with_its_gradients():
    torch.manual_seed(0)
    scale, counts = AdaptiveScale(EMBED, HEADS), torch.arange(1, 51)[None, None]
    hidden, grad = torch.randn(3, 50, EMBED).requires_grad_(), torch.randn(3, HEADS, 50)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [run(hidden, counts) for run in (scale, torch.compile(scale, fullgraph=True))]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out, (hidden, *scale.parameters()), grad) for out in outs]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", ["asentmax", "assmax"])
def test_the_adaptive_scale_needs_hidden(name: str):
    data = inputs()
    del data["hidden"]
    with pytest.raises(ValueError, match="hidden"):
        make(name)(**data)
    assert torch.isfinite(make("asentmax-per-head")(**data)).all()
