"""What heads have learned about how sparse to be: their alphas, now and over training.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from tamis.analysis.metrics import plain
from tamis.analysis.sites import attention_sites, kind_of, site_name

ALPHA_BINS = 20


@dataclass(frozen=True, kw_only=True)
class AlphaTrajectories:
    """Alphas over training."""

    steps: tuple[int, ...]
    sites: dict[str, tuple[tuple[float, ...], ...]]
    """By site: one row for each step, one alpha for each head."""

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))


@torch.no_grad()
def learned_alphas(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return the alphas of each site that learns them; sites whose alpha is fixed are left out.

    Args:
        model: any model with attention of ours in it.

    Returns:
        one alpha for each head, by site.
    """
    found = {}
    for site, attention in attention_sites(model).items():
        if (alphas := attention.mechanism.learned_alphas()) is not None:
            found[site] = tuple(alphas.flatten().tolist())
    return found


def alpha_trajectories(records: Iterable[Mapping[str, Any]]) -> AlphaTrajectories:
    """Collect alphas over training from the records of a metrics.jsonl.

    A step that is noted twice, as after going back to a checkpoint, counts as it was noted last.

    Args:
        records: those without alphas are passed over.

    Returns:
        alphas by step and site.
    """
    by_step: dict[int, dict[str, tuple[float, ...]]] = {}
    for record in records:
        if record.get("alphas"):
            named = {site_name(path): tuple(map(float, alphas)) for path, alphas in record["alphas"].items()}
            by_step[int(record["step"])] = named
    steps = sorted(by_step)
    sites = {site for alphas in by_step.values() for site in alphas}
    for step in steps:
        if missing := sites - set(by_step[step]):
            raise ValueError(f"the record of step {step} has no alphas of {', '.join(sorted(missing))}, others have")
    order = list(by_step[steps[0]]) if steps else []
    return AlphaTrajectories(steps=tuple(steps), sites={site: tuple(by_step[s][site] for s in steps) for site in order})


def alpha_histograms(
    alphas: Mapping[str, Sequence[float]], bins: int = ALPHA_BINS, low: float = 1.0, high: float = 2.0
) -> dict[str, tuple[int, ...]]:
    """Count the heads of each kind of attention with an alpha in each of the equal bins of [low, high].

    Alphas outside are counted in the nearest bin.

    Args:
        alphas: of each site, as :func:`learned_alphas` has them.
        bins, low, high: how many bins, and between which alphas.

    Returns:
        counts by kind of attention.
    """
    if bins < 1 or not low < high:
        raise ValueError(f"needs at least one bin and low < high, got {bins} bins of [{low}, {high}]")
    found: dict[str, list[int]] = {}
    for site, values in alphas.items():
        counts = found.setdefault(kind_of(site), [0] * bins)
        for value in values:
            counts[min(bins - 1, max(0, int((value - low) / (high - low) * bins)))] += 1
    return {kind: tuple(counts) for kind, counts in found.items()}
