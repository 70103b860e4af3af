"""The attention layer: a cache, padding, grouped heads and masks change the cost, never the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tamis.mechanisms import EntmaxAttention, build_mechanism
from tamis.nn import Attention, AttentionCache, LayerCache, ModelCache
from tamis.positions import NAPE, ALiBi, NoPE, Position, RoPE

EMBED, HEADS, BATCH, LENGTH = 16, 4, 2, 9
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}

SPECS: dict[str, Any] = {
    "softmax": "softmax",
    "entmax": "entmax",
    "entmax15": "entmax15",
    "sparsemax": "sparsemax",
    "rela": "rela",
    "rela-i": {"name": "rela", "variant": "i"},
    "rela-sigmoid": {"name": "rela", "activation": "sigmoid", "bias": -1.0, "divide_by_count": True},
    "softpick": "softpick",
    "asentmax": "asentmax",
    "assmax": {"name": "assmax", "per_head": True},
    "ssmax": "ssmax",
}
POSITIONS: dict[str, Callable[[], Position]] = {
    "none": NoPE,
    "rope": lambda: RoPE(EMBED // HEADS),
    "alibi": lambda: ALiBi(HEADS),
    "nape": lambda: NAPE(HEADS),
}
every_mechanism = pytest.mark.parametrize("name", SPECS)
every_position = pytest.mark.parametrize("where", POSITIONS)


@pytest.fixture(autouse=True)
def one_thread():
    """Layers this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layer_of(name: str = "entmax", where: str = "none", **options: Any) -> Attention:
    torch.manual_seed(0)
    position = POSITIONS[where]()
    mechanism = build_mechanism(SPECS[name], EMBED, HEADS, position.scaled_heads())
    layer = Attention(EMBED, HEADS, mechanism=mechanism, position=position, **options)
    for linear in (layer.q_proj, layer.k_proj):
        nn.init.normal_(linear.weight, std=0.5)
    return layer.eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------
# Without a cache


@every_mechanism
@every_position
def test_forward_is_projections_around_the_weights(name: str, where: str):
    layer, x = layer_of(name, where), normal(BATCH, LENGTH, EMBED)
    weights = layer.weights(x, is_causal=True)
    value = layer.v_proj(x).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
    expected = layer.out_proj(layer.mechanism.merge(weights @ value))
    torch.testing.assert_close(layer(x, is_causal=True), expected, **CLOSE)
    assert (weights.triu(1) == 0.0).all()


