"""Feed-forward and norms against compositions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tamis.mechanisms import EntmaxAttention
from tamis.nn import Attention, FeedForward, LayerCache, TransformerLayer
from tamis.nn.layers import RMSNorm

EMBED, HEADS, FFN, BATCH, LENGTH = 16, 4, 24, 2, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(cross: bool = True, **options: Any) -> TransformerLayer:
    torch.manual_seed(0)
    attention = [Attention(EMBED, HEADS, mechanism=EntmaxAttention(HEADS)) for _ in range(2)]
    layer = TransformerLayer(attention[0], FeedForward(EMBED, FFN), attention[1] if cross else None, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or "after" in name:
                parameter.add_(torch.randn_like(parameter))  # so that no norm can be taken for another
    return layer.eval()


# ---------------------------------------------------------------------------------------------------------------
# Feed-forward

FORMULAS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "relu": lambda up, gate: up.clamp(min=0.0),
    "gelu": lambda up, gate: F.gelu(up),
    "swiglu": lambda up, gate: gate * torch.sigmoid(gate) * up,
    "geglu": lambda up, gate: F.gelu(gate) * up,
}


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_is_the_formula(activation: str, bias: bool):
    torch.manual_seed(0)
    module, x = FeedForward(EMBED, FFN, activation, bias=bias), normal(BATCH, LENGTH, EMBED)
    gated = activation.endswith("glu")
    assert (module.gate is not None) == gated
    assert len(list(module.parameters())) == (3 if gated else 2) * (2 if bias else 1)
    hidden = FORMULAS[activation](module.up(x), module.gate(x) if gated else None)
    expected = hidden @ module.down.weight.T + (module.down.bias if bias else 0.0)
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-5)


def test_feed_forward_drops_hidden_units_in_training_only():
    torch.manual_seed(0)
    module, x = FeedForward(EMBED, FFN, dropout=0.5), normal(BATCH, LENGTH, EMBED)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: FeedForward(8, 16, "rellu"), "did you mean 'relu'"),
        (lambda: FeedForward(8, 16, "swigu"), "did you mean 'swiglu'"),
        (lambda: layer_of(norm="rms"), "did you mean 'rmsnorm'"),
        (lambda: layer_of(norm="LayerNorm"), "did you mean 'layernorm'"),
        (lambda: layer_of(arrangement="prenorm"), "did you mean 'pre'"),
        (lambda: layer_of(arrangement="boht"), "did you mean 'both'"),
    ],
)
def test_unknown_names_get_the_nearest_one(construct: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        construct()


# ---------------------------------------------------------------------------------------------------------------
# The layer


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("arrangement", ["pre", "post", "both"])
@pytest.mark.parametrize("cross", [True, False])
def test_arrangements_are_what_they_say(norm: str, arrangement: str, cross: bool):
    layer = layer_of(cross, norm=norm, arrangement=arrangement)
    x, memory = normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED, seed=1)
    mask, memory_mask = torch.arange(LENGTH) < torch.tensor([[6], [4]]), torch.arange(5) < torch.tensor([[2], [5]])
    sublayers = [(layer.self_residual, lambda h: layer.self_attention(h, key_mask=mask, is_causal=True))]
    if cross:
        sublayers.append((layer.cross_residual, lambda h: layer.cross_attention(h, memory, key_mask=memory_mask)))
    sublayers.append((layer.feed_residual, layer.feed_forward))
    h = x
    for residual, sublayer in sublayers:
        if arrangement == "pre":
            h = h + sublayer(residual.norm(h))
        elif arrangement == "post":
            h = residual.norm(h + sublayer(h))
        else:
            h = h + residual.after(sublayer(residual.norm(h)))
    kind = nn.LayerNorm if norm == "layernorm" else RMSNorm
    norms = [module for module in layer.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    assert all(type(module) is kind for module in norms)
    assert len(norms) == len(sublayers) * (2 if arrangement == "both" else 1)
    out = layer(x, memory if cross else None, key_mask=mask, memory_mask=memory_mask, is_causal=True)
    torch.testing.assert_close(out, h, atol=1e-6, rtol=1e-5)


def test_rmsnorm_is_that_of_torch_and_in_fp32_under_autocast():
    x, norm, other = normal(BATCH, LENGTH, EMBED), RMSNorm(EMBED), nn.RMSNorm(EMBED)
    with torch.no_grad():
        norm.weight.copy_(normal(EMBED, seed=1))
    other.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), other(x))
    half = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(half)
    assert out.dtype == torch.float32
    assert torch.equal(out, other(half.float()))
    (grad,) = torch.autograd.grad(out.sum(), half)
    assert grad.dtype == torch.bfloat16
    assert norm.bfloat16()(half).dtype == torch.bfloat16


class Casts(TorchDispatchMode):
    """Counts activations cast to bf16."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].ndim == 3:
            self.count += kwargs.get("dtype") == torch.bfloat16
        return function(*args, **(kwargs or {}))


def test_under_autocast_inputs_of_several_products_are_cast_once():
    feed, attention, x = FeedForward(EMBED, FFN, "geglu"), Attention(EMBED, HEADS), normal(BATCH, LENGTH, EMBED)
    for module, arguments in ((feed, (x,)), (attention, (x,)), (attention, (x, normal(BATCH, 5, EMBED, seed=1)))):
        with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            out = module(*arguments)
        assert casts.count == len(arguments)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), module(*arguments), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("arrangement", ["pre", "post", "both"])
def test_gradients_reach_every_parameter(arrangement: str):
    layer = layer_of(arrangement=arrangement)
    out = layer(normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED, seed=1), is_causal=True)
    (out * normal(*out.shape, seed=2)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("k_proj.bias"):  # which shifts all scores of a row alike
            assert parameter.grad.abs().max() > 0.0, name


def test_cross_attention_needs_memory():
    with pytest.raises(ValueError, match="memory"):
        layer_of()(normal(BATCH, LENGTH, EMBED))


def test_a_layer_without_cross_attention_refuses_memory():
    """Silently ignoring it would hide a decoder built as an encoder."""
    with pytest.raises(ValueError, match="memory"):
        layer_of(cross=False)(normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED))


def test_residual_dropout_in_training_only():
    layer = layer_of(dropout=0.5)
    x, memory = normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED, seed=1)
    assert torch.equal(layer(x, memory), layer(x, memory))
    layer.train()
    assert not torch.equal(layer(x, memory), layer(x, memory))


@pytest.mark.parametrize("arrangement", ["pre", "post", "both"])
def test_cached_steps_are_the_full_forward(arrangement: str):
    layer = layer_of(arrangement=arrangement)
    x, memory, cache = normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED, seed=1), LayerCache()
    with torch.no_grad():
        parts = [layer(part, memory, is_causal=True, cache=cache) for part in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, memory, is_causal=True), atol=1e-5, rtol=1e-5)
    assert cache.self_attention.length == LENGTH
    assert cache.cross_attention.length == 5


def test_options_reach_self_attention_only():
    layer = layer_of()
    x, memory = normal(BATCH, LENGTH, EMBED), normal(BATCH, 5, EMBED, seed=1)
    seen = []
    layer.cross_attention.register_forward_pre_hook(lambda m, a, k: seen.append(set(k)), with_kwargs=True)
    assert not torch.allclose(layer(x, memory, window=1), layer(x, memory))
    assert all("window" not in names for names in seen)
