"""What length-aware scales do: beta, gamma and the scale itself, against the number of keys that a query sees.

Long-Context Generalization with Sparse Attention, Vasylenko et al. 2025, https://arxiv.org/abs/2506.16640

In a causal row the number of keys is the position, counted from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.analysis.histograms import SIZES, counts_of, quantiles, size_bins
from tamis.analysis.metrics import plain
from tamis.mechanisms import Mechanism

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 400
_EDGES = {
    "beta": torch.logspace(-3.0, 3.0, BINS + 1, dtype=torch.float64),
    "gamma": torch.linspace(-2.0, 2.0, BINS + 1, dtype=torch.float64),
    "scale": torch.logspace(-3.0, 3.0, BINS + 1, dtype=torch.float64),
}
"""A bin is 3.5 % wide, that of gamma 0.01; values outside are counted in the nearest."""


@dataclass(frozen=True, kw_only=True)
class SiteScales:
    """Quantiles of what one attention layer's scale is made of."""

    delta: float
    heads: tuple[int, ...]
    """Those that are scaled, the others are not in any table."""
    quantiles: tuple[float, ...]
    """Which ones."""
    overall: dict[str, tuple[tuple[float, ...], ...]]
    """Quantiles of "beta", "gamma" and "scale": head, quantile."""
    keys: tuple[int, ...]
    """Numbers of visible keys, where bins begin; those that came."""
    by_keys: dict[str, tuple[tuple[tuple[float, ...], ...], ...]]
    """Head, number of keys, quantile."""

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))


class ScaleMetrics:
    """Adds up many batches, site by site; an `inputs` consumer for :func:`tamis.analysis.capture`.

    Sites without an adaptive scale are passed over.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, Tensor]] = {}
        self._of: dict[str, tuple[float, tuple[int, ...]]] = {}

    @torch.no_grad()
    def __call__(self, site: str, mechanism: Mechanism, hidden: Tensor, visible: Tensor) -> None:
        keys = visible.sum(-1)  # (B, 1 or H, Lq)
        if (parts := mechanism.scale_parts(hidden, keys)) is None:
            return
        keys = keys.expand(keys.shape[0], parts.scale.shape[1], keys.shape[2])
        values = {"beta": parts.beta, "gamma": parts.gamma, "scale": parts.scale}
        counts = {name: _counts(name, value.expand(keys.shape), keys).cpu() for name, value in values.items()}
        if site in self._counts:
            counts = {name: self._counts[site][name] + count for name, count in counts.items()}
        self._counts[site] = counts
        self._of[site] = (parts.delta, parts.heads)

    def results(self, shares: Sequence[float] = QUANTILES) -> dict[str, SiteScales]:
        return {site: self._site(site, tuple(shares)) for site in self._counts}

    def _site(self, site: str, shares: tuple[float, ...]) -> SiteScales:
        delta, heads = self._of[site]
        counts = {name: table[list(heads)] for name, table in self._counts[site].items()}  # (heads, sizes, bins)
        came = [place for place in range(len(SIZES)) if bool(counts["beta"][:, place].any())]
        return SiteScales(
            delta=delta,
            heads=heads,
            quantiles=shares,
            overall={name: _tuples(quantiles(table.sum(1), _EDGES[name], shares)) for name, table in counts.items()},
            keys=tuple(SIZES[place] for place in came),
            by_keys={name: _tuples(quantiles(table[:, came], _EDGES[name], shares)) for name, table in counts.items()},
        )


def _counts(name: str, values: Tensor, keys: Tensor) -> Tensor:
    """(H, sizes, bins) of values and visible keys (B, H, Lq)."""
    place = torch.bucketize(values.double().contiguous(), _EDGES[name].to(values.device), right=True) - 1
    joint = size_bins(keys) * BINS + place.clamp(0, BINS - 1)
    return counts_of(joint, keys > 0, len(SIZES) * BINS).unflatten(1, (len(SIZES), BINS))


def _tuples(values: Tensor) -> Any:
    """Nested tuples; of numbers read off a histogram no more digits than they have, and None for NaN."""

    def nested(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(nested, value))
        return None if math.isnan(value) else float(f"{value:.4g}")

    return nested(values.tolist())
