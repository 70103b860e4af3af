"""Sampling: frequencies against the distribution, and draws that belong to their sentence alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.models import BOS, EOS, IDS, PAD, log_probs, rescored, sources, tiny
from tamis import functional
from tamis.decoding import DecodingConfig, sample
from tamis.decoding.sampling import draw_tokens, token_probabilities

NOTHING = torch.tensor([], dtype=torch.long)


def config(**changes: Any) -> DecodingConfig:
    return DecodingConfig(**{"method": "sample", "max_length": 8, **changes})


def probabilities(logits: torch.Tensor, forbidden: torch.Tensor = NOTHING, **changes: Any) -> torch.Tensor:
    return token_probabilities(logits, config(**changes), forbidden)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected).square() / expected)[expected > 0].sum())


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_frequencies_are_the_distribution(alpha: float):
    """First tokens of many draws: chi-square at 0.1 %."""
    model, source, count = tiny(sharpness=1.0), sources([4]), 1500
    (found,) = sample(model, source, config=config(n_best=count, max_length=1, alpha=alpha), **IDS)
    first = torch.tensor([EOS if h.finished else h.tokens[0] for h in found])
    with torch.no_grad():
        p = log_probs(model(source, torch.tensor([[BOS]])), alpha).exp()[0, 0]
    counts = torch.bincount(first, minlength=9).float()
    assert counts[p == 0.0].sum() == 0.0
    critical = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1}
    assert chi_square(counts, count * p) < critical[int((p > 0.0).sum()) - 1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([1.5, 2.0, 3.0]), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_entmax_never_draws_what_has_no_probability(seed: int, alpha: float, scale: float):
    generator = torch.Generator().manual_seed(seed)
    p = functional.entmax(torch.randn(64, 50, generator=generator) * scale, alpha)
    edges = torch.tensor([0.0, 1.0 - 2.0**-53, 0.5])
    for numbers in (torch.rand(64, generator=generator, dtype=torch.float64), *(e.expand(64).double() for e in edges)):
        tokens, logs = draw_tokens(p, numbers)
        assert (p.gather(1, tokens[:, None]) > 0.0).all()
        torch.testing.assert_close(logs, p.gather(1, tokens[:, None])[:, 0].log())


def test_draws_at_the_edges_of_the_distribution():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.9999, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, _ = draw_tokens(p.expand(5, 5), numbers)
    assert tokens.tolist() == [1, 1, 3, 3, 3]


def test_temperature_top_k_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])
    p = logits.softmax(-1)
    torch.testing.assert_close(probabilities(logits), p)
    torch.testing.assert_close(probabilities(logits, temperature=0.5), (2.0 * logits).softmax(-1))
    top = probabilities(logits, top_k=2)
    assert (top > 0.0).sum() == 2  # also where there is a tie for the last place
    assert top[0, 0] == pytest.approx(float(1.0 / (1.0 + math.exp(-1.0))))
    nucleus = probabilities(logits, top_p=0.6)
    assert (nucleus > 0.0).sum() == 2
    assert probabilities(logits, top_p=1e-6).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(probabilities(logits, top_p=1.0, top_k=99), p)
    forbidden = probabilities(logits, torch.tensor([0, 3]))
    assert forbidden[0, 0] == forbidden[0, 3] == 0.0
    torch.testing.assert_close(forbidden.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "asentmax"])
def test_scores_are_those_of_the_whole_model(mechanism: str):
    model, source = tiny(mechanism, position="nape", sharpness=1.0), sources([5, 2, 7])
    for alpha in (1.0, 1.5):
        found = sample(model, source, config=config(n_best=3, alpha=alpha, max_length=15), **IDS)
        for row, hypotheses in zip(source, found, strict=True):
            assert len(hypotheses) == 3
            for h in hypotheses:
                assert EOS not in h.tokens
                assert h.score == pytest.approx(rescored(model, row, h.tokens, h.finished, alpha), abs=1e-4)


def test_a_sentence_is_drawn_alike_alone_and_in_any_batch():
    model, source = tiny(sharpness=1.0), sources([5, 2, 7, 1])
    together = sample(model, source, config=config(n_best=2), **IDS)
    backwards = sample(model, source.flip(0), config=config(n_best=2), **IDS)[::-1]
    for row, expected, again in zip(source, together, backwards, strict=True):
        (alone,) = sample(model, row[row != PAD][None], config=config(n_best=2), **IDS)
        assert [h.tokens for h in alone] == [h.tokens for h in expected] == [h.tokens for h in again]


def test_seeds_and_draws_differ():
    model, source = tiny(sharpness=0.3), sources([5])
    first, again, other = (sample(model, source, config=config(n_best=8, seed=s), **IDS) for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({tuple(h.tokens) for h in first[0]}) > 1


def test_min_length_and_banned_tokens():
    model, source = tiny(sharpness=0.1), sources([5, 3])
    found = sample(model, source, config=config(n_best=20, min_length=4, alpha=1.5), banned_ids=[PAD, BOS], **IDS)
    for hypotheses in found:
        for h in hypotheses:
            assert len(h.tokens) + h.finished >= 4
            assert not {PAD, BOS} & set(h.tokens)


def test_no_token_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no token to draw"):
        sample(tiny(), sources([3]), config=config(), banned_ids=range(9), **IDS)


def test_no_sentences():
    assert sample(tiny(), torch.zeros(0, 2, dtype=torch.long), **IDS) == []
