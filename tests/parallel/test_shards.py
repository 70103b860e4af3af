"""Keys in several places against the same keys in one."""

import math

import pytest
import torch

import tamis
from tamis.parallel import sharded_attention, sharded_counts
from tamis.parallel.layout import Layout

LENGTHS = (40, 1, 27, 60)
RULES = {
    "1.5": tamis.Entmax(1.5),
    "2": tamis.Entmax(2.0),
    "1.2": tamis.Entmax(1.2),
    "1.01": tamis.Entmax(1.01),
    "1": tamis.Entmax(1.0),
    "softmax": tamis.Softmax(),
    "per head": tamis.Entmax(torch.tensor([1.0, 1.05, 1.5, 2.0], dtype=torch.float64)),
    "relu": tamis.Activation(),
    "gelu by count": tamis.Activation("gelu", per_count=True),
    "softpick": tamis.Softpick(),
}


def tensors(dtype=torch.float64, key_heads=4, queries=3):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=draw, dtype=torch.float64)
    key = torch.randn(2, key_heads, sum(LENGTHS), 8, generator=draw, dtype=torch.float64)
    value = torch.randn(2, key_heads, sum(LENGTHS), 6, generator=draw, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (query, key, value))


def split(x, dim=2):
    return list(x.split(LENGTHS, dim))


def error(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("budget", [1, 1024])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_shards_are_as_one(dtype, bound, rule, budget):
    query, key, value = tensors(dtype)
    out = sharded_attention(query, split(key), split(value), rule=RULES[rule], budget=budget)
    expected = tamis.attention(query, key, value, rule=RULES[rule], backend="dense")
    assert out.dtype == dtype
    assert error(out, expected) < bound


@pytest.mark.parametrize("budget", [1, 1024])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": 30, "is_causal": True},
        {"alibi_slopes": torch.tensor([1.0, 0.5, 0.0, 0.0])},
        {"query_positions": torch.tensor([[100, 3, 50], [7, 8, 9]]), "is_causal": True},
    ],
)
def test_structure(options, key_heads, budget):
    query, key, value = tensors(key_heads=key_heads)
    out = sharded_attention(query, split(key), split(value), enable_gqa=True, budget=budget, **options)
    places = torch.arange(sum(LENGTHS))
    positions = {"query_positions": places[-3:], "key_positions": places} | options
    expected = tamis.attention(query, key, value, enable_gqa=True, **positions)
    assert error(out, expected) < 1e-12
    visible = {name: x for name, x in options.items() if name != "alibi_slopes"}
    counts = sharded_counts(query, split(key), enable_gqa=True, **visible)
    expected = tamis.visible_counts(query, key, enable_gqa=True, **{**positions, **visible})
    assert (counts == expected).all()


def test_shards_of_padded_sequences():
    """Each sequence has as many keys of a shard as it says, and its query stands behind the last of them."""
    query, key, value = tensors(queries=1)
    lengths = [torch.tensor([40, 12]), torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([33, 60])]
    places = split(torch.arange(sum(LENGTHS)), 0)
    last = torch.tensor([[sum(LENGTHS)], [sum(LENGTHS)]])
    options = {"is_causal": True, "query_positions": last}
    out = sharded_attention(query, split(key), split(value), key_lengths=lengths, key_positions=places, **options)
    pairs = list(zip(LENGTHS, lengths, strict=True))
    seen = torch.stack([torch.cat([torch.arange(n) < own[b] for n, own in pairs]) for b in range(2)])
    expected = tamis.attention(query, key, value, attn_mask=seen[:, None, None])
    assert error(out, expected) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_shard_may_be_empty(rule):
    query, key, value = tensors()
    shards = [[x[:, :, :0], x[:, :, :50], x[:, :, 50:], x[:, :, :0]] for x in (key, value)]
    for budget in (1, 1024):
        out = sharded_attention(query, *shards, is_causal=True, rule=RULES[rule], budget=budget)
        expected = tamis.attention(query, key, value, is_causal=True, rule=RULES[rule], backend="dense")
        assert error(out, expected) < 1e-12


def test_what_is_sent_stays_small():
    """A row of 8192 keys with normal scores at alpha = 1.5: a few of each shard's."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 1, 64, generator=draw, dtype=torch.float64)
    key = torch.randn(1, 1, 8192, 64, generator=draw, dtype=torch.float64)
    value = torch.randn(1, 1, 8192, 64, generator=draw, dtype=torch.float64)
    shards = [list(x.chunk(4, 2)) for x in (key, value)]
    expected = tamis.attention(query, key, value)
    assert error(sharded_attention(query, *shards, budget=128), expected) < 1e-12


@pytest.mark.parametrize("budget", [1, 1024])
@pytest.mark.parametrize("rule", ["1.5", "1", "per head", "relu"])
def test_rows_without_keys_and_special_scores(rule, budget):
    query, key, value = tensors(queries=4)
    query[0, 0, 1] = math.nan
    positions = torch.tensor([-1, 120, 30, -5])
    options = {"is_causal": True, "query_positions": positions}
    out = sharded_attention(query, split(key), split(value), rule=RULES[rule], budget=budget, **options)
    assert out[:, :, 3].eq(0.0).all()
    assert out[0, 0, 1].isnan().all()
    out[0, 0, 1] = 0.0
    assert out.isfinite().all()
    expected = tamis.attention(
        query, key, value, rule=RULES[rule], backend="dense", key_positions=torch.arange(sum(LENGTHS)), **options
    )
    expected[0, 0, 1] = 0.0
    assert error(out, expected) < 1e-12


@pytest.mark.parametrize("budget", [1, 1024])
def test_infinite_scores_take_all_the_weight(budget):
    query, key, value = tensors(queries=1)
    key[0, 0, 50], key[0, 0, 100] = math.inf, math.inf
    query = query.abs()
    out = sharded_attention(query, split(key), split(value), budget=budget)
    torch.testing.assert_close(out[0, 0, 0], (value[0, 0, 50] + value[0, 0, 100]) / 2)


def test_bad_input():
    query, key, value = tensors()
    with pytest.raises(ValueError, match=r"keys must be a list of one tensor for each shard.* got a tensor"):
        sharded_attention(query, key, [value])
    with pytest.raises(ValueError, match=r"values must be a list .* got 1 for 4 shards"):
        sharded_attention(query, split(key), [value])
    with pytest.raises(ValueError, match=r"keys must be a list .* at least one"):
        sharded_attention(query, [], [])
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        sharded_attention(query, [key], [value], budget=0)
    with pytest.raises(ValueError, match="give key_positions and query_positions"):
        sharded_attention(query, [key], [value], is_causal=True, key_lengths=[torch.tensor([1, 2])])
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        sharded_attention(query, [key], [value], mesh="cpu")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 12, 13])
def test_every_token_has_one_place(size, length):
    """What processes take, put together, is the sequence, and their places say where each token stood."""
    layouts = [Layout(size, rank) for rank in range(size)]
    x = torch.arange(1, length + 1)[None, :, None].expand(2, -1, 3)
    parts = torch.stack([layout.take(x, 1) for layout in layouts])
    joined = layouts[0].join(parts, 1)
    assert joined.shape[1] == layouts[0].padded(length)
    assert (joined[:, :length] == x).all()
    assert (joined[:, length:] == 0).all()
    assert (layouts[0].split(joined, 1) == parts).all()
    for layout, part in zip(layouts, parts, strict=True):
        places = layout.places(part.shape[1], x.device)
        assert (joined[:, places] == part).all()