def test_softmax_is_the_formula():
    layer, x, memory = layer_of("softmax"), normal(BATCH, 3, EMBED), normal(BATCH, 5, EMBED, seed=1)
    query = (x @ layer.q_proj.weight.T + layer.q_proj.bias).view(BATCH, 3, HEADS, 4)
    key = (memory @ layer.k_proj.weight.T + layer.k_proj.bias).view(BATCH, 5, HEADS, 4)
    value = (memory @ layer.v_proj.weight.T + layer.v_proj.bias).view(BATCH, 5, HEADS, 4)
    weights = torch.einsum("bihd,bjhd->bhij", query, key).div(2.0).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, value).reshape(BATCH, 3, EMBED)
    torch.testing.assert_close(layer(x, memory), out @ layer.out_proj.weight.T + layer.out_proj.bias, **CLOSE)
    torch.testing.assert_close(layer.weights(x, memory), weights, **CLOSE)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_apply_together(kind: str):
    layer, x = layer_of(), normal(BATCH, LENGTH, EMBED)
    keep = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.7
    keys = torch.arange(LENGTH) < torch.tensor([[LENGTH], [4]])
    mask = keep if kind == "bool" else torch.zeros(LENGTH, LENGTH).masked_fill(~keep, -math.inf)
    weights = layer.weights(x, attn_mask=mask, key_mask=keys, is_causal=True)
    visible = keep & keys[:, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert (weights[~visible[:, None].expand_as(weights)] == 0.0).all()
    torch.testing.assert_close(weights.sum(-1), visible.any(-1)[:, None].float().expand(-1, HEADS, -1), **CLOSE)
    expected = layer(x, attn_mask=visible[:, None])
    torch.testing.assert_close(layer(x, attn_mask=mask, key_mask=keys, is_causal=True), expected, **CLOSE)


@pytest.mark.parametrize("mask", [torch.ones(BATCH, LENGTH), torch.ones(LENGTH, dtype=torch.bool)])
def test_a_key_mask_of_another_kind_is_refused(mask: Tensor):
    with pytest.raises(ValueError, match="key_mask"):
        layer_of()(normal(BATCH, LENGTH, EMBED), key_mask=mask)


@every_mechanism
def test_a_sequence_without_visible_keys_gives_the_bias(name: str):
    layer, x = layer_of(name), normal(BATCH, LENGTH, EMBED).requires_grad_()
    keys = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keys[0] = False
    out = layer(x, key_mask=keys)
    torch.testing.assert_close(out[0], layer.out_proj.bias.expand(LENGTH, -1))
    out.square().sum().backward()
    assert (x.grad[0] == 0.0).all()
    assert torch.isfinite(x.grad).all()


@every_mechanism
def test_an_empty_memory_gives_the_bias(name: str):
    layer, x = layer_of(name), normal(BATCH, 3, EMBED)
    out = layer(x, normal(BATCH, 0, EMBED))
    torch.testing.assert_close(out, layer.out_proj.bias.expand_as(out))


@every_mechanism
@every_position
def test_left_padding_changes_nothing(name: str, where: str):
    layer, x, pad = layer_of(name, where), normal(BATCH, LENGTH, EMBED), 3
    padded = torch.cat([normal(BATCH, pad, EMBED, seed=7), x], 1)
    keys = (torch.arange(LENGTH + pad) >= pad).expand(BATCH, -1)
    positions = (torch.arange(LENGTH + pad) - pad).clamp(min=0)[None]
    out = layer(padded, key_mask=keys, positions=positions, is_causal=True)
    torch.testing.assert_close(out[:, pad:], layer(x, is_causal=True), **CLOSE)


@pytest.mark.parametrize("kv_heads", [1, 2])
@every_mechanism
def test_grouped_heads_are_repeated_ones(name: str, kv_heads: int):
    grouped, full = layer_of(name, "rope", num_kv_heads=kv_heads), layer_of(name, "rope")
    assert grouped.k_proj.weight.shape == (kv_heads * 4, EMBED)
    groups = HEADS // kv_heads
    with torch.no_grad():
        for part in ("k_proj", "v_proj"):
            for tensor in ("weight", "bias"):
                shared = getattr(getattr(grouped, part), tensor)
                repeated = shared.unflatten(0, (kv_heads, 4)).repeat_interleave(groups, 0).flatten(0, 1)
                getattr(getattr(full, part), tensor).copy_(repeated)
        full.q_proj.load_state_dict(grouped.q_proj.state_dict())
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
        full.mechanism.load_state_dict(grouped.mechanism.state_dict())
    x = normal(BATCH, LENGTH, EMBED)
    torch.testing.assert_close(grouped(x, is_causal=True), full(x, is_causal=True), **CLOSE)


def test_head_dim_and_memory_dim_and_bias():
    layer = Attention(EMBED, HEADS, head_dim=6, memory_dim=10, bias=False, mechanism=EntmaxAttention(HEADS))
    shapes = {key: tuple(x.shape) for key, x in layer.named_parameters() if key.endswith("proj.weight")}
    assert shapes == {
        "q_proj.weight": (24, EMBED),
        "k_proj.weight": (24, 10),
        "v_proj.weight": (24, 10),
        "out_proj.weight": (EMBED, 24),
    }
    assert not any(key.endswith("bias") for key in layer.state_dict())
    x, memory = normal(BATCH, 3, EMBED), normal(BATCH, 5, 10)
    assert layer(x, memory).shape == x.shape
    assert layer.weights(x, memory).shape == (BATCH, HEADS, 3, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "embed_dim must be a multiple"),
        ({"num_heads": 0}, "num_heads must be .* at least 1, got 0"),
        ({"num_heads": -4}, "num_heads must be .* at least 1, got -4"),
        ({"num_heads": 0, "head_dim": 4}, "num_heads must be .* at least 1, got 0"),
        ({"num_heads": 4.0}, "num_heads must be an int"),
        ({"position": RoPE(8)}, "RoPE was built for head_dim=8, got heads of 4"),
        ({"position": ALiBi(8)}, "ALiBi was built for num_heads=8, but the layer has 4"),
        ({"position": NAPE(2)}, "NAPE was built for num_heads=2, but the layer has 4"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_kv_heads": 8}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_bad_sizes(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Attention(EMBED, **{"num_heads": HEADS, **options})


@pytest.mark.parametrize("mechanism", ["entmax", {"name": "entmax"}, EntmaxAttention], ids=["name", "table", "class"])
def test_a_mechanism_that_is_none_is_refused_with_the_way_to_build_one(mechanism: Any):
    with pytest.raises(TypeError, match=r"EntmaxAttention\(4\).*build_mechanism\(\"entmax\", 16, 4\)"):
        Attention(EMBED, HEADS, mechanism=mechanism)


@every_position
@pytest.mark.parametrize("length", [HEADS, LENGTH])
def test_positions_of_one_dim_are_those_of_every_sequence(where: str, length: int):
    """With as many tokens as heads, (L,) would broadcast against the heads."""
    layer, x = layer_of("entmax", where), normal(BATCH, length, EMBED)
    positions = torch.arange(length) * 3
    expected = layer(x, positions=positions.expand(BATCH, -1), is_causal=True)
    for given in (positions, positions[None]):
        torch.testing.assert_close(layer(x, positions=given, is_causal=True), expected, **CLOSE)
    cache, parts = AttentionCache(), []
    with torch.no_grad():
        for i in range(length):
            parts.append(layer(x[:, i : i + 1], positions=positions[i : i + 1], is_causal=True, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)


@every_position
@pytest.mark.parametrize("shape", [(), (1,), (LENGTH + 1,), (3, LENGTH), (BATCH, 1), (BATCH, HEADS, LENGTH)])
def test_positions_of_another_shape_are_refused(where: str, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"positions must be \(9,\), \(1, 9\) or \(2, 9\), got"):
        layer_of("entmax", where)(normal(BATCH, LENGTH, EMBED), positions=torch.zeros(shape, dtype=torch.long))


def test_options_reach_the_mechanism():
    layer, x = layer_of(), normal(BATCH, LENGTH, EMBED)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    torch.testing.assert_close(layer(x, window=1), layer(x, attn_mask=distance <= 1), **CLOSE)


def test_dropout_is_of_weights_and_in_training_only():
    layer, x = layer_of("entmax", dropout=0.5), normal(BATCH, LENGTH, EMBED)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)


@every_mechanism
@every_position
def test_bf16_runs_forward_and_backward(name: str, where: str):
    layer = layer_of(name, where)
    x = normal(BATCH, LENGTH, EMBED)
    exact = layer(x, is_causal=True)
    layer = layer.bfloat16().train()
    half = x.bfloat16().requires_grad_()
    out = layer(half, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).norm() < 0.05 * exact.norm()
    out.float().square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.dtype == (torch.float32 if key.startswith("mechanism") else torch.bfloat16), key


# ---------------------------------------------------------------------------------------------------------------
# With a cache


@every_mechanism
@every_position
@pytest.mark.parametrize("steps", [[1] * LENGTH, [4, 3, 2], [6, 1, 1, 1]], ids=["steps", "chunks", "prefill"])
def test_cached_decoding_is_the_full_forward(name: str, where: str, steps: list[int]):
    layer, x = layer_of(name, where), normal(BATCH, LENGTH, EMBED)
    cache = AttentionCache()
    with torch.no_grad():
        parts = [layer(part, is_causal=True, cache=cache) for part in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, is_causal=True), **CLOSE)
    assert cache.length == LENGTH


@every_mechanism
@pytest.mark.parametrize("where", ["rope", "nape"])
def test_cached_decoding_with_left_padding(name: str, where: str):
    layer, x, pad = layer_of(name, where), normal(BATCH, LENGTH, EMBED), 2
    padded = torch.cat([normal(BATCH, pad, EMBED, seed=7), x], 1)
    keys = (torch.arange(LENGTH + pad) >= pad).expand(BATCH, -1)
    positions = (torch.arange(LENGTH + pad) - pad).clamp(min=0)[None]
    cache, out, start = AttentionCache(), [], 0
    with torch.no_grad():
        for size in (5, 1, 1, 4):
            stop = start + size
            part = padded[:, start:stop]
            arguments = {"key_mask": keys[:, :stop], "positions": positions[:, start:stop], "is_causal": True}
            out.append(layer(part, cache=cache, **arguments))
            start = stop
        torch.testing.assert_close(torch.cat(out, 1)[:, pad:], layer(x, is_causal=True), **CLOSE)


@pytest.mark.parametrize("name", ["entmax", "rela", "asentmax"])
def test_cached_decoding_with_grouped_heads_and_a_window(name: str):
    layer, x = layer_of(name, "alibi", num_kv_heads=2), normal(BATCH, 40, EMBED)  # longer than the first room
    cache = AttentionCache()
    with torch.no_grad():
        parts = [layer(part, is_causal=True, window=(3, 0), cache=cache) for part in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, is_causal=True, window=(3, 0)), **CLOSE)
    assert cache.contents()[0].shape == (BATCH, 2, 40, 4)


