"""What single heads do, against loops over rows in Python floats, closed forms and examples worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.cases import cases, mean_by_head, random_case, rows_of, sparse_weights
from tamis.analysis import (
    OFFSETS,
    entropy,
    first_token_mass,
    normalised_entropy,
    one_hot_share,
    positional_confidence,
    support_size,
)
from tamis.mechanisms import MECHANISMS, build_mechanism

FIGURES = (support_size, entropy, normalised_entropy, first_token_mass, one_hot_share, positional_confidence)


def shannon(row: dict[int, float]) -> float:
    return -sum(p * math.log(p) for p in row.values() if p > 0)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_figures_equal_the_formulas(case):
    weights, visible = random_case(case)
    heads, rows = weights.shape[1], rows_of(weights, visible)
    alive = [(h, row) for _, h, _, row in rows if sum(row.values()) > 0]
    choosing = [(h, row) for _, h, _, row in rows if len(row) > 1]
    expected = {
        support_size: [(h, sum(p > 0 for p in row.values())) for _, h, _, row in rows],
        entropy: [(h, shannon(row)) for h, row in alive],
        normalised_entropy: [(h, shannon(row) / math.log(len(row))) for h, row in alive if len(row) > 1],
        first_token_mass: [(h, row[min(row)]) for h, row in choosing],
        one_hot_share: [(h, float(max(row.values()) > 0.95)) for h, row in choosing],
    }
    for figure, values in expected.items():
        found = figure(weights, visible).tolist()
        assert found == pytest.approx(mean_by_head(heads, values), abs=1e-12), figure.__name__
    confidence = positional_confidence(weights, visible)
    for column, offset in enumerate(OFFSETS):
        values = [(h, row[q + offset]) for _, h, q, row in rows if q + offset in row]
        counted = {h for h, _ in values}
        expected = [x if h in counted else math.nan for h, x in enumerate(mean_by_head(heads, values))]
        assert confidence[:, column].tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(deadline=None, max_examples=30)
@given(cases, st.floats(0.01, 100.0))
def test_rows_are_scaled_first(case, factor):
    weights, visible = random_case(case)
    for figure in FIGURES:
        found, expected = figure(weights * factor, visible), figure(weights, visible)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_head_that_looks_at_one_offset_is_certain_of_it(offset):
    weights = torch.zeros(2, 1, 9, 9)
    for i in range(9):
        weights[:, 0, i, min(max(i + offset, 0), 8)] = 1.0
    found = positional_confidence(weights)[0].tolist()
    assert found[OFFSETS.index(offset)] == 1.0
    # At the ends it falls back to the outermost key: that is all it has for other offsets.
    assert all(value <= 3 / 6 for place, value in enumerate(found) if OFFSETS[place] != offset)


def test_confidence_by_hand():
    """Keys 0..2, causal: row 1 gives 0.25 to itself, row 2 gives 0.5 to the one before."""
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.0, 0.5, 0.5]])[None, None]
    visible = torch.ones(3, 3).tril().bool()
    expected = {-2: 0.0, -1: (0.75 + 0.5) / 2, 0: (1.0 + 0.25 + 0.5) / 3}
    found = dict(zip(OFFSETS, positional_confidence(weights, visible)[0].tolist(), strict=True))
    assert {offset: found[offset] for offset in expected} == pytest.approx(expected)
    assert all(math.isnan(found[offset]) for offset in (-3, 1, 2, 3)), "no row sees these keys"


def test_a_null_row_has_no_weight_but_no_entropy_either():
    weights = torch.tensor([[0.0, 0.0], [1.0, 1.0]])[None, None]
    assert float(support_size(weights)) == 1.0
    assert float(entropy(weights)) == pytest.approx(math.log(2))
    assert float(normalised_entropy(weights)) == 1.0
    assert float(first_token_mass(weights)) == 0.25
    assert positional_confidence(weights, offsets=[0]).tolist() == [[0.25]]


def test_a_row_with_one_key_has_no_choice():
    weights = torch.ones(1, 2, 1, 1)
    assert support_size(weights).tolist() == [1.0, 1.0]
    for figure in (normalised_entropy, first_token_mass, one_hot_share):
        assert figure(weights).tolist() == [0.0, 0.0]


def test_the_first_token_is_the_first_that_is_seen():
    """Left padding hides key 0."""
    weights = torch.tensor([9.0, 0.75, 0.25]).expand(1, 1, 2, 3)
    assert float(first_token_mass(weights, torch.tensor([False, True, True]))) == 0.75


def test_uniform_and_one_hot_are_the_ends():
    uniform, one_hot = torch.full((1, 1, 4, 8), 0.3), torch.eye(8)[None, None]
    assert float(entropy(uniform)) == pytest.approx(math.log(8))
    assert float(normalised_entropy(uniform)) == pytest.approx(1.0)
    assert float(normalised_entropy(one_hot)) == 0.0
    assert float(one_hot_share(one_hot)) == 1.0
    assert float(one_hot_share(uniform)) == 0.0


def test_near_one_hot_is_above_the_threshold():
    weights = torch.tensor([[0.96, 0.04], [0.94, 0.06]], dtype=torch.float64)[None, None]
    assert float(one_hot_share(weights)) == 0.5
    assert float(one_hot_share(weights, threshold=0.9)) == 1.0
    with pytest.raises(ValueError, match=r"\[0.5, 1\), got 0.2"):
        one_hot_share(weights, threshold=0.2)


def test_support_and_entropy_agree_with_attention_statistics():
    """Another implementation of the same figures, for every mechanism, causal."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    visible = torch.ones(5, 5).tril().bool()
    for name in MECHANISMS:
        mechanism = build_mechanism(name, 32, 4)
        hidden = torch.randn(2, 5, 32)
        with torch.no_grad():
            weights = mechanism.weights(query, key, hidden=hidden, is_causal=True)
            statistics = mechanism.statistics(query, key, hidden=hidden, is_causal=True)
        torch.testing.assert_close(support_size(weights, visible).float(), statistics.support_size)
        torch.testing.assert_close(entropy(weights, visible).float(), statistics.entropy, atol=1e-5, rtol=1e-4)


def test_nothing_to_count_is_zero():
    """But for a distance at which there is no key: that is no number."""
    nothing = [(torch.zeros(shape), None) for shape in ((0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0))]
    nothing.append((sparse_weights(0, (1, 2, 3, 4), 0.1), torch.zeros(3, 4).bool()))
    for weights, visible in nothing:
        for figure in FIGURES:
            assert not figure(weights, visible).nan_to_num().any()
        assert positional_confidence(weights, visible).isnan().all()
