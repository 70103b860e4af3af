"""Keys out of reach: what is passed over has no weight, and nothing changes."""

import pytest
import torch

import tamis
from tamis import attention_weights
from tamis.attention.rules import Entmax
from tamis.mechanisms import EntmaxAttention, reach
from tamis.mechanisms.reach import PAGE, first_in_reach
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn import attention
from tamis.nn.cache import AttentionCache
from tamis.nn.modes import evaluating
from tamis.positions import NAPE
from tamis.positions.alibi import geometric_slopes, harmonic_slopes


def norms(key):
    """Page by page."""
    wide = key.to(torch.promote_types(key.dtype, torch.float32)).norm(dim=-1)
    return torch.stack([page.amax(-1) for page in wide.split(PAGE, 2)], 2)


SIZES = {"vocab_size": 20, "embed_dim": 64, "num_heads": 8, "ffn_dim": 64, "num_layers": 2}


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, "per head"])
@pytest.mark.parametrize("slopes", [harmonic_slopes(4) + [0.0] * 4, geometric_slopes(8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_out_of_reach_has_no_weight(alpha, slopes, dtype):
    generator = torch.Generator().manual_seed(0)
    slopes = torch.tensor(slopes)
    alpha = torch.linspace(1.0, 2.0, 8) if alpha == "per head" else alpha
    skipped = 0
    for sharpness in (0.0, 0.3, 1.0, 5.0):
        query = (sharpness * torch.randn(2, 8, 1, 16, generator=generator)).to(dtype)
        key = torch.randn(2, 8, 500, 16, generator=generator)
        key[:, :, 100:110] *= torch.logspace(-1, 2, 10)[:, None]  # far and long: some are in reach
        key = key.to(dtype)
        first = first_in_reach(query, key, norms(key), Entmax(alpha).margin(), slopes)
        weights = attention_weights(query, key, rule=Entmax(alpha), is_causal=True, alibi_slopes=slopes)
        beyond = torch.arange(500) < first[:, None, None]
        assert (weights[beyond.expand(weights.shape)] == 0.0).all()
        assert (first[slopes == 0.0] == 0).all()
        skipped += int(beyond.sum())
    assert skipped > 1000


def test_a_key_at_the_edge_and_one_that_is_not_a_number():
    """Of two keys that point along the query, the far one is reached as soon as its lead pays for the way."""
    query, slopes = torch.tensor([[[[4.0, 0.0, 0.0, 0.0]]]]), torch.ones(1)
    key = torch.zeros(1, 1, 500, 4)
    key[..., -1, 0] = 1.0  # a score of 2, so that 2 - 2 is the least that has a weight
    for score, first in ((240.0, 448), (244.5, 192)):  # of the last key of a page, at distance 244
        key[..., 255, 0] = score / 2
        assert int(first_in_reach(query, key, norms(key), 2.0, slopes)) == first
    key[..., 70, 0] = torch.nan
    assert int(first_in_reach(query, key, norms(key), 2.0, slopes)) == 64


@pytest.mark.parametrize("mechanism", ["asentmax", "entmax", {"name": "entmax", "alpha": 1.5}])
@pytest.mark.parametrize("position", ["nape", "alibi"])
def test_generating_is_the_same_and_looks_at_fewer_keys(monkeypatch, mechanism, position):
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(mechanism=mechanism, position=position, **SIZES)).double()
    tokens = torch.randint(20, (2, 400))
    looked = []
    whole = reach.functional.attention

    def spy(query, key, value, **options):
        looked.append(key.shape[2])
        return whole(query, key, value, **options)

    monkeypatch.setattr(reach.functional, "attention", spy)

    def continued(far):
        monkeypatch.setattr(attention, "FAR", far)
        with evaluating(model):
            cache = model.new_cache()
            model(tokens[:, :390], cache=cache)
            found = [model(tokens[:, n : n + 1], cache=cache) for n in range(390, 396)]
            cache.reorder(torch.tensor([1, 0]))
            cache.shorten(392)
            looked.clear()
            return torch.cat([*found, model(tokens[:, 396:397], cache=cache)], 1)

    expected = continued(10**9)
    assert set(looked) == {393}
    torch.testing.assert_close(continued(8), expected, rtol=1e-10, atol=1e-10)
    assert min(looked) < 196


class Sharper(EntmaxAttention):
    def query_scale(self, inputs):
        return inputs.query.new_full((1, 1, 1), 100.0)


class Own(EntmaxAttention):
    def forward(self, query, key, value, *, hidden=None, **options):
        return tamis.entmax_attention(query, key, value, alpha=1.2, **options)


@pytest.mark.parametrize("shape", [(), (8,), (8, 1, 1), (1, 8, 1, 1), (1, 1), (2, 8, 1, 1), (2, 1, 1, 1)])
def test_alphas_of_every_shape(monkeypatch, shape):
    alpha = torch.linspace(1.05, 2.0, max(1, torch.Size(shape).numel())).view(shape)
    check_layer(monkeypatch, EntmaxAttention(8, alpha), NAPE(8))


@pytest.mark.parametrize("mechanism", [Sharper, Own])
def test_mechanisms_that_do_something_else(monkeypatch, mechanism):
    check_layer(monkeypatch, mechanism(8, 1.5), NAPE(8))


def test_a_slope_that_favours_what_is_far():
    """The first key of a page may then have a weight where the last has none."""
    query, key = torch.tensor([[[[20.0, 0.0, 0.0, 0.0]]]]), torch.zeros(1, 1, 201, 4)
    key[..., -1, 0] = 1.0  # a score of 10, and 200 x 0.05 is as much
    for slope, first in ((0.05, 192), (-0.05, 0)):
        assert first_in_reach(query, key, norms(key), 1.0, torch.tensor([slope])).tolist() == [first]


def check_layer(monkeypatch, mechanism, position):
    torch.manual_seed(0)
    layer = attention.Attention(64, 8, mechanism=mechanism, position=position).double()
    x = torch.randn(2, 400, 64, dtype=torch.float64)

    def last(far):
        monkeypatch.setattr(attention, "FAR", far)
        cache = AttentionCache()
        with torch.no_grad():
            layer(x[:, :399], is_causal=True, cache=cache)
            return layer(x[:, 399:], is_causal=True, cache=cache)

    torch.testing.assert_close(last(8), last(10**9), rtol=1e-10, atol=1e-10)


def test_norms_follow_what_is_cached():
    cache = AttentionCache()
    draw = torch.Generator().manual_seed(0)

    def check():
        torch.testing.assert_close(cache.page_norms(), norms(cache.contents()[0]))

    with torch.no_grad():
        for length in (5, 1, 58, 70, 1, 100):
            key = torch.randn(3, 2, length, 4, generator=draw)
            cache.append(key, key)
            check()
        cache.shorten(130)
        check()
        cache.reorder(torch.tensor([2, 0]))
        check()
        cache.slots = torch.tensor([[3], [7]])
        key = torch.randn(2, 2, 1, 4, generator=draw)
        cache.append(key, key)
        check()
