"""Rectified linear attention: its norm, gate and null rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mechanisms.cases import EMBED, HEAD_DIM, HEADS, VARIANTS, inputs, make
from tamis.mechanisms import ReLANorm, ReLAttention


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
