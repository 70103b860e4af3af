"""What sparsity guarantees, see docs/attention.md."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.cases import Case, randn, seeded
from tamis.attention.rules import Entmax
from tamis.functional import attention_weights, entmax_attention


def of_scores(scores: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Attention of queries (Lq) whose scores are exactly those given, (Lk): head_dim 1, query 1."""
    query = torch.ones(1, 1, 1, 1, dtype=scores.dtype)
    return entmax_attention(query, scores[None, None, :, None], values[None, None], scale=1.0, **options)[0, 0, 0]


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [1, 50, 1000])
def test_losing_keys_change_nothing(alpha: float, dtype: torch.dtype, extra: int) -> None:
    scores, values = randn(20, dtype=dtype), randn(20, 3, seed=1, dtype=dtype)
    losing = scores.max() - 1.0 / (alpha - 1.0) - randn(extra, seed=2, dtype=dtype).abs()
    longer = of_scores(
        torch.cat([scores, losing]), torch.cat([values, randn(extra, 3, seed=3, dtype=dtype)]), alpha=alpha
    )
    tolerance = 4.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(longer, of_scores(scores, values, alpha=alpha), rtol=0.0, atol=tolerance)
    diluted = of_scores(torch.cat([scores, losing]), torch.ones(20 + extra, 1, dtype=dtype).cumsum(0), alpha=1.0)
    assert diluted > of_scores(scores, torch.ones(20, 1, dtype=dtype).cumsum(0), alpha=1.0)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("k", [1, 2, 7, 16])
@pytest.mark.parametrize("n", [20, 500])
def test_plateaus_of_one_over_k(alpha: float, k: int, n: int) -> None:
    """k equal scores get exactly 1 / k each iff the others are k^-(a-1) / (a-1) below, whatever their number."""
    gap = k ** -(alpha - 1.0) / (alpha - 1.0)
    identity = torch.eye(n, dtype=torch.float64)
    scores = torch.zeros(n, dtype=torch.float64)
    for factor, plateau in ((1.0 + 1e-9, True), (0.9, False)):
        scores[k:] = -gap * factor
        weights = of_scores(scores, identity, alpha=alpha)
        assert bool((weights[k:] == 0.0).all()) is plateau
        if plateau:
            torch.testing.assert_close(weights[:k], torch.full((k,), 1.0 / k, dtype=torch.float64), rtol=0, atol=1e-15)
        else:
            assert weights[:k].sum() < 1.0 - 1e-6


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_entropy_is_bounded_by_the_support(alpha: float) -> None:
    query, key, _ = Case(queries=40, keys=200).inputs()
    weights = attention_weights(query, key, rule=Entmax(alpha))
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    support = (weights > 0.0).sum(-1).double()
    assert bool((entropy <= support.log() + 1e-12).all())
    assert support.mean() < 150


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("slope", [0.0625, 0.3, 1.0])
def test_alibi_horizon(alpha: float, slope: float) -> None:
    """Zero from distance R = (z_max - z_min + 1 / (a - 1)) / m on; with two keys the last non-zero is ceil(R) - 1."""
    n, low, high = 400, -0.4, 1.1
    radius = (high - low + 1.0 / (alpha - 1.0)) / slope
    slopes = torch.tensor([slope], dtype=torch.float64)
    identity = torch.eye(n, dtype=torch.float64)
    scores = low + (high - low) * torch.rand(n, generator=seeded(), dtype=torch.float64)
    options = {"alpha": alpha, "alibi_slopes": slopes, "is_causal": True}
    weights = of_scores(scores, identity, **options)
    spread = float(scores.max() - scores.min())
    beyond = torch.arange(n).flip(0) >= (spread + 1.0 / (alpha - 1.0)) / slope
    assert bool(beyond.any())
    assert bool((weights[beyond] == 0.0).all())
    for distance in range(1, n):
        pair = torch.zeros(n, dtype=torch.bool)
        pair[[n - 1, n - 1 - distance]] = True
        scores = torch.where(torch.arange(n) == n - 1, low, torch.full((n,), high, dtype=torch.float64))
        if abs(distance - radius) > 1e-9 and abs(distance - radius) < 3:
            far = of_scores(scores, identity, **options, attn_mask=pair)[n - 1 - distance]
            assert bool(far > 0.0) is (distance <= math.ceil(radius) - 1)