def test_cross_attention_is_computed_once():
    layer, memory = layer_of("entmax", "rope"), normal(BATCH, 5, EMBED, seed=1)
    counts = {"k_proj": 0, "v_proj": 0, "q_proj": 0}
    for part in counts:
        getattr(layer, part).register_forward_hook(lambda *_, part=part: counts.update({part: counts[part] + 1}))
    x, cache = normal(BATCH, LENGTH, EMBED), AttentionCache()
    with torch.no_grad():
        parts = [layer(part, memory, cache=cache) for part in x.split(1, 1)]
        assert counts == {"k_proj": 1, "v_proj": 1, "q_proj": LENGTH}
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, memory), **CLOSE)
    assert cache.length == 5


@every_mechanism
def test_cross_attention_reads_a_masked_memory(name: str):
    layer, x, memory = layer_of(name), normal(BATCH, 4, EMBED), normal(BATCH, 6, EMBED, seed=1)
    keys = torch.arange(6) < torch.tensor([[6], [3]])
    out, cache = layer(x, memory, key_mask=keys), AttentionCache()
    torch.testing.assert_close(out[1:], layer(x[1:], memory[1:, :3]), **CLOSE)
    with torch.no_grad():
        parts = [layer(part, memory, key_mask=keys, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), out, **CLOSE)


