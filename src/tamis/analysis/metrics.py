"""Figures about attention weights: density, exact zeros, null rows and how much heads differ.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015, for density and head diversity;
Sparse Attention with Linear Units, Zhang et al. 2021, https://arxiv.org/abs/2104.07012, for null rows.

Weights are (..., H, Lq, Lk), those before dropout.  `visible` is boolean and broadcastable to them: True where the
query may see the key.  A query that sees no key, such as padding, does not count anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


def density(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """(H,): the share of visible keys with a non-zero weight, per row, averaged over rows.  Softmax has 1."""
    sums = _head_sums(*_checked(weights, visible))
    return _ratio(sums[1], sums[0])


def sparsity_rate(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """(H,): the share of all visible weights that are exactly 0."""
    sums = _head_sums(*_checked(weights, visible))
    return _ratio(sums[3] - sums[2], sums[3])


def null_share(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """(H,): the share of rows that see a key but have only zero weights, as ReLU attention can."""
    sums = _head_sums(*_checked(weights, visible))
    return _ratio(sums[4], sums[0])


def head_diversity(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """The mean over queries of the Jensen-Shannon divergence between heads, in [0, 1], as a tensor of shape ().

        JS = (H(mean_h p_h) - mean_h H(p_h)) / log n,   H Shannon's entropy, n the keys visible to the query; 0 if n = 1

    Rows are scaled to sum 1, by magnitude where weights may be negative.  Null rows are left out, so the heads of a
    query are those that attend to something; a query with fewer than two of them says nothing and does not count.
    """
    total, count = _diversity_sums(*_checked(weights, visible))
    return _ratio(total, count)


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
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class AttentionMetrics:
    """Adds up many batches, site by site; a consumer for :func:`tamis.analysis.capture`.

    Every row weighs the same whatever batch it came in: sums are kept, never means of batches.
    """

    def __init__(self) -> None:
        self._heads: dict[str, Tensor] = {}
        self._diversity: dict[str, Tensor] = {}

    def __call__(self, site: str, weights: Tensor, visible: Tensor | None = None) -> None:
        """Add the weights (..., H, Lq, Lk) of a site."""
        weights, visible = _checked(weights, visible)
        heads = _head_sums(weights, visible).cpu()
        diversity = torch.stack(_diversity_sums(weights, visible)).cpu()
        if site not in self._heads:
            self._heads[site], self._diversity[site] = heads, diversity
            return
        if heads.shape != self._heads[site].shape:
            raise ValueError(f"{site} had {self._heads[site].shape[1]} heads so far, now {heads.shape[1]}")
        self._heads[site] += heads
        self._diversity[site] += diversity

    def results(self) -> dict[str, SiteMetrics]:
        """The figures of each site, in the order in which sites were first seen."""
        return {site: self._site(site) for site in self._heads}

    def summary(self) -> dict[str, dict[str, float]]:
        """Plain means over heads and layers, for "encoder", "decoder" and "cross" attention and for "all" of them."""
        results = self.results()
        kinds: dict[str, list[SiteMetrics]] = {}
        for site, metrics in results.items():
            kinds.setdefault(_kind(site), []).append(metrics)
        kinds["all"] = list(results.values())
        return {kind: _means(sites) for kind, sites in kinds.items() if sites}

    def to_dict(self) -> dict[str, Any]:
        return {"summary": self.summary(), "sites": {site: x.to_dict() for site, x in self.results().items()}}

    def _site(self, site: str) -> SiteMetrics:
        sums, diversity = self._heads[site], self._diversity[site]
        return SiteMetrics(
            rows=int(sums[0].max()) if sums.shape[1] else 0,
            density=tuple(_ratio(sums[1], sums[0]).tolist()),
            sparsity_rate=tuple(_ratio(sums[3] - sums[2], sums[3]).tolist()),
            null_share=tuple(_ratio(sums[4], sums[0]).tolist()),
            diversity=float(_ratio(diversity[0], diversity[1])),
            compared=int(diversity[1]),
        )


def _kind(site: str) -> str:
    """Of a site: cross, encoder, or decoder, which is also what a decoder-only model has."""
    if site.endswith("cross"):
        return "cross"
    return "encoder" if site.startswith("encoder") else "decoder"


def _means(sites: list[SiteMetrics]) -> dict[str, float]:
    return {
        "density": _mean(value for site in sites for value in site.density),
        "sparsity_rate": _mean(value for site in sites for value in site.sparsity_rate),
        "null_share": _mean(value for site in sites for value in site.null_share),
        "diversity": _mean(site.diversity for site in sites),
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(1, len(listed))


def _checked(weights: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as (B, H, Lq, Lk), the mask possibly broadcast."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a floating-point tensor, got {kind}")
    if weights.ndim < 3:
        raise ValueError(f"weights must be (..., heads, queries, keys), got shape {tuple(weights.shape)}")
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=weights.device)
    elif not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"visible must be a boolean tensor, True where a query sees a key, got {kind}")
    try:
        visible = visible.expand(weights.shape)
    except RuntimeError as error:
        shapes = f"{tuple(visible.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"visible must broadcast to the weights, got shapes {shapes}") from error
    shape = (-1, *weights.shape[-3:]) if weights.numel() else (weights.shape[:-3].numel(), *weights.shape[-3:])
    return weights.detach().reshape(shape), visible.reshape(shape)


def _head_sums(weights: Tensor, visible: Tensor) -> Tensor:
    """Totals over batch and queries, (5, H): rows, densities, support, visible keys, null rows."""
    keys = visible.sum(-1)  # (B, H, Lq)
    rows = keys > 0
    support = ((weights != 0.0) & visible).sum(-1)
    share = support.double() / keys.clamp(min=1)
    values = (rows, share, support, keys, rows & (support == 0))
    return torch.stack([value.double().sum((0, 2)) for value in values])


def _diversity_sums(weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of JS over queries that have two heads to compare, and how many there are."""
    mass = torch.where(visible, weights, 0.0).abs().double()
    total = mass.sum(-1, keepdim=True)  # (B, H, Lq, 1)
    alive = total > 0.0
    p = mass / torch.where(alive, total, 1.0)
    heads = alive.sum(1).squeeze(-1)  # (B, Lq)
    mixture = p.sum(1) / heads.clamp(min=1).unsqueeze(-1)
    divergence = _entropy(mixture) - _entropy(p).sum(1) / heads.clamp(min=1)
    keys = visible.any(1).sum(-1)  # (B, Lq)
    scaled = divergence / keys.clamp(min=2).double().log()
    compared = heads >= 2
    return torch.where(compared & (keys > 1), scaled, 0.0).clamp(0.0, 1.0).sum(), compared.double().sum()


def _entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """0 where nothing was counted."""
    return total / count.clamp(min=1.0)
