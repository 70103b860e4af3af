"""Every mechanism against its formula, written here a second time, in every precision."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanisms.cases import (
    BATCH,
    EMBED,
    FACTORIES,
    HALF,
    HEAD_DIM,
    HEADS,
    KEYS,
    QUERIES,
    adaptive_scale,
    every_mechanism,
    inputs,
    make,
    some_mask,
)
from oracles import entmax15_by_sorting, entmax_by_bisection, sparsemax_by_sorting
from tamis.mechanisms import (
    ASEntmaxAttention,
    EntmaxAttention,
    LearnedAlpha,
    Mechanism,
    ReLAttention,
    ScalableSoftmaxAttention,
    SoftpickAttention,
)


def alphas(mechanism: EntmaxAttention) -> list[float]:
    alpha = mechanism.alpha
    if isinstance(alpha, LearnedAlpha):
        return (alpha.low + (alpha.high - alpha.low) / (1.0 + torch.exp(-alpha.raw.detach().double()))).tolist()
    return alpha.tolist() if isinstance(alpha, Tensor) else [alpha] * HEADS


def entmax_rows(scores: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return scores.softmax(-1)
    if alpha == 2.0:
        return sparsemax_by_sorting(scores)
    return entmax15_by_sorting(scores) if alpha == 1.5 else entmax_by_bisection(scores, alpha)


def expected_weights(mechanism: Mechanism, data: dict[str, Tensor], keep: Tensor) -> Tensor:
    """The mechanism's equation in float64; keep (B, 1, Lq, Lk)."""
    query, key = data["query"].double(), data["key"].double()
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(HEAD_DIM)
    count = keep[:, 0].sum(-1)
    keep = keep.expand_as(scores)
    if isinstance(mechanism, ReLAttention):
        x = scores + mechanism.bias
        weights = {
            "relu": x.clamp(min=0.0),
            "squared_relu": x.clamp(min=0.0) ** 2,
            "leaky_relu": torch.where(x > 0.0, x, 0.01 * x),
            "gelu": x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
            "identity": x,
            "sigmoid": 1.0 / (1.0 + torch.exp(-x)),
        }[mechanism.activation]
        if mechanism.divide_by_count:
            weights = weights / count.clamp(min=1)[:, None, :, None]
        return torch.where(keep, weights, 0.0)
    if isinstance(mechanism, SoftpickAttention):
        x = torch.where(keep, scores.exp() - 1.0, 0.0)
        # The paper's numerically safe form adds eps relative to the largest of the exponents and 0.
        unit = torch.where(keep, scores, 0.0).amax(-1, keepdim=True).clamp(min=0.0).exp()
        return x.clamp(min=0.0) / (x.abs().sum(-1, keepdim=True) + mechanism.eps * unit)
    per_head = [1.0] * HEADS
    if isinstance(mechanism, EntmaxAttention):
        per_head = alphas(mechanism)
    elif isinstance(mechanism, ASEntmaxAttention | ScalableSoftmaxAttention):
        if isinstance(mechanism, ASEntmaxAttention):
            scaled = [True] * HEADS if mechanism.unscaled_alpha is None else mechanism.scaled_heads.tolist()
            per_head = [mechanism.alpha if head else mechanism.unscaled_alpha for head in scaled]
            scale = adaptive_scale(mechanism.scale, data["hidden"], count.clamp(min=1))
        else:
            scale = mechanism.s.double()[None, :, None] * torch.log(count.clamp(min=1).double() + 1.0)[:, None]
        if mechanism.scaled_heads is not None:
            scale = torch.where(mechanism.scaled_heads[None, :, None], scale, 1.0)
        scores = scores * scale[..., None]
    scores = torch.where(keep, scores, -1e4)  # finite: the oracles know no empty rows
    weights = torch.stack([entmax_rows(scores[:, h], a) for h, a in enumerate(per_head)], 1)
    return torch.where(keep.any(-1, keepdim=True), weights, 0.0)


@every_mechanism
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)])
def test_weights_are_those_of_the_formula(name: str, masked: bool, dtype: torch.dtype, tolerance: float):
    mechanism, data = make(name, dtype), inputs(dtype)
    keep = some_mask() if masked else torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    options = {"attn_mask": keep} if masked else {}
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], **options)
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS)
    assert weights.dtype == dtype
    expected = expected_weights(mechanism, data, keep)
    assert (weights.double() - expected).abs().max() < tolerance * max(1.0, expected.abs().max().item())
    assert (weights[~keep.expand_as(weights)] == 0.0).all()


@every_mechanism
@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_forward_is_weights_times_value(name: str, mask: str):
    mechanism, data = make(name), inputs()
    options: dict[str, Any] = {
        "none": {},
        "bool": {"attn_mask": some_mask()},
        "float": {"attn_mask": torch.zeros(BATCH, 1, QUERIES, KEYS).masked_fill(~some_mask(), -math.inf)},
        "causal": {"is_causal": True, "attn_mask": some_mask()},
    }[mask]
    out = mechanism(**data, **options)
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], **options)
    assert torch.isfinite(out).all()
    assert torch.isfinite(weights).all()
    torch.testing.assert_close(out, weights @ data["value"], atol=1e-5, rtol=1e-5)


