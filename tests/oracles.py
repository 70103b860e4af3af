"""Independent solutions of the entmax problem: by sorting, by bisection, and to any number of digits.

    p_i = [(a - 1) z_i - tau]_+ ^ (1 / (a - 1)) with sum p = 1;  softmax at a = 1

None of them shares a formula for the unknown, a stopping rule or a derivative with the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from mpmath import mp, mpf
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------
# float64, any number of rows


def sparsemax_by_sorting(z: Tensor) -> Tensor:
    """Exact sparsemax of the last dim in float64 (Martins and Astudillo 2016)."""
    x = z.double() - z.double().amax(-1, keepdim=True)
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64)
    excess = ordered.cumsum(-1) - 1.0
    size = (count * ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, size - 1) / size).clamp(min=0.0)


def entmax15_by_sorting(z: Tensor) -> Tensor:
    """Exact 1.5-entmax of the last dim in float64 (Peters, Niculae and Martins 2019)."""
    x = (z.double() - z.double().amax(-1, keepdim=True)) / 2.0
    ordered = x.sort(-1, descending=True).values.clamp(min=-2.0)  # nothing below -1 is ever kept; -inf would spoil sums
    count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64)
    mean = ordered.cumsum(-1) / count
    spread = count * (ordered.square().cumsum(-1) / count - mean.square())
    tau = mean - ((1.0 - spread) / count).clamp(min=0.0).sqrt()
    size = (tau <= ordered).sum(-1, keepdim=True)
    return (x - tau.gather(-1, size - 1)).clamp(min=0.0).square()


def entmax_by_bisection(z: Tensor, alpha: float) -> Tensor:
    """alpha-entmax of the last dim in float64, for 1 < alpha <= 2.5.

    A threshold resolves weights to eps^(1 / (alpha - 1)): beyond 2.5 that is no reference.
    """
    assert 1.0 < alpha <= 2.5
    power = alpha - 1.0
    x = power * (z.double() - z.double().amax(-1, keepdim=True))
    low = torch.full_like(x[..., :1], -1.0)
    high = torch.full_like(low, -(float(x.shape[-1]) ** -power))
    for _ in range(60):
        tau = (low + high) / 2.0
        too_much = (x - tau).clamp(min=0.0).pow(1.0 / power).sum(-1, keepdim=True) > 1.0
        low, high = torch.where(too_much, tau, low), torch.where(too_much, high, tau)
    return (x - high).clamp(min=0.0).pow(1.0 / power)


# ---------------------------------------------------------------------------------------------------------------
# Any number of digits, one row


def entmax_mp(row: Sequence[float | mpf], alpha: float | mpf, digits: int = 50) -> list[mpf]:
    """alpha-entmax of one row for any alpha > 0; -inf is allowed.  Arguments are the exact numbers they are."""
    with mp.workdps(digits + 10):
        power = mpf(alpha) - 1
        lost = 0 if power == 0 else max(0, math.ceil(-mp.log10(abs(power))))  # the power 1 / (alpha - 1) costs these
    with mp.workdps(digits + 10 + lost):
        scores = [mpf(score) for score in row]
        kept = [score for score in scores if score > -mp.inf]
        solve = _weights_above_edge if power > 1 else _weights_below_top
        following = iter(solve(kept, power, mpf(10) ** -(digits + 5)))
        return [next(following) if score > -mp.inf else mpf(0) for score in scores]


def entmax_exact(z: Tensor, alpha: float | mpf, digits: int = 30) -> Tensor:
    """entmax_mp of every row of z (rows, n), rounded to float64."""
    rows = [[float(weight) for weight in entmax_mp(row, alpha, digits)] for row in z.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def alpha_derivative(row: Sequence[float], alpha: float, digits: int = 60) -> Tensor:
    """d p / d alpha of one row (n) in float64, by central differences of entmax_mp."""
    with mp.workdps(digits):
        step = mpf(10) ** (-digits // 2)
        after, before = (entmax_mp(row, mpf(alpha) + sign * step, digits) for sign in (1, -1))
        slopes = [float((a - b) / (2 * step)) for a, b in zip(after, before, strict=True)]
        return torch.tensor(slopes, dtype=torch.float64)


def jacobian(row: Sequence[float], alpha: float, digits: int = 60) -> list[list[mpf]]:
    """d p_i / d z_j of one row as entry [j][i], by central differences of entmax_mp.

    Large alpha needs digits: the step, 10^(-digits / 2), must be far below p_min^(alpha - 1).
    """
    result = []
    with mp.workdps(digits):
        step = mpf(10) ** (-digits // 2)
        for j in range(len(row)):
            after, before = (
                entmax_mp([mpf(z) + sign * step * (i == j) for i, z in enumerate(row)], alpha, digits)
                for sign in (1, -1)
            )
            result.append([(a - b) / (2 * step) for a, b in zip(after, before, strict=True)])
    return result


def _weights_below_top(scores: list[mpf], power: mpf, tolerance: mpf) -> list[mpf]:
    """alpha <= 2: the unknown is ln p_max, in [-ln n, 0]."""
    top = max(scores)

    def weights(log_top: mpf) -> list[mpf]:
        if power == 0:
            return [mp.exp(log_top + score - top) for score in scores]
        height = mp.exp(power * log_top)
        bases = [height + power * (score - top) for score in scores]
        return [base ** (1 / power) if base > 0 else mpf(0) for base in bases]

    return weights(_root(lambda log_top: mp.fsum(weights(log_top)) - 1, -mp.log(len(scores)), mpf(0), tolerance))


def _weights_above_edge(scores: list[mpf], power: mpf, tolerance: mpf) -> list[mpf]:
    """alpha > 2: the unknown is the weight of the lowest score kept, which is found by trying every score."""

    def weights(edge: mpf, lowest: mpf) -> list[mpf]:
        return [(lowest**power + power * (z - edge)) ** (1 / power) if z >= edge else mpf(0) for z in scores]

    edge = min(z for z in scores if mp.fsum(weights(z, mpf(0))) < 1)
    return weights(edge, _root(lambda lowest: mp.fsum(weights(edge, lowest)) - 1, mpf(0), mpf(1), tolerance))


def _root(function: Callable[[mpf], mpf], low: mpf, high: mpf, tolerance: mpf) -> mpf:
    """The zero of an increasing function: regula falsi with halved ordinates (Illinois)."""
    at_low, at_high = function(low), function(high)
    if at_low >= 0:
        return low
    if at_high <= 0:
        return high
    side = 0
    while True:
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        value = function(middle)
        if abs(value) <= tolerance:
            return middle
        if value > 0:
            high, at_high = middle, value
            at_low, side = (at_low / 2 if side == 1 else at_low), 1
        else:
            low, at_low = middle, value
            at_high, side = (at_high / 2 if side == -1 else at_high), -1


# ---------------------------------------------------------------------------------------------------------------
# The conditions that define the solution


def multiplier_gap(row: Sequence[float], weights: Sequence[float | mpf], alpha: float, tiny: float) -> float:
    """How far weights are from optimal, in units of the scores.

    At the optimum z_i - (p_i^(a-1) - 1) / (a - 1) is one constant over the support, and no score off the support would
    exceed it with a weight of `tiny`.  (The 1 / (a - 1) added to the usual form makes it finite as a -> 1.)
    """
    with mp.workdps(60):
        power = mpf(alpha) - 1

        def price(weight: float | mpf) -> mpf:
            return mp.log(weight) if power == 0 else (mpf(weight) ** power - 1) / power

        inside = [mpf(z) - price(p) for z, p in zip(row, weights, strict=True) if p > 0]
        outside = [mpf(z) - price(tiny) for z, p in zip(row, weights, strict=True) if p == 0 and z > -math.inf]
        return float(max(max(inside) - min(inside), max(outside, default=-mp.inf) - max(inside)))