@pytest.mark.parametrize("index", [[1, 0, 2], [0, 0, 2], [2, 2, 2], [1], [2, 0], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("where", ["rope", "alibi"])
def test_reordered_beams_continue_their_new_history(index: list[int], where: str):
    layer, x, order = layer_of("entmax", where), normal(3, 6, EMBED), torch.tensor(index)
    more = normal(len(index), 20, EMBED, seed=3)
    cache = AttentionCache()
    with torch.no_grad():
        layer(x, is_causal=True, cache=cache)
        cache.reorder(order)
        parts = [layer(part, is_causal=True, cache=cache) for part in more.split(1, 1)]
        full = layer(torch.cat([x[order], more], 1), is_causal=True)
    torch.testing.assert_close(torch.cat(parts, 1), full[:, 6:], **CLOSE)


def test_reorder_keeps_beams_apart():
    """Two beams that continue the same row must not write into each other's keys."""
    cache = AttentionCache()
    cache.append(normal(2, 1, 3, 4), normal(2, 1, 3, 4))
    cache.reorder(torch.tensor([0, 0]))
    key, _ = cache.append(torch.stack([torch.zeros(1, 1, 4), torch.ones(1, 1, 4)]), normal(2, 1, 1, 4))
    assert (key[0, :, 3] == 0.0).all()
    assert (key[1, :, 3] == 1.0).all()
    assert torch.equal(key[0, :, :3], key[1, :, :3])


def test_an_empty_cache_may_be_reordered():
    cache = ModelCache(2)
    cache.reorder(torch.tensor([0, 0]))
    assert cache.length == 0
    assert cache.layers[0].self_attention.contents() is None
    layer = LayerCache()
    layer.reorder(torch.tensor([1, 0]))
    assert layer.cross_attention.contents() is None


@pytest.mark.parametrize(
    "other",
    [
        normal(BATCH, 2, 1, 4),
        normal(BATCH, 4, 1, 8),
        normal(BATCH + 1, 4, 1, 4),
        normal(BATCH, 4, 1, 4).double(),
        normal(BATCH, 4, 1, 4).bfloat16(),
    ],
    ids=["heads", "head_dim", "batch", "float64", "bfloat16"],
)
def test_a_cache_of_another_model_is_refused_and_left_whole(other: Tensor):
    cache = AttentionCache()
    key, value = normal(BATCH, 4, 3, 4), normal(BATCH, 4, 3, 4, seed=1)
    cache.append(key, value)
    with pytest.raises(ValueError, match="another model"):
        cache.append(other, other)
    with pytest.raises(ValueError, match="another model"):
        cache.append(normal(BATCH, 4, 1, 4), other)
    assert cache.length == 3
    assert torch.equal(cache.contents()[0], key)
    assert torch.equal(cache.contents()[1], value)


@pytest.mark.parametrize("cross", [True, False])
def test_a_layer_refuses_the_cache_of_another(cross: bool):
    layer, cache, x = layer_of(), AttentionCache(), normal(BATCH, 3, EMBED)
    other = Attention(EMBED, HEADS, head_dim=6)
    other(x, x if cross else None, cache=cache, positions=torch.arange(3))
    before = [held.clone() for held in cache.contents()]
    for inputs in (x, normal(BATCH + 1, 3, EMBED)):
        memory = inputs if cross else None
        with pytest.raises(ValueError, match=r"this cache holds keys .*is it another model's\?"):
            layer(inputs, memory, cache=cache, positions=torch.arange(3))
    assert cache.length == 3
    assert all(torch.equal(held, kept) for held, kept in zip(cache.contents(), before, strict=True))
    assert cache.positions is None if cross else torch.equal(cache.positions, torch.arange(3)[None])


def test_the_cache_grows_without_copies_at_every_step():
    cache, pointers = AttentionCache(), set()
    with torch.no_grad():
        for _ in range(200):
            key, _ = cache.append(normal(1, 1, 1, 4), normal(1, 1, 1, 4))
            pointers.add(key.data_ptr())
    assert cache.length == 200
    assert len(pointers) <= 6


@every_mechanism
@pytest.mark.parametrize("frozen", [(), ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "out_proj")])
def test_cached_steps_can_be_differentiated(name: str, frozen: tuple[str, ...]):
    """Attention keeps its keys for the backward pass, also frozen ones: later steps must not write into them."""
    layer, x = layer_of(name, "rope"), normal(BATCH, LENGTH, EMBED)
    for part in frozen:
        getattr(layer, part).requires_grad_(False)
    learned = [p for p in layer.parameters() if p.requires_grad] or [x.requires_grad_()]
    cotangent, cache = normal(BATCH, LENGTH, EMBED, seed=5), AttentionCache()
    out = torch.cat([layer(part, is_causal=True, cache=cache) for part in x.split([4, 1, 2, 2], 1)], 1)
    gradients = torch.autograd.grad((out * cotangent).sum(), learned)
    expected = torch.autograd.grad((layer(x, is_causal=True) * cotangent).sum(), learned)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_cached_cross_attention_can_be_differentiated():
    layer, x, memory = layer_of(), normal(BATCH, 4, EMBED), normal(BATCH, 6, EMBED, seed=1).requires_grad_()
    cache = AttentionCache()
    out = torch.cat([layer(part, memory, cache=cache) for part in x.split(1, 1)], 1)
    (gradient,) = torch.autograd.grad(out.square().sum(), memory)
    (expected,) = torch.autograd.grad(layer(x, memory).square().sum(), memory)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_steps_with_and_without_gradients_may_alternate():
    layer, x, cache, parts = layer_of("entmax", "rope"), normal(BATCH, LENGTH, EMBED), AttentionCache(), []
    for number, part in enumerate(x.split(1, 1)):
        with torch.set_grad_enabled(number % 3 != 0):
            parts.append(layer(part, is_causal=True, cache=cache))
    out = torch.cat(parts, 1)
    torch.testing.assert_close(out, layer(x, is_causal=True), **CLOSE)
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
