"""Every mechanism against its formula, written here a second time."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tamis
from oracles import entmax15_by_sorting, entmax_by_bisection, sparsemax_by_sorting
from tamis import functional
from tamis.mechanisms import (
    MECHANISMS,
    AdaptiveScale,
    ASEntmaxAttention,
    ASSMaxAttention,
    EntmaxAttention,
    LearnedAlpha,
    Mechanism,
    ReLANorm,
    ReLAttention,
    ScalableSoftmax,
    SoftmaxAttention,
    SoftpickAttention,
    build_mechanism,
)
from tamis.nn import Attention

EMBED, HEADS, HEAD_DIM, BATCH, QUERIES, KEYS = 24, 4, 6, 2, 5, 9
ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")
VARIANTS = ("g", "i", "rms", "layernorm", "none")
HALF = (torch.float16, torch.bfloat16)

FACTORIES: dict[str, Callable[[], Mechanism]] = {
    "softmax": SoftmaxAttention,
    "entmax-learn": lambda: EntmaxAttention(HEADS),
    "entmax-1": lambda: EntmaxAttention(HEADS, 1),
    "entmax-1.3": lambda: EntmaxAttention(HEADS, 1.3),
    "entmax-2": lambda: EntmaxAttention(HEADS, 2.0),
    "entmax-tensor": lambda: EntmaxAttention(HEADS, torch.tensor([1.0, 1.1, 1.7, 2.0])),
    "entmax-parameter": lambda: EntmaxAttention(HEADS, nn.Parameter(torch.tensor([1.1, 1.3, 1.7, 1.9]))),
    "entmax-range": lambda: EntmaxAttention(HEADS, LearnedAlpha(HEADS, 1.2, 1.6)),
    **{f"rela-{v}": lambda v=v: ReLAttention(EMBED, HEADS, v) for v in VARIANTS},
    **{f"rela-{a}": lambda a=a: ReLAttention(EMBED, HEADS, "g", a, bias=-0.3) for a in ACTIVATIONS},
    "rela-count": lambda: ReLAttention(EMBED, HEADS, "none", divide_by_count=True),
    "softpick": SoftpickAttention,
    "asentmax": lambda: ASEntmaxAttention(EMBED, HEADS),
    "asentmax-small": lambda: ASEntmaxAttention(EMBED, HEADS, init="small"),
    "asentmax-per-head": lambda: ASEntmaxAttention(EMBED, HEADS, 1.3, 0.5, per_head=True),
    "asentmax-some": lambda: ASEntmaxAttention(
        EMBED, HEADS, scaled_heads=torch.tensor([False, True, False, True]), init="small"
    ),
    "asentmax-far": lambda: ASEntmaxAttention(
        EMBED, HEADS, scaled_heads=torch.tensor([False, True, False, True]), unscaled_alpha=1.0
    ),
    "assmax": lambda: ASSMaxAttention(EMBED, HEADS),
    "ssmax": lambda: ScalableSoftmax(HEADS),
    "ssmax-some": lambda: ScalableSoftmax(HEADS, init=0.4, scaled_heads=torch.tensor([True, False, False, True])),
}
every_mechanism = pytest.mark.parametrize("name", FACTORIES)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str, dtype: torch.dtype = torch.float32) -> Mechanism:
    torch.manual_seed(0)
    return FACTORIES[name]().to(dtype)


def inputs(
    dtype: torch.dtype = torch.float32, queries: int = QUERIES, keys: int = KEYS, spread: float = 1.5, seed: int = 1
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": spread * draw(BATCH, HEADS, queries, HEAD_DIM),
        "key": draw(BATCH, HEADS, keys, HEAD_DIM),
        "value": draw(BATCH, HEADS, keys, HEAD_DIM),
        "hidden": draw(BATCH, queries, EMBED),
    }


def some_mask() -> Tensor:
    """(B, 1, Lq, Lk) with one row that sees nothing and one that sees a single key."""
    keep = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(5)) < 0.6
    keep[0, 0, 2] = False
    keep[1, 0, 0] = False
    keep[1, 0, 0, 3] = True
    return keep


# ---------------------------------------------------------------------------------------------------------------
# The formulas


def adaptive_scale(scale: AdaptiveScale, hidden: Tensor, count: Tensor) -> Tensor:
    """delta + beta log(n + 1)^gamma, for counts (B, Lq); (B, H, Lq)."""
    bias = scale.bias.double()
    out = (
        bias.expand(*hidden.shape[:2], -1) if scale.weight is None else hidden.double() @ scale.weight.double().T + bias
    )
    raw_beta, raw_gamma = out[..., :HEADS], out[..., HEADS:]
    beta, gamma = torch.log1p(raw_beta.exp()), 2.0 * raw_gamma.tanh()
    return (scale.delta + beta * torch.log(count.double() + 1.0)[..., None] ** gamma).transpose(1, 2)


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
    elif isinstance(mechanism, ASEntmaxAttention | ScalableSoftmax):
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


# ---------------------------------------------------------------------------------------------------------------
# Precision of what is learned


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


# ---------------------------------------------------------------------------------------------------------------
# Rectified linear attention


def rela_norm(z: Tensor, module: ReLANorm) -> Tensor:
    """Y = g z r sigmoid(w z) over all channels, row by row."""
    rows = []
    for row in z.flatten(0, -2):
        r = 1.0 / math.sqrt((row * row).sum().item() / row.numel() + 1e-8)
        y = row * r
        if module.variant in ("g", "i"):
            y = y * module.gain
        if module.variant == "g":
            y = y / (1.0 + torch.exp(-module.gate * row))
        rows.append(y)
    return torch.stack(rows).view_as(z)


@pytest.mark.parametrize("variant", ["g", "i", "rms"])
def test_rela_norm_is_the_formula(variant: str):
    torch.manual_seed(0)
    module = ReLANorm(EMBED, HEAD_DIM, variant).double()
    z = torch.randn(3, 4, EMBED, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 50.0, 1e4]).double()[:, None]
    torch.testing.assert_close(module(z), rela_norm(z, module), atol=1e-10, rtol=1e-10)


def test_rela_layernorm_and_none():
    z = torch.randn(3, EMBED, generator=torch.Generator().manual_seed(0))
    module = ReLANorm(EMBED, HEAD_DIM, "layernorm")
    assert torch.equal(module.gain, torch.ones(EMBED))
    assert torch.equal(module.offset, torch.zeros(EMBED))
    torch.testing.assert_close(
        module(z), (z - z.mean(-1, True)) / (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    )
    assert torch.equal(ReLANorm(EMBED, HEAD_DIM, "none")(z), z)
    assert list(ReLANorm(EMBED, HEAD_DIM, "none").parameters()) == []
    assert list(ReLANorm(EMBED, HEAD_DIM, "rms").parameters()) == []


def test_rela_initialisation():
    torch.manual_seed(0)
    width, head = 4096, 64
    gated = ReLANorm(width, head, "g")
    assert torch.equal(gated.gain, torch.ones(width))
    bound = math.sqrt(3.0 / width)
    assert gated.gate.abs().max() <= bound
    assert gated.gate.abs().max() > 0.99 * bound
    assert gated.gate.var().item() == pytest.approx(1.0 / width, rel=0.1)
    small = ReLANorm(width, head, "i")
    bound = math.sqrt(3.0 / head)
    assert small.gate is None
    assert small.gain.abs().max() <= bound
    assert small.gain.abs().max() > 0.99 * bound
    assert small.gain.var().item() == pytest.approx(1.0 / head, rel=0.1)
    assert abs(small.gain.mean().item()) < 0.02


def test_rela_takes_the_head_size_from_its_heads():
    torch.manual_seed(0)
    gain = ReLAttention(1024, 128, "i").norm.gain  # heads of 8
    assert 0.95 * math.sqrt(3.0 / 8.0) < gain.abs().max() <= math.sqrt(3.0 / 8.0)


@pytest.mark.parametrize("variant", ["g", "i", "rms", "layernorm"])
def test_rela_normalises_over_all_heads_together(variant: str):
    """Making one head larger makes the others smaller: a norm per head would leave them."""
    mechanism = ReLAttention(EMBED, HEADS, variant)
    context = torch.randn(1, HEADS, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).abs()
    larger = context.clone()
    larger[:, 0] *= 10.0
    others = slice(HEAD_DIM, None)
    if variant == "g":  # the gate reads z, which the other heads keep
        nn.init.zeros_(mechanism.norm.gate)
    before, after = mechanism.merge(context)[..., others], mechanism.merge(larger)[..., others]
    assert (after.norm(dim=-1) < 0.7 * before.norm(dim=-1)).all()


def test_rela_merges_heads_in_order():
    context = torch.arange(2.0 * HEADS * 3 * HEAD_DIM).view(2, HEADS, 3, HEAD_DIM)
    merged = ReLAttention(EMBED, HEADS, "none").merge(context)
    for head in range(HEADS):
        assert torch.equal(merged[:, :, head * HEAD_DIM : (head + 1) * HEAD_DIM], context[:, head])


def test_rela_gradients_are_the_closed_forms():
    """Section 4 of the specification: dg, dw and dZ of Y = g z r sigmoid(w z)."""
    torch.manual_seed(0)
    module = ReLANorm(EMBED, HEAD_DIM, "g").double()
    with torch.no_grad():
        module.gain.normal_()
        module.gate.normal_()
    z = torch.randn(7, EMBED, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, EMBED, dtype=torch.float64)
    module(z).backward(dy)
    with torch.no_grad():
        g, w = module.gain, module.gate
        r = ((z**2).mean(-1, keepdim=True) + 1e-8) ** -0.5
        s = torch.sigmoid(w * z)
        a = dy * g * s
        dg = (dy * z * r * s).sum(0)
        dw = (dy * g * z**2 * r * s * (1 - s)).sum(0)
        dz = r * a - r**3 / EMBED * z * (a * z).sum(-1, keepdim=True) + dy * g * r * z * s * (1 - s) * w
    torch.testing.assert_close(module.gain.grad, dg, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(module.gate.grad, dw, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(z.grad, dz, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rela_norm_of_a_null_row(variant: str, dtype: torch.dtype):
    torch.manual_seed(0)
    module = ReLANorm(EMBED, HEAD_DIM, variant).to(dtype)
    z = torch.randn(3, EMBED).to(dtype)
    z[1] = 0.0
    z.requires_grad_()
    y = module(z)
    assert y.dtype == dtype
    assert (y[1] == 0.0).all()
    (y.float() * 1000.0).sum().backward()
    assert torch.isfinite(z.grad).all()
    if variant in ("g", "i", "rms"):
        assert (z.grad[1] == 0.0).all()
    for parameter in module.parameters():
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("variant", ["g", "i", "rms"])
def test_rela_norm_in_half_precision_neither_overflows_nor_underflows(variant: str):
    """Squares of 300 overflow in fp16 and the epsilon 1e-8 is 0 there."""
    torch.manual_seed(0)
    module = ReLANorm(EMBED, HEAD_DIM, variant)
    z = torch.randn(2, EMBED) * torch.tensor([[3000.0], [1e-3]])
    half = z.half()
    torch.testing.assert_close(module(half).float(), module(half.float()), atol=2e-3, rtol=2e-3)
    assert module(half).abs().amax(-1).min() > 0.01


def test_rela_attends_to_nothing_when_all_scores_are_negative():
    data = {key: x.requires_grad_() for key, x in inputs().items()}
    mechanism = make("rela-g")
    query = -data["key"].detach().sum(2, keepdim=True).sign() * 10.0
    key = data["key"].abs() * -query.sign()
    out = mechanism.merge(mechanism(query.requires_grad_(), key, data["value"]))
    assert (out == 0.0).all()
    out.sum().backward()
    assert (data["value"].grad == 0.0).all()
    assert (data["key"].grad == 0.0).all()


# ---------------------------------------------------------------------------------------------------------------
# Length-aware scales


def linear_scale(mechanism: Mechanism, data: dict[str, Tensor], **options: Any) -> Tensor:
    """The factor (B, H, Lq) on the scores, read off the settings."""
    return mechanism.settings(data["query"], data["key"], data["hidden"], options)["query_scale"]


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


# ---------------------------------------------------------------------------------------------------------------
# Softpick


def test_softpick_of_large_scores_does_not_overflow():
    data = inputs(spread=1e4)
    weights = make("softpick").weights(data["query"], data["key"])
    assert torch.isfinite(weights).all()
    assert (weights.sum(-1) <= 1.0 + 1e-5).all()


def test_softpick_of_small_scores_keeps_its_digits():
    """e^x - 1 loses them, expm1 does not."""
    data = inputs(spread=1e-4)
    exact = make("softpick").weights(data["query"].double(), data["key"].double())
    weights = make("softpick").weights(data["query"], data["key"])
    torch.testing.assert_close(weights.double(), exact, atol=2e-6, rtol=2e-5)


def test_softpick_has_no_kernel_to_insist_on():
    with pytest.raises(RuntimeError, match="no kernel for Softpick"):
        make("softpick")(**inputs(), backend="triton")


def test_softpick_drops_whole_weights():
    data = inputs()
    mechanism = make("softpick")
    data["value"] = torch.eye(KEYS)[None, None].expand(BATCH, HEADS, KEYS, KEYS).contiguous()
    torch.manual_seed(0)
    dropped = mechanism(**data, dropout_p=0.5)
    weights = mechanism.weights(data["query"], data["key"])
    share = dropped / weights
    visible = weights > 0.0
    assert ((share[visible] < 1e-6) | ((share[visible] - 2.0).abs() < 1e-4)).all()
    assert 0.3 < (share[visible] < 1.0).float().mean() < 0.7


# ---------------------------------------------------------------------------------------------------------------
# The interface


@every_mechanism
def test_options_of_the_attention_functions_pass_through(name: str):
    """`options` are the keyword arguments of entmax_attention."""
    mechanism, data = make(name), inputs()
    plain = mechanism(**data, window=2, scale=0.3)
    assert not torch.allclose(plain, mechanism(**data))
    assert torch.equal(
        mechanism(**data, window=2, scale=0.3, backend="reference"), mechanism(**data, window=2, scale=0.3)
    )
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], window=2, scale=0.3, dropout_p=0.0)
    torch.testing.assert_close(weights @ data["value"], plain, atol=1e-5, rtol=1e-5)


@every_mechanism
def test_dropout_follows_the_generator(name: str):
    mechanism, data = make(name), inputs()
    first, again, other = (
        mechanism(**data, dropout_p=0.5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_mechanism
def test_statistics_count_the_zeros_of_the_weights(name: str):
    mechanism, data = make(name), inputs()
    statistics = mechanism.statistics(data["query"], data["key"], hidden=data["hidden"], attn_mask=some_mask())
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], attn_mask=some_mask())
    visible = some_mask().expand_as(weights)
    zeros = ((weights == 0.0) & visible).sum((0, 2, 3)) / visible.sum((0, 2, 3))
    torch.testing.assert_close(statistics.zero_share.float(), zeros.float(), atol=1e-6, rtol=1e-6)
    rows = visible.any(-1)
    support = (weights != 0.0).sum((0, 2, 3)) / rows.sum((0, 2))
    torch.testing.assert_close(statistics.support_size, support.float(), atol=1e-6, rtol=1e-6)
    null = (rows & (weights == 0.0).all(-1)).sum((0, 2)) / rows.sum((0, 2))
    torch.testing.assert_close(statistics.null_share, null.float(), atol=1e-6, rtol=1e-6)
    assert not any(getattr(statistics, field.name).requires_grad for field in dataclasses.fields(statistics))


@every_mechanism
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"backend": "bogus"}, ValueError, "backend must be one of auto, reference, triton"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
        ({"value": torch.zeros(BATCH, HEADS, KEYS - 1, HEAD_DIM)}, ValueError, "key and value must have as many"),
        ({"value": torch.zeros(BATCH, 1, KEYS, HEAD_DIM)}, ValueError, "key and value must have as many"),
        ({"value": torch.zeros(BATCH, HEADS, KEYS, HEAD_DIM).double()}, ValueError, "value must match query"),
        ({"key": torch.zeros(BATCH, HEADS, KEYS, 2)}, ValueError, "one head_dim"),
        ({"attn_mask": torch.ones(QUERIES, KEYS).long()}, TypeError, "attn_mask must be boolean"),
        ({"window": "2"}, TypeError, "window must be"),
        ({"bogus": 1}, TypeError, "bogus"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_alike(name: str, changes: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        make(name)(**{**inputs(), **changes})


@every_mechanism
def test_gqa(name: str):
    mechanism, data = make(name), inputs()
    data["key"], data["value"] = data["key"][:, :2], data["value"][:, :2]
    repeated = {**data, "key": data["key"].repeat_interleave(2, 1), "value": data["value"].repeat_interleave(2, 1)}
    out = mechanism(**data, enable_gqa=True)
    torch.testing.assert_close(out, mechanism(**repeated), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mechanism", "shown"),
    [
        (EntmaxAttention(2, LearnedAlpha(2, init=1.25)), "1.250..1.250"),
        (EntmaxAttention(2, 1.75), "alpha=1.75"),
        (EntmaxAttention(2, torch.tensor([1.25, 1.5])), "1.2500, 1.5000"),
        (ScalableSoftmax(2, init=0.75), "s=0.750..0.750"),
        (ReLAttention(8, 2, "i", "gelu"), "variant='i'"),
        (ReLAttention(8, 2, "i", "gelu"), "activation='gelu'"),
        (ReLAttention(8, 2, "g"), "gain=1.000..1.000, gate="),
        (ReLAttention(8, 2, "layernorm"), "gain=1.000..1.000, offset=0.000..0.000"),
        (ASEntmaxAttention(8, 2), "beta=0.693..0.693, gamma=0.000..0.000 at a zero input"),
        (ASEntmaxAttention(8, 2, per_head=True, init="small"), "beta=0.050..0.050, gamma=0.000..0.000)"),
        (ASEntmaxAttention(8, 2, 1.25, 0.5), "alpha=1.25"),
        (
            ASEntmaxAttention(8, 2, scaled_heads=torch.tensor([True, False]), unscaled_alpha=1.0),
            "alpha=1.5, unscaled_alpha=1",
        ),
        (ASEntmaxAttention(8, 2, 1.25, 0.5, init="small"), "delta=0.5, per_head=False, init='small'"),
        (SoftpickAttention(1e-3), "eps=0.001"),
    ],
)
def test_repr_shows_what_was_learned_or_chosen(mechanism: Mechanism, shown: str):
    assert shown in repr(mechanism)


def test_repr_follows_training():
    mechanism = ScalableSoftmax(3)
    with torch.no_grad():
        mechanism.s.copy_(torch.tensor([0.5, 1.0, 2.25]))
    assert "0.500..2.250" in repr(mechanism)


@pytest.mark.parametrize("per_head", [True, False])
def test_repr_of_scales_and_gates_follows_training(per_head: bool):
    mechanism = ASEntmaxAttention(8, 2, per_head=per_head)
    beta, gamma = torch.tensor([0.25, 3.0]), torch.tensor([-1.5, 0.5])
    with torch.no_grad():
        mechanism.scale.bias.copy_(torch.cat([beta.expm1().log(), (gamma / 2.0).atanh()]))
    assert "beta=0.250..3.000, gamma=-1.500..0.500" in repr(mechanism)
    rela = ReLAttention(2, 1)
    with torch.no_grad():
        rela.norm.gain.copy_(torch.tensor([-0.5, 2.0]))
        rela.norm.gate.copy_(torch.tensor([0.125, 0.25]))
    assert "gain=-0.500..2.000, gate=0.125..0.250" in repr(rela)


@every_mechanism
def test_repr_and_construction_on_the_meta_device(name: str):
    """Large models are built there before they are sharded."""
    with torch.device("meta"):
        mechanism = FACTORIES[name]()
    assert type(mechanism).__name__ in repr(mechanism)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: EntmaxAttention(4, "lern"), "learn"),
        (lambda: EntmaxAttention(4, 2.5), r"alpha must lie in \[1, 2\]"),
        (lambda: EntmaxAttention(4, 0.5), r"alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, 3.0), r"alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, unscaled_alpha=0.5), r"unscaled_alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, unscaled_alpha=1.0), "use NAPE positions"),
        (lambda: ReLAttention(10, 4), "multiple of num_heads"),
        (lambda: EntmaxAttention(4, None), "alpha must be"),
        (lambda: EntmaxAttention(4, True), "alpha must be"),
        (lambda: EntmaxAttention(4, torch.tensor([1.0, 1.5, 2.0])), r"one per head, \(4,\).*got shape \(3,\)"),
        (lambda: EntmaxAttention(4, LearnedAlpha(1)), r"one per head, \(4,\).*got shape \(1,\)"),
        (lambda: EntmaxAttention(4, LearnedAlpha((3, 1, 1))), r"got shape \(3, 1, 1\)"),
        (lambda: EntmaxAttention(4, torch.full((4, 5), 1.5)), r"got shape \(4, 5\)"),
        (lambda: EntmaxAttention(4, torch.full((1, 1, 4, 1, 1), 1.5)), "got shape"),
        (lambda: EntmaxAttention(4, torch.tensor([1.0, 1.5, 2.0, 2.1])), r"alpha must lie in \[1, 2\].*1 to 2.1"),
        (lambda: EntmaxAttention(2, nn.Parameter(torch.tensor([0.9, 1.5]))), r"\[1, 2\].*0.9 to 1.5"),
        (lambda: EntmaxAttention(2, torch.tensor([math.nan, 1.5])), r"alpha must lie in \[1, 2\]"),
        (lambda: EntmaxAttention(2, LearnedAlpha(2, 0.5, 3.0)), r"alpha must lie in \[1, 2\].*0.5 to 3"),
        *(
            (lambda make=make, heads=heads: make(heads), rf"num_heads must be .* at least 1, got {heads}")
            for heads in (0, -2)
            for make in (
                EntmaxAttention,
                ScalableSoftmax,
                lambda heads: ReLAttention(8, heads),
                lambda heads: ASEntmaxAttention(8, heads),
                lambda heads: build_mechanism("softmax", 8, heads),
            )
        ),
        (lambda: ReLAttention(8, 4, "gated"), "variant must be one of"),
        (lambda: ReLAttention(8, 4, "layer_norm"), "did you mean 'layernorm'"),
        (lambda: ReLAttention(8, 4, "g", "rellu"), "did you mean 'relu'"),
        (lambda: ReLAttention(8, 4, "g", "squaredrelu"), "did you mean 'squared_relu'"),
        (lambda: ASEntmaxAttention(8, 4, init="smal"), "did you mean 'small'"),
        (lambda: ASEntmaxAttention(8, 4, init="tiny"), "init must be one of"),
        (lambda: ASEntmaxAttention(8, 4, scaled_heads=torch.ones(4)), "booleans"),
        (lambda: ASEntmaxAttention(8, 4, scaled_heads=torch.ones(3, dtype=torch.bool)), "scaled_heads"),
        (lambda: ScalableSoftmax(4, scaled_heads=torch.ones(5, dtype=torch.bool)), "scaled_heads"),
        (lambda: AdaptiveScale(None, 4), "embed_dim"),
    ],
)
def test_bad_arguments_are_refused_at_once(construct: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        construct()


@pytest.mark.parametrize(
    "alpha", [torch.tensor(1.5), torch.full((1, 1, 1), 1.5), torch.full((4, 1, 1), 1.5), torch.full((4,), 1.5)]
)
def test_alphas_of_every_shape_that_attention_takes(alpha: Tensor):
    data = inputs()
    expected = EntmaxAttention(HEADS, 1.5)(**data)
    torch.testing.assert_close(EntmaxAttention(HEADS, alpha)(**data), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (EntmaxAttention(1), "EntmaxAttention was built for num_heads=1, but the layer has 4"),
        (EntmaxAttention(8, 1.5), "EntmaxAttention was built for num_heads=8, but the layer has 4"),
        (ScalableSoftmax(2), "ScalableSoftmax was built for num_heads=2, but the layer has 4"),
        (ReLAttention(EMBED, 2), "ReLAttention was built for num_heads=2, but the layer has 4"),
        (ReLAttention(48, HEADS), r"embed_dim=48, but the heads of the layer have 4 \* 6 channels together"),
        (ASEntmaxAttention(EMBED, 2), "ASEntmaxAttention was built for num_heads=2, but the layer has 4"),
        (ASSMaxAttention(48, HEADS), "ASSMaxAttention was built for embed_dim=48, but the input of the layer has 24"),
    ],
)
def test_a_layer_refuses_a_mechanism_of_other_sizes(mechanism: Mechanism, message: str):
    with pytest.raises(ValueError, match=message):
        Attention(EMBED, HEADS, mechanism=mechanism)


def test_sizes_that_do_not_matter_are_not_compared():
    Attention(EMBED, HEADS, mechanism=ASEntmaxAttention(48, HEADS, per_head=True))
    Attention(EMBED, HEADS, mechanism=ReLAttention(12, HEADS), head_dim=3)
    assert build_mechanism("rela", EMBED, HEADS, head_dim=3).embed_dim == 12
    assert build_mechanism("asentmax", EMBED, HEADS, head_dim=3).scale.weight.shape[1] == EMBED


def documented() -> type[Mechanism]:
    """The mechanism that docs/attention.md shows readers how to write."""
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    block = next(block for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M) if "(Mechanism)" in block)
    assert len(block.splitlines()) <= 24
    namespace: dict[str, Any] = {"torch": torch, "tamis": tamis}
    exec(block, namespace)
    return namespace["SharperWithLength"]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, [9] * 5),
        ({"is_causal": True}, [5, 6, 7, 8, 9]),
        ({"window": (2, 0)}, [3] * 5),
        ({"key_lengths": torch.tensor([4, 4])}, [4] * 5),
        ({"attn_mask": torch.arange(KEYS) < 6, "is_causal": True}, [5, 6, 6, 6, 6]),
        ({"is_causal": True, "query_positions": torch.tensor([0, 1, 2, 3, 8])}, [1, 2, 3, 4, 9]),
        ({"scale": 0.5, "dropout_p": 0.0, "backend": "reference", "alibi_slopes": torch.zeros(HEADS)}, [9] * 5),
    ],
)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_the_documented_mechanism_is_right_under_every_option(
    options: dict[str, Any], count: list[int], key_heads: int
):
    mechanism, data = documented()(HEADS), inputs(torch.float64)
    with torch.no_grad():
        mechanism.rate.copy_(torch.tensor([0.0, 0.2, 0.5, 1.0]))
    data["key"], data["value"] = data["key"][:, :key_heads], data["value"][:, :key_heads]
    out = mechanism(**data, **options, enable_gqa=key_heads != HEADS)
    factor = torch.tensor(count).double() ** mechanism.rate.detach().double()[:, None]
    expected = functional.entmax_attention(
        data["query"] * factor[..., None], data["key"], data["value"], **options, enable_gqa=key_heads != HEADS
    )
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_a_mechanism_without_settings_says_so():
    with pytest.raises(NotImplementedError, match="settings"):
        Mechanism()(**inputs())


class LaplaceAttention(Mechanism):
    """A mechanism of one's own: exp(-|score|) on what is visible, normalised."""

    def weights(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Tensor:
        scores, keep = functional.attention_scores(query, key, **options)
        weights = torch.where(keep, torch.exp(-torch.where(keep, scores, 0.0).abs()), 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        options.pop("dropout_p", None)
        return self.weights(query, key, **options) @ value


class TemperedEntmax(Mechanism):
    """The shorter way: settings only, with a learned temperature per head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.full((num_heads,), 2.0))

    def settings(self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        return {"alpha": 1.5, "query_scale": self.heat[None, :, None]}


@pytest.mark.parametrize("mechanism", [LaplaceAttention(), TemperedEntmax(HEADS)])
def test_a_mechanism_of_ones_own_works_in_a_layer(mechanism: Mechanism):
    torch.manual_seed(0)
    layer = Attention(EMBED, HEADS, mechanism=mechanism)
    x = torch.randn(2, 5, EMBED)
    out = layer(x, is_causal=True)
    out.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    weights = layer.weights(x, is_causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5), atol=1e-5, rtol=0.0)
    assert (weights.triu(1) == 0.0).all()
    value = layer.v_proj(x).view(2, 5, HEADS, HEAD_DIM).transpose(1, 2)
    expected = layer.out_proj((weights @ value).transpose(1, 2).reshape(2, 5, EMBED))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_scale_of_ones_own_multiplies_the_scores():
    data = inputs()
    weights = TemperedEntmax(HEADS).weights(data["query"], data["key"])
    expected = entmax15_by_sorting(2.0 * data["query"] @ data["key"].mT / math.sqrt(HEAD_DIM))
    torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# By name


@pytest.mark.parametrize(
    ("spec", "kind", "attributes"),
    [
        ("softmax", SoftmaxAttention, {}),
        ("entmax", EntmaxAttention, {"num_heads": HEADS}),
        ("entmax15", EntmaxAttention, {"alpha": 1.5}),
        ("sparsemax", EntmaxAttention, {"alpha": 2.0}),
        ("rela", ReLAttention, {"embed_dim": EMBED, "activation": "relu"}),
        ("softpick", SoftpickAttention, {"eps": 1e-6}),
        ("asentmax", ASEntmaxAttention, {"alpha": 1.5}),
        ("assmax", ASSMaxAttention, {"alpha": 1.0}),
        ("ssmax", ScalableSoftmax, {"num_heads": HEADS}),
        ({"name": "softmax"}, SoftmaxAttention, {}),
        ({"name": "entmax", "alpha": 1.3}, EntmaxAttention, {"alpha": 1.3}),
        ({"name": "entmax", "alpha": 1}, EntmaxAttention, {"alpha": 1.0}),
        ({"name": "rela", "activation": "gelu", "bias": -1.0}, ReLAttention, {"activation": "gelu", "bias": -1.0}),
        ({"name": "softpick", "eps": 1e-4}, SoftpickAttention, {"eps": 1e-4}),
        ({"name": "asentmax", "alpha": 1.3}, ASEntmaxAttention, {"alpha": 1.3}),
    ],
)
def test_build_by_name_or_table(spec: Any, kind: type, attributes: dict[str, Any]):
    given = copy.deepcopy(spec)
    mechanism = build_mechanism(spec, EMBED, HEADS)
    assert type(mechanism) is kind
    assert {key: getattr(mechanism, key) for key in attributes} == attributes
    assert spec == given


def test_build_knows_every_name_tested_here():
    assert set(MECHANISMS) == {
        *("softmax", "entmax", "entmax15", "sparsemax", "rela", "softpick", "asentmax", "assmax", "ssmax")
    }


def test_build_returns_a_mechanism_as_it_is():
    mechanism = SoftmaxAttention()
    assert build_mechanism(mechanism, EMBED, HEADS) is mechanism


@pytest.mark.parametrize("name", ["asentmax", "assmax", "ssmax"])
def test_build_passes_the_scaled_heads(name: str):
    scaled = torch.tensor([False, True, True, False])
    assert torch.equal(build_mechanism(name, EMBED, HEADS, scaled).scaled_heads, scaled)
    own = {"name": name, "scaled_heads": ~scaled}
    assert torch.equal(build_mechanism(own, EMBED, HEADS, scaled).scaled_heads, ~scaled)
    assert build_mechanism(name, EMBED, HEADS).scaled_heads is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sofmax", "did you mean 'softmax'"),
        ("Entmax", "did you mean 'entmax'"),
        ("relu", "did you mean 'rela'"),
        ({"name": "asentmx"}, "did you mean 'asentmax'"),
        ({"alpha": 1.5}, "name"),
        ({"name": 3}, "name"),
        (None, "name"),
        (["entmax"], "name"),
        ({"name": "softmax", "alpha": 1.5}, "softmax.*alpha"),
        ({"name": "entmax", "alhpa": 1.5}, "alhpa"),
        ({"name": "entmax", "alpha": 7.0}, r"\[1, 2\]"),
        ({"name": "rela", "variant": "x"}, "variant"),
    ],
)
def test_build_refuses_with_the_reason(spec: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build_mechanism(spec, EMBED, HEADS)


def test_sdpa_is_what_softmax_agrees_with():
    data = inputs(queries=KEYS)
    expected = F.scaled_dot_product_attention(data["query"], data["key"], data["value"], is_causal=True)
    for name in ("softmax", "entmax-1"):
        torch.testing.assert_close(make(name)(**data, is_causal=True), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "setting"), [("rela", "divide_by_count"), ("asentmax", "per_head")])
def test_a_switch_is_true_or_false(name, setting):
    with pytest.raises((ValueError, TypeError), match=f"{setting} must be True or False, got 'false'"):
        build_mechanism({"name": name, setting: "false"}, 16, 2)
