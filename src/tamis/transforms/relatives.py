"""Relatives of entmax: other regularised argmaxes with exact zeros.

    normmax_alpha(z)  = argmax over the simplex of <p, z> - ||p||_alpha,                       alpha > 1
    budgetmax_B(z)    = argmax over 0 <= p <= 1, sum p = B of <p, z> - ||p||^2 / 2

Blondel, Martins and Niculae, Learning with Fenchel-Young Losses, https://arxiv.org/abs/1901.02324.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tamis.transforms.entmax import entmax_weights, reduce_to
from tamis.transforms.solver import compute_dtype, last_that_holds


def relative_to_max(z: Tensor) -> tuple[Tensor, Tensor]:
    """Scores minus the largest of their row, in the compute dtype, and whether the row holds any score, (..., 1).

    The maximum counts as a constant: what is built on this is invariant to shifts, so its gradient would add up to 0.
    A row without a score becomes zeros; where +inf occurs it alone remains, as 0, and passes no gradient.
    """
    z = z.to(compute_dtype(z.dtype))
    row_max = z.detach().amax(-1, keepdim=True)
    infinite = row_max == math.inf
    ties = torch.where(z == math.inf, 0.0, -math.inf)
    return torch.where(infinite, ties, torch.where(row_max == -math.inf, 0.0, z - row_max)), row_max != -math.inf


def normmax_weights(z: Tensor, alpha: float | Tensor) -> Tensor:
    """Weights over the last dim.  alpha: a number, or a tensor (..., 1) with z's number of dims."""
    if z.shape[-1] == 0:
        return z.to(compute_dtype(z.dtype))
    d, valid = relative_to_max(z)
    y = _normmax_powers(d, alpha)
    p = torch.where(y > 0.0, torch.where(y > 0.0, y, 1.0).log().div(alpha).exp(), 0.0)
    return torch.where(valid, p / p.sum(-1, keepdim=True), 0.0).to(d.dtype)


def normmax_conjugate(d: Tensor, alpha: float | Tensor) -> Tensor:
    """1 + max over the simplex of <p, d> - ||p||_alpha, (..., 1), for rows whose largest score is 0.

    The maximum is the threshold tau = d_j - (d_j - tau)_+, whichever j of the support is taken: here the largest.
    """
    index = d.detach().argmax(-1, keepdim=True)
    top = _normmax_powers(d, alpha).gather(-1, index)
    return (1.0 + d.gather(-1, index) - (top.log() * (1.0 - 1.0 / alpha)).exp()).clamp(min=0.0).to(d.dtype)


def _normmax_powers(d: Tensor, alpha: float | Tensor) -> Tensor:
    """(d - tau)_+^(alpha / (alpha - 1)), which sums to one, in fp64.

    That is a thresholded power with a unit sum, so it is entmax of rescaled scores: with exponent 1 / e for
    e = (alpha - 1) / alpha, of d / e.  normmax is its alpha-th root, normalised; the root magnifies what rounding
    leaves at the edge of the support, hence fp64.
    """
    wide = torch.float32 if d.device.type == "mps" else torch.float64
    if isinstance(alpha, Tensor):
        alpha = alpha.to(wide)
        power: float | Tensor = torch.where(alpha > 1.0, 1.0 - 1.0 / alpha, math.nan)  # refused where values are known
    else:
        power = 1.0 - 1.0 / alpha
    # Scores 1 below the largest are outside the support, however the rescaling rounds.  Cut below that, -inf cannot
    # meet a zero gradient.
    y = entmax_weights(d.to(wide).clamp(min=-2.0) / power, power)
    return torch.where(d > -1.0, y, 0.0)


def budgetmax_weights(z: Tensor, budget: float | Tensor) -> Tensor:
    """Weights over the last dim.  budget: a number, or a tensor (..., 1) with z's number of dims."""
    if not isinstance(budget, Tensor):
        budget = torch.full((1,) * z.ndim, float(budget), dtype=compute_dtype(z.dtype), device=z.device)
    # torch.compile refuses a Function that defines forward-mode derivatives; elsewhere they come for free.
    function = _Budgetmax if torch.compiler.is_compiling() else _BudgetmaxJvp
    return function.apply(z, budget)


