"""Subword-merging and interrogation scores against loops over words, and examples worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analysis.cases import mean_by_head, rows_of, sparse_weights
from tamis.analysis import interrogation, split_word_merging, subword_merging

square = st.tuples(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.sampled_from([1.0, 0.6, 0.2])
)


def draw(case: tuple[int, int, int, int, float]) -> tuple[Tensor, Tensor, torch.Generator]:
    seed, batch, heads, length, visible_share = case
    generator = torch.Generator().manual_seed(seed + 1)
    weights = sparse_weights(seed, (batch, heads, length, length), 0.4, 0.2)
    return weights, torch.rand(weights.shape, generator=generator) < visible_share, generator


@settings(deadline=None, max_examples=60)
@given(square)
def test_merging_equals_the_formula(case):
    weights, visible, generator = draw(case)
    batch, heads, length, _ = weights.shape
    words = torch.randint(-1, 3, (batch, length), generator=generator)
    rows = {(b, h, q): row for b, h, q, row in rows_of(weights, visible)}
    values, of_split_words = [], []
    for b in range(batch):
        for word in set(words[b].tolist()) - {-1}:
            cluster = [i for i in range(length) if words[b, i] == word]
            for h in range(heads):
                scores = []
                for i in cluster:
                    if (row := rows.get((b, h, i))) is not None:
                        scores.append(sum(row.get(j, 0.0) for j in cluster if j != i or len(cluster) == 1))
                if scores:
                    values.append((h, max(scores)))
                    of_split_words += values[-1:] if len(cluster) > 1 else []
    for figure, expected in ((subword_merging, values), (split_word_merging, of_split_words)):
        found = figure(weights, words, visible).tolist()
        assert found == pytest.approx(mean_by_head(heads, expected), abs=1e-12), figure.__name__


@settings(deadline=None, max_examples=60)
@given(square)
def test_interrogation_equals_the_formula(case):
    weights, visible, generator = draw(case)
    batch, heads, length, _ = weights.shape
    asking, marks = (torch.rand(batch, length, generator=generator) < share for share in (0.6, 0.5))
    values = []
    for b, h, q, row in rows_of(weights, visible):
        seen = [k for k in row if marks[b, k]]
        if asking[b, q] and seen:
            values.append((h, sum(row[k] for k in seen)))
    found = interrogation(weights, asking, marks, visible).tolist()
    assert found == pytest.approx(mean_by_head(heads, values), abs=1e-12)


def test_merging_by_hand():
    """Words: tokens 0 and 1, token 2.  Token 4 is padding, and so in no word."""
    weights = torch.tensor(
        [
            [0.4, 0.6, 0.0, 0.0, 0.0],  # 0.6 goes to the other half of the word
            [0.7, 0.2, 0.1, 0.0, 0.0],  # 0.7 does: the better of the two
            [0.0, 0.1, 0.9, 0.0, 0.0],  # a word of one token: what stays with itself
            [0.0, 0.0, 0.0, 1.0, 0.0],  # the end of the sentence
            [0.0, 0.0, 0.0, 0.0, 1.0],
        ]
    )[None, None]
    words = torch.tensor([[0, 0, 1, -1, -1]])
    assert float(subword_merging(weights, words)) == pytest.approx((0.7 + 0.9) / 2)
    causal = torch.ones(5, 5).tril().bool()
    # Token 1 no longer sees token 2, and what is left of its weights, 0.9, is scaled to sum 1.
    assert float(subword_merging(weights, words, causal)) == pytest.approx((0.7 / 0.9 + 0.9) / 2)


def test_a_head_that_moves_to_the_next_subword_merges():
    """Two words of three tokens: the first two tokens look one to the right."""
    weights = torch.eye(6).roll(1, 1)[None, None]
    assert float(subword_merging(weights, torch.tensor([[0, 0, 0, 1, 1, 1]]))) == 1.0
    assert float(subword_merging(weights, torch.arange(6)[None])) == 0.0
    assert float(subword_merging(weights, torch.full((1, 6), -1))) == 0.0


def test_a_head_that_looks_at_itself_merges_nothing():
    """The paper's score takes it for merging where words are single subwords; the one over split words does not."""
    weights = torch.eye(6)[None, None]
    mostly_single = torch.tensor([[0, 1, 2, 3, 4, 4]])
    assert float(subword_merging(weights, mostly_single)) == pytest.approx(4 / 5)
    assert float(split_word_merging(weights, mostly_single)) == 0.0


def test_words_of_different_sentences_are_not_one():
    weights = torch.eye(2).roll(1, 1).expand(2, 1, 2, 2)
    assert float(subword_merging(weights, torch.tensor([[0, 0], [0, 1]]))) == pytest.approx((1.0 + 0.0 + 0.0) / 3)


def test_interrogation_by_hand():
    """ "who is it ?" asks, "it is he ." does not, and a causal "who" cannot see the mark yet."""
    weights = torch.full((2, 1, 4, 4), 0.25)
    weights[0, 0, 0] = torch.tensor([0.1, 0.1, 0.2, 0.6])
    asking = torch.tensor([[True, False, False, False], [False] * 4])
    marks = torch.tensor([[False, False, False, True], [False] * 4])
    assert float(interrogation(weights, asking, marks)) == pytest.approx(0.6)
    assert float(interrogation(weights, asking, marks, torch.ones(4, 4).tril().bool())) == 0.0


def test_cross_attention_has_questions_of_another_length():
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])[None, None]
    found = interrogation(weights, torch.tensor([[True, False, True]]), torch.tensor([[False, True]]))
    assert float(found) == pytest.approx((0.75 + 0.5) / 2)


def test_what_does_not_fit_is_refused():
    weights = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"self-attention.*\(1, 3\) for weights \(1, 2, 3, 4\)"):
        subword_merging(weights, torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match=r"question must be boolean of shape \(1, 4\), got torch.bool \(1, 3\)"):
        interrogation(weights, torch.zeros(1, 3).bool(), torch.zeros(1, 3).bool())
    with pytest.raises(ValueError, match="interrogative must be boolean"):
        interrogation(weights, torch.zeros(1, 3), torch.zeros(1, 4).bool())
