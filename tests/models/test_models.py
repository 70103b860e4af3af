"""Whole models: shapes, who sees whom, padding, packing, positions."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from models.cases import CLOSE, PAD, VOCAB, causal_lm, every_mechanism, every_position, seq2seq, tokens
from tamis.mechanisms import LearnedAlpha
from tamis.models import Seq2Seq, Seq2SeqConfig
from tamis.nn import ModelCache


def test_the_base_model_has_144_learned_alphas():
    """Six encoder layers, and six decoder layers with two attentions each, of eight heads."""
    with torch.device("meta"):
        model = Seq2Seq(Seq2SeqConfig(vocab_size=100))
    alphas = [module for module in model.modules() if isinstance(module, LearnedAlpha)]
    assert len(alphas) == 18
    assert sum(parameter.numel() for module in alphas for parameter in module.parameters()) == 144
    assert len({id(module.raw) for module in alphas}) == 18


def test_the_base_model_is_the_base_model():
    with torch.device("meta"):
        model = Seq2Seq(Seq2SeqConfig(vocab_size=1000))
    attention, ffn, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    assert model.num_parameters() == 1000 * 512 + 6 * (encoder + decoder) + 2 * norm + 144


@pytest.mark.parametrize("tied", [True, False])
def test_seq2seq_shapes(tied: bool):
    model = seq2seq(tie_embeddings=tied, source_vocab_size=7)
    source, target = tokens(3, 5) % 7, tokens(3, 4)
    assert model(source, target).shape == (3, 4, VOCAB)
    assert model.encode(source).shape == (3, 5, 16)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"head_dim": 6}, {"head_dim": 6, "num_kv_heads": 1}])
@pytest.mark.parametrize("mechanism", ["rela", "asentmax"])
@pytest.mark.parametrize("position", ["rope", "nape"])
def test_head_sizes_and_groups(options: dict[str, int], mechanism: str, position: str):
    model, x = causal_lm(mechanism, position=position, **options), tokens(2, 6)
    full, cache = model(x), model.new_cache()
    assert full.shape == (2, 6, VOCAB)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, **CLOSE)


@every_mechanism
@every_position
def test_later_tokens_do_not_change_earlier_logits(mechanism: str, position: str):
    model, pair = causal_lm(mechanism, position=position), seq2seq(mechanism, position=position)
    x, source, cut = tokens(2, 8), tokens(2, 5, 1), 5
    changed = x.clone()
    changed[:, cut:] = x[:, cut:] % (VOCAB - 1) + 1
    for logits in (model, lambda y: pair(source, y)):
        before, after = logits(x), logits(changed)
        torch.testing.assert_close(after[:, :cut], before[:, :cut], atol=1e-6, rtol=1e-5)
        assert (after[:, cut:] - before[:, cut:]).abs().amax(-1).min() > 1e-4


def test_the_source_is_seen_both_ways():
    model, source, target = seq2seq("softmax"), tokens(1, 6), tokens(1, 3)
    for place in (0, 5):
        changed = source.clone()
        changed[:, place] = source[:, place] % (VOCAB - 1) + 1
        assert (model(changed, target) - model(source, target)).abs().amax(-1).min() > 1e-5


@every_mechanism
@every_position
def test_right_padding_of_the_source_changes_nothing(mechanism: str, position: str):
    model, source, target = seq2seq(mechanism, position=position), tokens(2, 5), tokens(2, 4, 1)
    padded = F.pad(source, (0, 3), value=PAD)
    torch.testing.assert_close(model(padded, target), model(source, target), **CLOSE)
    mask = torch.arange(8) < torch.full((2, 1), 5)
    filled = torch.where(mask, padded, 3)
    torch.testing.assert_close(model(filled, target, source_mask=mask), model(source, target), **CLOSE)


@every_mechanism
@every_position
def test_left_padding_of_the_prompt_changes_nothing(mechanism: str, position: str):
    model, x = causal_lm(mechanism, position=position), tokens(2, 6)
    padded = torch.stack([F.pad(x[0], (3, 0), value=5), F.pad(x[1, 2:], (5, 0), value=5)])
    mask = torch.arange(9) >= torch.tensor([[3], [5]])
    out = model(padded, mask)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[0, 3:], model(x[:1])[0], **CLOSE)
    torch.testing.assert_close(out[1, 5:], model(x[1:, 2:])[0], **CLOSE)


@every_position
@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_padded_on_either_side_continue_with_a_cache(mechanism: str, position: str, side: str):
    """A prompt of 4 and one of 6 in one batch, then five more tokens."""
    model, x = causal_lm(mechanism, position=position), tokens(2, 11)
    mask = torch.ones(2, 6, dtype=torch.bool)
    prompt = x[:, :6].clone()
    if side == "left":
        prompt[0], mask[0, :2] = torch.cat([torch.tensor([5, 5]), x[0, :4]]), False
    else:
        prompt[0, 4:], mask[0, 4:] = 5, False
    more = torch.stack([x[0, 4:9], x[1, 6:11]])
    cache = model.new_cache()
    with torch.no_grad():
        model(prompt, mask, cache=cache)
        out = torch.cat([model(part, cache=cache) for part in more.split(1, 1)], 1)
        torch.testing.assert_close(out[1], model(x[1:])[0, 6:], **CLOSE)
        torch.testing.assert_close(out[0], model(x[:1, :9])[0, 4:], **CLOSE)


@every_mechanism
@every_position
def test_packed_documents_are_separate_ones(mechanism: str, position: str):
    model, x, bounds = causal_lm(mechanism, position=position), tokens(1, 12), [0, 4, 5, 12]
    packed = model(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for start, stop in itertools.pairwise(bounds):
        torch.testing.assert_close(packed[:, start:stop], model(x[:, start:stop]), **CLOSE)


def test_packed_documents_may_be_longer_together_than_the_learned_positions():
    model, x = causal_lm(position="learned", max_length=4), tokens(1, 8)
    packed = model(x, cu_seqlens=torch.tensor([0, 4, 8]))
    torch.testing.assert_close(packed[:, 4:], model(x[:, 4:]), **CLOSE)


def test_left_padding_may_reach_beyond_the_learned_positions():
    model, x = causal_lm(position="learned", max_length=4), tokens(1, 4)
    mask = torch.arange(6)[None] >= 2
    torch.testing.assert_close(model(F.pad(x, (2, 0), value=5), mask)[:, 2:], model(x), **CLOSE)


def test_a_cache_that_outgrows_the_learned_positions_says_so():
    model, cache = causal_lm(position="learned", max_length=4), ModelCache(2)
    model(tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="learned"):
        model(tokens(1, 1), cache=cache)


@every_position
def test_explicit_positions_are_the_default_ones_when_equal(position: str):
    model, x = causal_lm(position=position), tokens(2, 6)
    assert torch.equal(model(x, positions=torch.arange(6)[None]), model(x))
    assert torch.equal(model(x, positions=torch.arange(6).expand(2, -1)), model(x))
    assert torch.equal(model(x, positions=torch.arange(6)), model(x))
    square = tokens(2, 4)  # as many tokens as heads
    assert torch.equal(model(square, positions=torch.arange(4)), model(square))
    with pytest.raises(ValueError, match="positions must be"):
        model(x, positions=torch.arange(5))


def test_embeddings_are_scaled_and_positions_added():
    model, source = seq2seq(encoder_layers=0, arrangement="post"), tokens(1, 4)
    expected = model.encoder_position.embed(model.embedding.weight[source] * 4.0, torch.arange(4)[None])
    torch.testing.assert_close(model.encode(source), expected)
