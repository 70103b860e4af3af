"""Hypotheses that share a cache: what each is told is what it would be told alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tamis
from decoding.models import BOS, sources, tiny
from tamis.decoding.state import DecodingState, best_tokens
from tamis.nn.modes import evaluating
from tamis.positions import POSITIONS


def alone(model, source: Tensor, tokens: list[int]) -> Tensor:
    """The logits after these tokens, by the whole model."""
    with torch.no_grad():
        return model(source[source != 0][None], torch.tensor([tokens]))[0, -1]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "asentmax", "ssmax"])
def test_any_tree_of_hypotheses(mechanism: str, position: str):
    """Random parents, widths and tokens, and sentences that leave."""
    model, source = tiny(mechanism, position=position), sources([4, 2, 6])
    generator = torch.Generator().manual_seed(0)
    with evaluating(model):
        state = DecodingState(model, source)
        pasts = [[[BOS]] for _ in range(3)]
        for step in range(14):
            tokens = torch.tensor([[past[-1] for past in own] for own in pasts])
            logits = state.step(tokens)
            for row, own, found in zip(source, pasts, logits, strict=True):
                for past, scores in zip(own, found, strict=True):
                    torch.testing.assert_close(scores, alone(model, row, past), atol=2e-5, rtol=1e-4)
            width = (1, 4, 3, 4, 2, 4)[step % 6]
            parents = torch.randint(0, len(pasts[0]), (len(pasts), width), generator=generator)
            new = torch.randint(3, 9, (len(pasts), width), generator=generator).tolist()
            pasts = [
                [[*own[p], t] for p, t in zip(chosen, fresh, strict=True)]
                for own, chosen, fresh in zip(pasts, parents.tolist(), new, strict=True)
            ]
            state.choose(parents)
            if step == 8:
                state.keep(torch.tensor([2, 0]))
                source, pasts = source[[2, 0]], [pasts[2], pasts[0]]
        # Places were used again: the cache has not grown with every token written.
        assert state.cache.length < sum((1, 4, 3, 4, 2, 4)[step % 6] for step in range(13))


def test_one_hypothesis_needs_no_mask():
    model, source = tiny(), sources([4, 2])
    with evaluating(model):
        state = DecodingState(model, source)
        for _ in range(3):
            state.step(torch.full((2, 1), 3))
            state.choose(torch.zeros(2, 1, dtype=torch.long))
        assert state.seen is None


def test_visible_needs_positions_and_no_padding():
    model, source = tiny(), sources([4])
    visible = torch.ones(1, 2, 2, dtype=torch.bool)
    memory, target = model.encode(source), torch.full((1, 2), 3)
    with pytest.raises(ValueError, match="positions"):
        model.decode(target, memory, visible=visible)
    with pytest.raises(ValueError, match="target_mask"):
        model.decode(target, memory, target_mask=target > 0, positions=torch.zeros(1, 2), visible=visible)


def test_visible_may_be_what_is_causal():
    model, source = tiny(position="rope"), sources([4])
    target, memory = torch.tensor([[1, 5, 4, 7]]), model.encode(source)
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    with torch.no_grad():
        out = model.decode(target, memory, positions=torch.arange(4)[None], visible=visible)
        torch.testing.assert_close(out, model.decode(target, memory))


def test_a_cache_is_not_overwritten_where_gradients_are():
    with pytest.raises(RuntimeError, match="gradients"):
        tiny().new_cache().overwrite(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize("size", [3, 100, 1283, 8000])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_best_tokens_are_those_of_the_whole_distribution(size, alpha):
    generator = torch.Generator().manual_seed(size)
    logits = 3.0 * torch.randn(4, 2, size, generator=generator)
    forbidden = torch.tensor([0, int(logits[0, 0].argmax())])
    probabilities = (logits.double().softmax(-1) if alpha == 1.0 else tamis.entmax15(logits.double())).log()
    oracle = probabilities.index_fill(-1, forbidden, -torch.inf).sort(dim=-1, descending=True)
    top, tokens = best_tokens(logits.clone(), alpha, 5, forbidden)
    torch.testing.assert_close(top.double(), oracle.values[..., :5], atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens[top > -torch.inf], oracle.indices[..., :5][top > -torch.inf])


def test_best_tokens_of_a_spoilt_row_are_not_numbers():
    logits = torch.zeros(1, 2, 8000)
    logits[0, 1, 4321] = torch.nan
    top, _ = best_tokens(logits, 1.0, 5, torch.tensor([0]))
    assert top[0, 0].isfinite().all()
    assert top[0, 1].isnan().all()