@torch.library.custom_op("tamis::budgetmax_forward", mutates_args=())
def _budgetmax_op(z: Tensor, budget: Tensor) -> Tensor:
    """p = clip(z - tau, 0, 1) with the tau that gives sum p = budget.

    tau = z_k - delta, with z_k the lowest score that gets weight: differences between scores do not cancel, wherever
    the scores lie.
    """
    dtype = compute_dtype(z.dtype)
    x, budget = z.to(dtype), budget.to(dtype)
    if not bool((budget >= 0.0).all()):
        raise ValueError(f"budget must be at least 0 everywhere, got {budget.min().item():g}")
    if x.numel() == 0:
        return torch.zeros_like(x)
    certain = x == math.inf
    descending = x.sort(-1, descending=True).values
    infinities = certain.sum(-1, keepdim=True)
    lowest = _lowest_with_weight(x, descending, budget, infinities)
    edge = descending.gather(-1, lowest)
    support = (x >= edge) & (x > -math.inf)
    full = _highest_that_are_full(x, descending, budget, infinities, support)
    y = torch.where(full, 1.0, torch.where(support, x - edge, 0.0))
    free = support & ~full
    count = free.sum(-1, keepdim=True)
    p = y
    for _ in range(2):  # on the known set the sum is linear in delta; once more for what rounding left
        lack = torch.where(count > 0, (budget - p.sum(-1, keepdim=True)) / count.clamp(min=1), 0.0)
        p = torch.where(free, (p + lack).clamp(0.0, 1.0), p)
    p = torch.where(infinities >= budget, certain * (budget / infinities.clamp(min=1)), p)
    return torch.where(x.isnan().any(-1, keepdim=True), math.nan, p)


def _lowest_with_weight(x: Tensor, descending: Tensor, budget: Tensor, infinities: Tensor) -> Tensor:
    """The place of the lowest score with weight: those above it, measured from it, fall short of the budget."""

    def short(place: Tensor) -> Tensor:
        return (x - descending.gather(-1, place)).clamp_(0.0, 1.0).sum(-1, keepdim=True) < budget

    last = x.shape[-1] - 1
    return last_that_holds(short, infinities.clamp(max=last), torch.full_like(infinities, last))


def _highest_that_are_full(
    x: Tensor, descending: Tensor, budget: Tensor, infinities: Tensor, support: Tensor
) -> Tensor:
    """Which weights are 1: with the lowest of them just at 1, the weights of all are within the budget."""

    def within(place: Tensor) -> Tensor:
        lowest = descending.gather(-1, (place - 1).clamp(min=0))
        weights = torch.where(support, (x - lowest + 1.0).clamp_(0.0, 1.0), 0.0)
        return (weights.sum(-1, keepdim=True) <= budget) | (place <= infinities)

    count = last_that_holds(within, infinities, support.sum(-1, keepdim=True).clamp(min=infinities))
    threshold = descending.gather(-1, (count - 1).clamp(min=0))
    return support & (x >= threshold) & (count > 0)


@_budgetmax_op.register_fake
def _(z: Tensor, budget: Tensor) -> Tensor:
    return z.new_empty(z.shape, dtype=compute_dtype(z.dtype))


@_budgetmax_op.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, budget: Tensor) -> Any:
    z = z.unsqueeze(0).expand(info.batch_size, *z.shape) if in_dims[0] is None else z.movedim(in_dims[0], 0)
    budget = budget.unsqueeze(0) if in_dims[1] is None else budget.movedim(in_dims[1], 0)
    return _budgetmax_op(z, budget), 0


class _Budgetmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, budget: Tensor) -> Tensor:
        return _budgetmax_op(z, budget)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, budget = inputs
        ctx.dtype = z.dtype
        # Weights strictly between 0 and 1 move with their scores; +inf does not, though it may share a weight.
        inside = (output > 0.0) & (output < 1.0) & (z != math.inf)
        ctx.save_for_backward(inside, budget)
        ctx.save_for_forward(inside, budget)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        inside, budget = ctx.saved_tensors
        dz, mean = _centred(inside, g)
        return dz.to(ctx.dtype), reduce_to(mean, budget)


class _BudgetmaxJvp(_Budgetmax):
    @staticmethod
    def jvp(ctx: Any, dz: Tensor | None, d_budget: Tensor | None) -> Tensor:
        inside, _ = ctx.saved_tensors
        tangent = torch.zeros(inside.shape, dtype=compute_dtype(ctx.dtype), device=inside.device)
        if dz is not None:
            tangent = tangent + _centred(inside, dz.to(tangent.dtype))[0]
        if d_budget is not None:
            share = d_budget / inside.sum(-1, keepdim=True).clamp(min=1)
            tangent = tangent + torch.where(inside, share, 0.0)
        return tangent


def _centred(inside: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The Jacobian in the scores, which is symmetric, times g; and the mean of g, its derivative in the budget."""
    g = torch.where(inside, g, 0.0)
    mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(inside, g - mean, 0.0), mean
