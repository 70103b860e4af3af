"""Steps with a cache are the full forward; caches that do not fit are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.cases import CLOSE, PAD, causal_lm, every_arrangement, every_mechanism, every_position, seq2seq, tokens
from tamis.nn import ModelCache


@every_mechanism
@every_position
@every_arrangement
def test_steps_of_the_language_model_are_the_full_forward(mechanism: str, position: str, arrangement: str):
    model, x = causal_lm(mechanism, position=position, arrangement=arrangement), tokens(2, 6)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split([3, 1, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x), **CLOSE)
    assert cache.length == 6


@every_mechanism
@every_position
@every_arrangement
def test_steps_of_the_decoder_are_the_full_forward(mechanism: str, position: str, arrangement: str):
    model = seq2seq(mechanism, position=position, arrangement=arrangement, encoder_layers=1)
    source, target = tokens(2, 5), tokens(2, 5, 1)
    source[1, 3:] = PAD
    mask, cache = source != PAD, model.new_cache()
    with torch.no_grad():
        memory = model.encode(source)
        parts = [model.decode(part, memory, mask, cache) for part in target.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(source, target), **CLOSE)


@pytest.mark.parametrize("index", [[1, 0, 2], [0, 0, 0], [2], [0, 0, 1, 1, 2, 2]])
def test_reordered_beams_of_a_model(index: list[int]):
    model, order = seq2seq(position="rope"), torch.tensor(index)
    source, target, more = tokens(3, 5), tokens(3, 3, 1), tokens(len(index), 2, 2)
    source[1, 3:] = PAD
    mask, cache = source != PAD, model.new_cache()
    with torch.no_grad():
        memory = model.encode(source)
        model.decode(target, memory, mask, cache)
        cache.reorder(order)
        out = model.decode(more, memory[order], mask[order], cache)
        full = model(source[order], torch.cat([target[order], more], 1))
    torch.testing.assert_close(out, full[:, 3:], **CLOSE)


def test_reordered_beams_with_left_padding():
    model, order, x = causal_lm(), torch.tensor([1, 1, 0]), tokens(2, 5)
    mask, more, cache = torch.arange(5) >= torch.tensor([[2], [0]]), tokens(3, 2, 1), ModelCache(2)
    with torch.no_grad():
        model(x, mask, cache=cache)
        cache.reorder(order)
        out = model(more, cache=cache)
        whole = torch.cat([mask[order], torch.ones(3, 2, dtype=torch.bool)], 1)
        full = model(torch.cat([x[order], more], 1), whole)
    torch.testing.assert_close(out, full[:, 5:], **CLOSE)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_depth_is_refused(layers: int):
    with pytest.raises(ValueError, match=r"cache|layers"):
        causal_lm()(tokens(1, 2), cache=ModelCache(layers))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("foreign", ["width", "batch", "dtype"])
@pytest.mark.parametrize("new_mask", [True, False])
def test_a_cache_that_does_not_fit_is_refused_and_left_whole(padded: bool, foreign: str, new_mask: bool):
    """Its owner goes on with it as if nothing had happened."""
    owner, x, cache = causal_lm(embed_dim=32), tokens(2, 6), ModelCache(2)
    mask = torch.arange(3) >= torch.tensor([[0], [2]]) if padded else None
    other = {"width": causal_lm(), "batch": owner, "dtype": causal_lm(embed_dim=32).double()}[foreign]
    batch = 3 if foreign == "batch" else 2
    with torch.no_grad():
        owner(x[:, :3], mask, cache=cache)
        with pytest.raises(ValueError, match="another model"):
            other(tokens(batch, 1), torch.ones(batch, 1, dtype=torch.bool) if new_mask else None, cache=cache)
        assert cache.length == 3
        assert cache.mask is mask or torch.equal(cache.mask, mask)
        whole = None if mask is None else F.pad(mask, (0, 3), value=True)
        torch.testing.assert_close(owner(x[:, 3:], cache=cache), owner(x, whole)[:, 3:], **CLOSE)


def test_a_decoder_refuses_the_cache_of_another_and_leaves_it_whole():
    owner, other, cache = seq2seq(embed_dim=32), seq2seq(), ModelCache(2)
    source, target = tokens(2, 5), tokens(2, 4, 1)
    mask = torch.ones(2, 2, dtype=torch.bool)
    with torch.no_grad():
        memory = owner.encode(source)
        owner.decode(target[:, :2], memory, cache=cache)
        with pytest.raises(ValueError, match="another model"):
            other.decode(target[:, 2:], other.encode(source), cache=cache, target_mask=mask)
        assert cache.mask is None
        out = owner.decode(target[:, 2:], memory, cache=cache)
        torch.testing.assert_close(out, owner(source, target)[:, 2:], **CLOSE)


@pytest.mark.parametrize("shape", [(2, 3), (1, 2), (2,)])
def test_a_mask_that_does_not_cover_the_new_tokens_is_refused(shape: tuple[int, ...]):
    model, cache = causal_lm(), ModelCache(2)
    model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match=r"mask must be boolean and cover the new tokens, \(2, 2\)"):
        model(tokens(2, 2), torch.ones(shape, dtype=torch.bool), cache=cache)


def test_cached_steps_of_a_model_can_be_differentiated():
    model, x, cache = causal_lm(), tokens(2, 5), ModelCache(2)
    out = torch.cat([model(part, cache=cache) for part in x.split([2, 1, 2], 1)], 1)
    learned = list(model.parameters())
    gradients = torch.autograd.grad(out.square().sum(), learned)
    expected = torch.autograd.grad(model(x).square().sum(), learned)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
