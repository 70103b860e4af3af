"""Figures about attention weights: density, exact zeros, null rows and how much heads differ.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015, for density and head diversity;
Sparse Attention with Linear Units, Zhang et al. 2021, https://arxiv.org/abs/2104.07012, for null rows.

Weights and `visible` are those of :mod:`tamis.analysis.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.analysis.rows import Rows, Sums, SumsBySite, entropy_of, over_rows, ratio
from tamis.analysis.sites import kind_of

FIGURES = ("density", "sparsity_rate", "null_share", "diversity")
"""Those that are cheap enough to be followed while training; `tamis.analysis.figures` declares all."""


def density(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the share of visible keys with a non-zero weight, per row, averaged over rows.  Softmax has 1.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(density_sums(Rows.of(weights, visible)))


def sparsity_rate(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the share of all visible weights that are exactly 0.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(zero_sums(Rows.of(weights, visible)))


def null_share(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the share of rows that see a key but have only zero weights, as ReLU attention can.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(null_sums(Rows.of(weights, visible)))


def head_diversity(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean over queries of the Jensen-Shannon divergence between heads, in [0, 1].

        JS = (H(mean_h p_h) - mean_h H(p_h)) / log n,   H Shannon's entropy, n the keys visible to the query; 0 if n = 1

    Rows are scaled to sum 1, by magnitude where weights may be negative.  Null rows are left out, so the heads of a
    query are those that attend to something; a query with fewer than two of them says nothing and does not count.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor ().
    """
    return ratio(diversity_sums(Rows.of(weights, visible)))


@dataclass(frozen=True, kw_only=True)
class SiteMetrics:
    """The figures of one attention layer, over all rows it was given."""

    rows: int
    """Queries that see a key."""
    density: tuple[float, ...]
    """Per head, as are the next two."""
    sparsity_rate: tuple[float, ...]
    null_share: tuple[float, ...]
    diversity: float
    compared: int
    """Queries with at least two heads that are not null: those over which diversity is averaged."""

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in asdict(self).items()}


class AttentionMetrics:
    """Adds up many batches, site by site; a consumer for :func:`tamis.analysis.capture`.

    Every row weighs the same whatever batch it came in: sums are kept, never means of batches.
    """

    def __init__(self) -> None:
        self._found = SumsBySite()

    def __call__(self, site: str, weights: Tensor, visible: Tensor | None = None) -> None:
        """Add the weights (..., H, Lq, Lk) of a site."""
        self.add(site, Rows.of(weights, visible))

    def add(self, site: str, rows: Rows) -> None:
        """Add up rows at hand, as for a batch."""
        sums = (density_sums, zero_sums, null_sums, diversity_sums)
        self._found.add(site, {name: add_up(rows) for name, add_up in zip(FIGURES, sums, strict=True)})

    def results(self) -> dict[str, SiteMetrics]:
        """Return the figures of each site, in the order in which sites were first seen."""
        return {site: self._site(**sums) for site, sums in self._found.items()}

    def summary(self) -> dict[str, dict[str, float]]:
        """Plain means over heads and layers, for "encoder", "decoder" and "cross" attention and for "all" of them."""
        return summarise(self.results(), FIGURES)

    def to_dict(self) -> dict[str, Any]:
        return {"summary": self.summary(), "sites": {site: x.to_dict() for site, x in self.results().items()}}

    def _site(self, density: Sums, sparsity_rate: Sums, null_share: Sums, diversity: Sums) -> SiteMetrics:
        rows = density[1]
        return SiteMetrics(
            rows=int(rows.max()) if rows.numel() else 0,
            density=tuple(ratio(density).tolist()),
            sparsity_rate=tuple(ratio(sparsity_rate).tolist()),
            null_share=tuple(ratio(null_share).tolist()),
            diversity=float(ratio(diversity)),
            compared=int(diversity[1]),
        )


def summarise(sites: Mapping[str, Any], figures: Sequence[str]) -> dict[str, dict[str, float]]:
    """Plain means of figures over heads and layers, by kind of attention and for "all".

    A figure that a site does not have, None, is left out.
    """
    kinds: dict[str, list[Any]] = {}
    for site, metrics in sites.items():
        kinds.setdefault(kind_of(site), []).append(metrics)
    kinds["all"] = list(sites.values())
    return {kind: _means(members, figures) for kind, members in kinds.items() if members}


def plain(value: Any) -> Any:
    """With lists for tuples, as JSON has them."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _means(sites: list[Any], figures: Sequence[str]) -> dict[str, float]:
    found = {}
    for figure in figures:
        values = [getattr(site, figure) for site in sites]
        flat = [x for value in values if value is not None for x in (value if isinstance(value, tuple) else (value,))]
        if flat or None not in values:
            found[figure] = _mean(flat)
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(1, len(listed))


def density_sums(rows: Rows) -> Sums:
    return over_rows(rows.support / rows.keys.clamp(min=1).double(), rows.seen)


def zero_sums(rows: Rows) -> Sums:
    keys = rows.keys.double().sum((0, 2))
    return keys - rows.support.double().sum((0, 2)), keys


def null_sums(rows: Rows) -> Sums:
    return over_rows(~rows.alive, rows.seen)


def diversity_sums(rows: Rows) -> Sums:
    """The sum of JS over queries that have two heads to compare, and how many there are; both of shape ()."""
    heads = rows.alive.sum(1)  # (B, Lq)
    mixture = rows.p.sum(1) / heads.clamp(min=1).unsqueeze(-1)
    divergence = entropy_of(mixture) - entropy_of(rows.p).sum(1) / heads.clamp(min=1)
    keys = rows.visible.any(1).sum(-1)  # (B, Lq)
    scaled = divergence / keys.clamp(min=2).double().log()
    compared = heads >= 2
    return torch.where(compared & (keys > 1), scaled, 0.0).clamp(0.0, 1.0).sum(), compared.double().sum()
