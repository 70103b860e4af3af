"""What single heads do: how much they spread, and whether they look at a fixed place.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015, for positional heads.

Rows are scaled to sum 1.  A null row has no weight anywhere: it counts as 0 in a share of weight, and not at all in an
entropy.  Rows that see a single key have no choice and are left out where they would all look alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.analysis.rows import Rows, Sums, entropy_of, over_rows, ratio

OFFSETS = (-3, -2, -1, 0, 1, 2, 3)
ONE_HOT = 0.95


def support_size(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean number of keys with a non-zero weight; a null row has 0.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(support_sums(Rows.of(weights, visible)))


def entropy(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean entropy of rows in nats; null rows do not count.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(entropy_sums(Rows.of(weights, visible)))


def normalised_entropy(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean of H / log n, n the visible keys: 0 is one-hot, 1 uniform; rows with n = 1 do not count.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(normalised_entropy_sums(Rows.of(weights, visible)))


def first_token_mass(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean weight on the first key that the query sees, an attention sink if large; where n > 1.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(first_token_sums(Rows.of(weights, visible)))


def one_hot_share(weights: Tensor, visible: Tensor | None = None, threshold: float = ONE_HOT) -> Tensor:
    """Return the share of rows with a weight above the threshold, among those where n > 1.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.
        threshold: from which weight on a row is one-hot.

    Returns:
        a tensor (H,).
    """
    if not 0.5 <= threshold < 1.0:
        raise ValueError(f"threshold must lie in [0.5, 1), got {threshold}")
    return ratio(one_hot_sums(Rows.of(weights, visible), threshold))


def positional_confidence(weights: Tensor, visible: Tensor | None = None, offsets: Sequence[int] = OFFSETS) -> Tensor:
    """Return the mean of p[i, i + o] over the rows i for which key i + o exists and is visible.

    NaN where no row sees that key, as for keys after a causal query.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.
        offsets: of a key from its query.

    Returns:
        a tensor (H, offsets).
    """
    total, count = confidence_sums(Rows.of(weights, visible), offsets)
    return total / count


def support_sums(rows: Rows) -> Sums:
    return over_rows(rows.support, rows.seen)


def entropy_sums(rows: Rows) -> Sums:
    return over_rows(entropy_of(rows.p), rows.alive)


def normalised_entropy_sums(rows: Rows) -> Sums:
    return over_rows(entropy_of(rows.p) / rows.keys.clamp(min=2).double().log(), rows.alive & rows.choosing)


def first_token_sums(rows: Rows) -> Sums:
    first = rows.visible & (rows.visible.cumsum(-1) == 1)
    return over_rows((rows.p * first).sum(-1), rows.choosing)


def one_hot_sums(rows: Rows, threshold: float = ONE_HOT) -> Sums:
    return over_rows((rows.p > threshold).any(-1), rows.choosing)


def confidence_sums(rows: Rows, offsets: Sequence[int] = OFFSETS) -> Sums:
    """(H, offsets)"""
    found = [over_rows(rows.p.diagonal(offset, -2, -1), rows.visible.diagonal(offset, -2, -1)) for offset in offsets]
    return torch.stack([total for total, _ in found], -1), torch.stack([count for _, count in found], -1)