@every_mechanism
def test_an_additive_mask_of_minus_infinity_hides_as_a_boolean_one(name: str):
    mechanism, data = make(name), inputs()
    additive = torch.zeros(BATCH, 1, QUERIES, KEYS).masked_fill(~some_mask(), -math.inf)
    torch.testing.assert_close(
        mechanism(**data, attn_mask=additive), mechanism(**data, attn_mask=some_mask()), atol=1e-6, rtol=1e-6
    )


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("additive", [False, True])
def test_null_rows_are_zero_with_finite_gradients(name: str, dtype: torch.dtype, additive: bool):
    mechanism, data = make(name).to(dtype), inputs(dtype)
    data = {key: x.requires_grad_() for key, x in data.items()}
    mask = some_mask()
    if additive:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    out = mechanism.merge(mechanism(**data, attn_mask=mask))
    assert out.dtype == dtype
    assert (out[0, 2] == 0.0).all()
    assert torch.isfinite(out).all()
    (out.float() * torch.arange(1.0, EMBED + 1)).sum().backward()
    for x in (*data.values(), *mechanism.parameters()):
        assert x.grad is None or torch.isfinite(x.grad).all()
    assert (data["query"].grad[0, :, 2] == 0.0).all()


@every_mechanism
def test_gradients_reach_every_parameter_and_input(name: str):
    mechanism, data = make(name), inputs()
    with torch.no_grad():
        for parameter in mechanism.parameters():  # leave starts of exactly 0, where a product would hide a gradient
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    data = {key: x.requires_grad_() for key, x in data.items()}
    out = mechanism.merge(mechanism(**data))
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    for key in ("query", "key", "value"):
        assert data[key].grad.abs().max() > 0.0
    for key, parameter in mechanism.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0.0, key


@every_mechanism
def test_gradients_are_those_of_finite_differences(name: str):
    """Central differences along one random direction of all inputs and parameters together, in float64."""
    mechanism, data = make(name, torch.float64), inputs(torch.float64)
    tensors = [data["query"], data["key"], data["value"], data["hidden"], *mechanism.parameters()]
    generator = torch.Generator().manual_seed(9)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in tensors]
    cotangent = torch.randn(BATCH, QUERIES, EMBED, generator=generator, dtype=torch.float64)
    for x in tensors:
        x.requires_grad_()

    def loss() -> Tensor:
        return (mechanism.merge(mechanism(**data)) * cotangent).sum()

    mechanism.eval()
    gradients = torch.autograd.grad(loss(), tensors, allow_unused=True)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for x, d in zip(tensors, directions, strict=True):
                x.add_(step * d)
            values.append(loss())
            for x, d in zip(tensors, directions, strict=True):
                x.sub_(step * d)
    assert slope.item() == pytest.approx(((values[0] - values[1]) / 2e-6).item(), rel=1e-5, abs=1e-6)


@every_mechanism
def test_compiles_without_a_break(name: str):
    torch._dynamo.reset()
    mechanism, data = make(name), inputs()

    def run(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        return mechanism.merge(mechanism(query, key, value, hidden=hidden, is_causal=True))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**data), run(**data), atol=1e-5, rtol=1e-5)


def stored(mechanism: Mechanism) -> dict[str, Tensor]:
    tensors = {**dict(mechanism.named_parameters()), **dict(mechanism.named_buffers())}
    return {key: x.detach().clone() for key, x in tensors.items()}


@every_mechanism
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("how", ["method", "to", "inside"])
def test_casts_to_half_leave_every_number_as_it_was(name: str, dtype: torch.dtype, how: str):
    mechanism = make(name)
    before = stored(mechanism)
    if how == "method":
        mechanism.bfloat16() if dtype == torch.bfloat16 else mechanism.half()
    elif how == "to":
        mechanism.to(dtype)
    else:
        nn.Sequential(nn.Linear(2, 2), nn.ModuleList([mechanism])).to(dtype)
    after = stored(mechanism)
    assert after.keys() == before.keys()
    for key, x in before.items():
        assert after[key].dtype == x.dtype, key
        assert torch.equal(after[key], x), key


@pytest.mark.parametrize("name", ["entmax-learn", "rela-g", "rela-layernorm", "asentmax", "asentmax-per-head", "ssmax"])
def test_parameters_are_fp32_under_a_half_precision_default(name: str):
    """Libraries build bf16 models under a bf16 default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        mechanism = FACTORIES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {key: x.dtype for key, x in mechanism.named_parameters() if x.dtype != torch.float32} == {}


@every_mechanism
def test_double_makes_everything_double(name: str):
    mechanism, data = make(name).double(), inputs(torch.float64)
    assert all(x.dtype == torch.float64 for x in mechanism.parameters())
    assert mechanism(**data).dtype == torch.float64


@every_mechanism
def test_runs_under_autocast(name: str):
    mechanism, data = make(name), inputs()
    exact = mechanism.merge(mechanism(**data))
    with torch.autocast("cpu", torch.bfloat16):
        out = mechanism.merge(mechanism(**data))
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()
    assert (out.float() - exact).norm() < 0.05 * exact.norm()


def test_deep_copies_are_independent():
    mechanism = make("entmax-learn")
    other = copy.deepcopy(mechanism)
    with torch.no_grad():
        other.alpha.raw.add_(1.0)
    assert not torch.equal(other.alpha.raw, mechanism.alpha.raw)
