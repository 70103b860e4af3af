"""Null attention of sentences, and the AUC against counting pairs."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analysis.cases import batches, cases, causal_lm, random_case, rows_of, seq2seq, tokens
from tamis.analysis import Sentences, auc, capture, null_rates, null_signal

scores = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@settings(deadline=None, max_examples=50)
@given(cases)
def test_rates_equal_counting(case):
    weights, visible = random_case(case)
    batch, heads = weights.shape[:2]
    rows, nulls = torch.zeros(batch, heads), torch.zeros(batch, heads)
    for b, h, _, row in rows_of(weights, visible):
        rows[b, h] += 1
        nulls[b, h] += not any(row.values())
    torch.testing.assert_close(null_rates(weights, visible).float(), nulls / rows.clamp(min=1))


@settings(deadline=None, max_examples=100)
@given(scores, scores)
def test_auc_equals_counting_pairs(positive, negative):
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    assert auc(positive, negative) == pytest.approx(wins / (len(positive) * len(negative)))
    assert auc(positive, negative) + auc(negative, positive) == pytest.approx(1.0)


def test_auc_at_its_ends():
    assert auc([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert auc(torch.tensor([0.0]), torch.tensor([1.0, 2.0])) == 0.0
    assert auc([1.0, 1.0], [1.0]) == 0.5
    with pytest.raises(ValueError, match="0 positive and 1 negative"):
        auc([], [1.0])


def test_the_signal_of_a_model_is_that_of_its_weights():
    """From captured weights, one pair at a time, without padding or batches."""
    model = seq2seq("rela", decoder_layers=2)
    (batch,) = batches(6)
    found = null_signal(model, [batch])

    def rate(source: Tensor, target: Tensor) -> list[float]:
        with torch.no_grad(), capture(model, sites=lambda site: site.endswith("cross")) as captured:
            model(source[None], target[None])
        return [float((weights == 0.0).all(-1).double().mean()) for weights in captured.values()]

    sides = []
    for pairs in (batch, batch.with_shuffled_sources()):
        rows = [
            (pairs.source.ids[b][pairs.source.mask[b]], pairs.target.ids[b][pairs.target.mask[b]]) for b in range(6)
        ]
        sides.append(torch.tensor([rate(*row) for row in rows]))  # (pairs, layers)
    true, shuffled = sides
    assert found.pairs == 6
    assert found.overall.true == pytest.approx(float(true.mean()), abs=1e-6)
    assert found.overall.shuffled == pytest.approx(float(shuffled.mean()), abs=1e-6)
    assert found.overall.auc == pytest.approx(auc(shuffled.mean(1), true.mean(1)))
    second = found.sites["decoder.1.cross"]
    assert (second.true, second.auc) == pytest.approx((float(true[:, 1].mean()), auc(shuffled[:, 1], true[:, 1])))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_softmax_has_no_signal():
    found = null_signal(seq2seq("softmax"), batches(3))
    assert (found.pairs, found.overall.true, found.overall.shuffled, found.overall.auc) == (6, 0.0, 0.0, 0.5)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="no batch of two sentences"):
        null_signal(seq2seq("rela"), batches(1))
    with pytest.raises(ValueError, match="needs sentences with a source"):
        null_signal(causal_lm("rela"), [Sentences(target=tokens([[1, 2], [3]]))])
