"""Null attention as a sign of quality: do heads attend to less where source and target do not belong together?

Sparse Attention with Linear Units, Zhang et al. 2021, https://arxiv.org/abs/2104.07012
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tamis.analysis.capture import capture
from tamis.analysis.rows import Rows, ratio
from tamis.analysis.sites import device_of
from tamis.analysis.tokens import Run, Sentences, run_model
from tamis.nn.modes import evaluating


def null_rates(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the share of a sentence's rows that are null; 0 for a sentence without rows.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (B, H).
    """
    rows = Rows.of(weights, visible)
    null = rows.seen & ~rows.alive
    return ratio((null.double().sum(-1), rows.seen.double().sum(-1)))


def auc(positive: Sequence[float] | Tensor, negative: Sequence[float] | Tensor) -> float:
    """Return the chance that a positive exceeds a negative, ties counting half: the area under the ROC curve.

    Args:
        positive, negative: scores of both.

    Returns:
        a share from 0 to 1.
    """
    high, low = (torch.as_tensor(values, dtype=torch.float64).flatten() for values in (positive, negative))
    if not high.numel() or not low.numel():
        raise ValueError(f"auc needs values on both sides, got {high.numel()} positive and {low.numel()} negative")
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high)
    not_above = torch.searchsorted(ordered, high, right=True)
    return float((below + not_above).double().mean() / (2 * low.numel()))


@dataclass(frozen=True, kw_only=True)
class NullRate:
    """Null rates of sentence pairs, those that belong together against those that do not."""

    true: float
    """The mean over true pairs."""
    shuffled: float
    auc: float
    """The chance that a shuffled pair has a higher rate than a true one; 0.5 says nothing."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class NullSignal:
    """Null attention of cross-attention on true and on shuffled pairs."""

    pairs: int
    overall: NullRate
    """Over the heads of all layers."""
    sites: dict[str, NullRate]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def null_signal(model: nn.Module, batches: Iterable[Sentences], *, run: Run = run_model) -> NullSignal:
    """Compare each target with its own source and with that of its neighbour in the batch.

    Batches of one sentence have no neighbour and are passed over.  Neighbours are of like length where batches are made
    by length, so that length alone tells nothing.  One number is kept for each pair and layer.

    Args:
        model: an encoder-decoder.
        batches: pairs.
        run: calls the model on a batch.

    Returns:
        null rates of true and of shuffled pairs.
    """
    rates: dict[str, tuple[list[float], list[float]]] = {}
    device = device_of(model)
    with evaluating(model):
        for batch in batches:
            if batch.source is None:
                raise ValueError("null attention of true and shuffled pairs needs sentences with a source")
            if len(batch) > 1:
                batch = batch.to(device)
                for which, pairs in enumerate((batch, batch.with_shuffled_sources())):
                    for site, found in _pair_rates(model, pairs, run).items():
                        rates.setdefault(site, ([], []))[which].extend(found)
    if not rates:
        raise ValueError("there is no batch of two sentences or more, or the model has no cross-attention")
    true, shuffled = (_means([sides[which] for sides in rates.values()]) for which in (0, 1))
    return NullSignal(
        pairs=len(true), overall=_rate(true, shuffled), sites={site: _rate(*sides) for site, sides in rates.items()}
    )


def _pair_rates(model: nn.Module, batch: Sentences, run: Run) -> dict[str, list[float]]:
    """For each cross-attention the rate of each pair, averaged over heads."""
    found: dict[str, list[float]] = {}

    def consume(site: str, weights: Tensor, visible: Tensor) -> None:
        found[site] = null_rates(weights, visible).mean(1).tolist()

    with capture(model, consume, sites=lambda site: site.endswith("cross")):
        run(model, batch)
    return found


def _means(sites: list[list[float]]) -> list[float]:
    """Return the mean of each pair over the sites."""
    return [sum(values) / len(values) for values in zip(*sites, strict=True)]


def _rate(true: list[float], shuffled: list[float]) -> NullRate:
    return NullRate(true=sum(true) / len(true), shuffled=sum(shuffled) / len(shuffled), auc=auc(shuffled, true))
