"""Histograms against counting one by one, and quantiles against sorted values."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.cases import cases, random_case, rows_of
from tamis.analysis import SIZES, density_histogram, quantiles, support_by_length, support_histogram


@settings(deadline=None, max_examples=50)
@given(cases, st.integers(1, 12))
def test_every_row_is_counted_in_its_bin(case, bins):
    weights, visible = random_case(case)
    heads = weights.shape[1]
    densities = [[0] * bins for _ in range(heads)]
    supports, sums, lengths = ([[0] * len(SIZES) for _ in range(heads)] for _ in range(3))
    for _, h, _, row in rows_of(weights, visible):
        support = sum(p > 0 for p in row.values())
        densities[h][min(bins - 1, int(Fraction(support, len(row)) * bins))] += 1
        supports[h][bisect_right(SIZES, support) - 1] += 1
        sums[h][bisect_right(SIZES, len(row)) - 1] += support
        lengths[h][bisect_right(SIZES, len(row)) - 1] += 1
    assert density_histogram(weights, visible, bins).tolist() == densities
    assert support_histogram(weights, visible).tolist() == supports
    assert [table.tolist() for table in support_by_length(weights, visible)] == [sums, lengths]


def test_the_ends_of_density():
    weights = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]])[None, None]
    assert density_histogram(weights, bins=4).tolist() == [[1, 0, 1, 1]]


def test_sizes_are_exact_up_to_sixteen_and_double_then():
    assert SIZES[:18] == (*range(17), 17)
    assert SIZES[18:21] == (33, 65, 129)
    weights = torch.ones(1, 1, 1, 40)
    weights[..., 33:] = 0.0
    assert support_histogram(weights)[0].nonzero().item() == SIZES.index(33)
    assert support_histogram(weights[..., :32])[0].nonzero().item() == SIZES.index(17)
    assert support_histogram(torch.ones(1, 1, 1, 2**20))[0].nonzero().item() == len(SIZES) - 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40), st.floats(0.0, 1.0))
def test_a_quantile_is_off_by_a_bin_at_most(values, share):
    edges = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    place = (torch.bucketize(torch.tensor(values, dtype=torch.float64), edges, right=True) - 1).clamp(0, 9)
    found = float(quantiles(torch.bincount(place, minlength=10), edges, [share]))
    # All values q such that a share of at most `share` lies below q and at least `share` does not lie above.
    ordered = sorted(values)
    # 0.8 of five values is four, although the double that is called 0.8 is a little more.
    count, rounding = Fraction(share) * len(values), Fraction(1, 10**9)
    least = ordered[max(0, math.ceil(count - rounding) - 1)]
    most = ordered[min(len(values) - 1, math.floor(count + rounding))]
    assert least - 0.1 - 1e-9 <= found <= most + 0.1 + 1e-9


def test_quantiles_of_evenly_spread_values_are_exact():
    edges = torch.tensor([0.0, 1.0, 3.0, 7.0])
    counts = torch.tensor([[10, 20, 40], [0, 5, 0], [0, 0, 0]])
    found = quantiles(counts, edges, [0.0, 0.5, 1.0])
    assert found[0].tolist() == pytest.approx([0.0, 3.5, 7.0])
    assert found[1].tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert found[2].isnan().all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        density_histogram(torch.ones(1, 1, 1), bins=0)
    with pytest.raises(ValueError, match="one more than the bins"):
        quantiles(torch.ones(3), torch.ones(3), [0.5])
    with pytest.raises(ValueError, match=r"shares must lie in \[0, 1\]"):
        quantiles(torch.ones(2), torch.arange(3), [1.5])
