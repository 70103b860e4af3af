"""Histograms with bins fixed in advance, so that those of many batches add up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.analysis.rows import Rows

DENSITY_BINS = 20
SIZES = (*range(17), *(2**power + 1 for power in range(4, 20)))
"""Where the bins of sizes begin: 0 to 16 one by one, then 17 to 32, 33 to 64 and so on; the last has no end."""


def density_histogram(weights: Tensor, visible: Tensor | None = None, bins: int = DENSITY_BINS) -> Tensor:
    """Count the rows with a density in [k / bins, (k + 1) / bins); the last bin has 1 too.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.
        bins: how many.

    Returns:
        a tensor (H, bins).
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    return density_counts(Rows.of(weights, visible), bins)


def support_histogram(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Count the rows that have a support of each size.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H, len(SIZES)).
    """
    return support_counts(Rows.of(weights, visible))


def support_by_length(weights: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum the support sizes of rows that see so many keys, and count such rows.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        two tensors (H, len(SIZES)).
    """
    return support_length_sums(Rows.of(weights, visible))


def quantiles(counts: Tensor, edges: Tensor, shares: Sequence[float]) -> Tensor:
    """Return quantiles of what was counted in bins; NaN where nothing was.

    Values are taken to be spread evenly within a bin, so a quantile is off by the width of its bin at most.

    Args:
        counts: (..., bins).
        edges: (bins + 1,).
        shares: which quantiles, from 0 to 1.

    Returns:
        values (..., shares).
    """
    if edges.ndim != 1 or counts.shape[-1] != len(edges) - 1:
        got = f"{counts.shape[-1]} bins and {tuple(edges.shape)}"
        raise ValueError(f"edges must be one more than the bins of counts, got {got}")
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError(f"shares must lie in [0, 1], got {list(shares)}")
    counts, edges = counts.double(), edges.to(counts.device, torch.float64)
    total = counts.sum(-1, keepdim=True)
    goal = total * torch.tensor(list(shares), dtype=torch.float64, device=counts.device)
    reached = counts.cumsum(-1)
    # The first bin that reaches the goal and is not empty: a goal of 0 is the lower edge of the first filled bin.
    place = torch.searchsorted(reached, goal.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=len(edges) - 2)
    inside = counts.gather(-1, place)
    before = reached.gather(-1, place) - inside
    share = ((goal - before) / inside.clamp(min=1.0)).clamp(0.0, 1.0)
    value = edges[place] + share * (edges[place + 1] - edges[place])
    return torch.where(total > 0.0, value, torch.nan)


def size_bins(values: Tensor) -> Tensor:
    """The place of each size among `SIZES`."""
    return torch.bucketize(values.contiguous(), torch.tensor(SIZES, device=values.device), right=True) - 1


def density_counts(rows: Rows, bins: int = DENSITY_BINS) -> Tensor:
    place = rows.support * bins // rows.keys.clamp(min=1)  # exact: no fraction is ever rounded
    return counts_of(place.clamp(max=bins - 1), rows.seen, bins)


def support_counts(rows: Rows) -> Tensor:
    return counts_of(size_bins(rows.support), rows.seen, len(SIZES))


def support_length_sums(rows: Rows) -> tuple[Tensor, Tensor]:
    place = size_bins(rows.keys)
    sums = counts_of(place, rows.seen, len(SIZES), rows.support)
    return sums, counts_of(place, rows.seen, len(SIZES))


def counts_of(place: Tensor, counted: Tensor, bins: int, values: Tensor | None = None) -> Tensor:
    """(H, bins): how often, or with what sum of values, each bin (B, H, Lq) comes among the rows that count."""
    heads = place.shape[1]
    flat = (place + bins * torch.arange(heads, device=place.device)[:, None])[counted]
    weights = torch.ones_like(flat) if values is None else values[counted]
    found = torch.zeros(heads * bins, dtype=torch.long, device=place.device)
    return found.index_add_(0, flat, weights.long()).view(heads, bins)
