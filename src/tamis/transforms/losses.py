"""Fenchel-Young losses: what cross-entropy is to softmax, for entmax and normmax.

    loss(z, q) = conjugate(z) - <q, z>,   gradient p - q

with conjugate(z) = max over the simplex of <p, z> + H(p) attained at the weights p.  It is linear in the target q, so
class weights w and label smoothing enter as they do in cross-entropy, with v = w * q:

    loss(z, v) = sum(v) conjugate(z) - <v, z>

Both terms are taken relative to the largest score: shifting the scores changes nothing, not even at 1e4.
A constant, the entropy of the target, is left out, as `F.cross_entropy` leaves it out.

d loss / d alpha <= 0 whatever the target: an alpha learned through this loss alone only climbs.

Blondel, Martins and Niculae, Learning with Fenchel-Young Losses, https://arxiv.org/abs/1901.02324.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tamis.transforms.relatives import relative_to_max

Conjugate = Callable[[Tensor], Tensor]
"""Rows with largest score 0, (..., classes), to their conjugates (..., 1)."""


def class_loss(
    conjugate: Conjugate, z: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Losses and weights of the samples for class indices: z (..., classes), target (...)."""
    d, valid = relative_to_max(z)
    ignored = target == ignore_index
    target = torch.where(ignored, 0, target).unsqueeze(-1)
    hard = 1.0 - label_smoothing
    picked = d.gather(-1, target).squeeze(-1)
    sample_weight = torch.ones_like(picked)
    if weight is not None:
        weight = weight.to(d.dtype)
        sample_weight = weight[target.squeeze(-1)]
    total = sample_weight * hard
    score = torch.where(total == 0.0, 0.0, total * picked)
    if label_smoothing > 0.0:
        spread = torch.ones_like(d[..., :1]).expand_as(d) if weight is None else weight.expand_as(d)
        spread = spread * (label_smoothing / d.shape[-1])
        total = total + spread.sum(-1)
        score = score + _dot(spread, d)
    loss = _combine(conjugate, d, valid, total, score)
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    return torch.where(ignored, zero, loss), torch.where(ignored, zero, sample_weight)


def reduced(losses: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The losses themselves ("none"), their "sum", or their "mean": that by `count`, the weight of all samples."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    assert count is not None
    return losses.sum() / count


def probability_loss(
    conjugate: Conjugate, z: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float
) -> Tensor:
    """Losses of the samples for class probabilities: z and target (..., classes)."""
    d, valid = relative_to_max(z)
    v = target.to(d.dtype) * (1.0 - label_smoothing) + label_smoothing / d.shape[-1]
    if weight is not None:
        v = v * weight.to(d.dtype)
    return _combine(conjugate, d, valid, v.sum(-1), _dot(v, d))


def _combine(conjugate: Conjugate, d: Tensor, valid: Tensor, total: Tensor, score: Tensor) -> Tensor:
    loss = total * conjugate(d).squeeze(-1) - score
    return torch.where(valid.squeeze(-1), loss, math.inf)


def _dot(v: Tensor, d: Tensor) -> Tensor:
    """<v, d> where a class without weight may have a score of -inf."""
    return (v * torch.where((v == 0.0) & (d == -math.inf), 0.0, d)).sum(-1)
