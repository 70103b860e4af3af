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

from tamis.transforms.entmax import entmax_weights
from tamis.transforms.solver import compute_dtype


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
    d, valid = relative_to_max(z)
    y = _normmax_powers(d, alpha)
    p = torch.where(y > 0.0, torch.where(y > 0.0, y, 1.0).log().div(alpha).exp(), 0.0)
    total = p.sum(-1, keepdim=True)
    return torch.where(valid, p / total, 0.0)


def normmax_conjugate(d: Tensor, alpha: float | Tensor) -> Tensor:
    """1 + max over the simplex of <p, d> - ||p||_alpha, (..., 1), for rows whose largest score is 0."""
    power = 1.0 - 1.0 / alpha
    top = _normmax_powers(d, alpha).amax(-1, keepdim=True)
    return 1.0 + d.amax(-1, keepdim=True) - (top.log() * power).exp()


def _normmax_powers(d: Tensor, alpha: float | Tensor) -> Tensor:
    """(d - tau)_+^(alpha / (alpha - 1)), which sums to one.

    That is a thresholded power with a unit sum, so it is entmax of rescaled scores: with exponent 1 / e for
    e = (alpha - 1) / alpha, of d / e.  normmax is its alpha-th root, normalised.
    """
    power = 1.0 - 1.0 / alpha
    # Scores 1 below the largest cannot be in the support; cut there, -inf cannot meet a zero gradient.
    return entmax_weights(d.clamp(min=-1.0) / power, power)


def budgetmax_weights(z: Tensor, budget: float | Tensor) -> Tensor:
    """Weights over the last dim.  budget: a number, or a tensor (..., 1) with z's number of dims."""
    if not isinstance(budget, Tensor):
        budget = torch.full((1,) * z.ndim, float(budget), dtype=compute_dtype(z.dtype), device=z.device)
    return _Budgetmax.apply(z, budget)


@torch.library.custom_op("tamis::budgetmax_forward", mutates_args=())
def _budgetmax_op(z: Tensor, budget: Tensor) -> Tensor:
    """p = clip(z - tau, 0, 1) with the tau that gives sum p = budget, by bracketed Newton steps."""
    dtype = compute_dtype(z.dtype)
    budget = budget.to(dtype)
    if not bool((budget > 0.0).all()):
        raise ValueError(f"budget must be above 0 everywhere, got {budget.min().item():g}")
    x = z.to(dtype)
    if x.numel() == 0:
        return torch.zeros_like(x)
    finite = torch.isfinite(x)
    certain = x == math.inf
    spoiled = x.isnan().any(-1, keepdim=True)
    row_max = torch.where(finite, x, -math.inf).amax(-1, keepdim=True)
    row_max = torch.where(row_max == -math.inf, 0.0, row_max)
    x = torch.where(finite, x - row_max, -math.inf)
    share = budget - certain.sum(-1, keepdim=True)  # what is left for the finite scores
    full = share >= finite.sum(-1, keepdim=True)
    low = torch.where(finite, x, math.inf).amin(-1, keepdim=True) - 1.0
    low = torch.where(low == math.inf, -1.0, low)
    high = torch.zeros_like(row_max)
    tau = low
    while True:
        p = (x - tau).clamp_(0.0, 1.0)
        excess = p.sum(-1, keepdim=True) - share
        low, high = torch.where(excess >= 0.0, tau, low), torch.where(excess <= 0.0, tau, high)
        inside = ((p > 0.0) & (p < 1.0)).sum(-1, keepdim=True)
        middle = (low + high) / 2
        newton = tau + excess / inside.clamp(min=1)
        step = torch.where((inside > 0) & (newton > low) & (newton < high), newton, middle)
        done = (excess.abs() <= 4 * torch.finfo(dtype).eps * budget) | (step == tau) | (step == low) | (step == high)
        if bool((done | full | (share <= 0.0)).all()):
            break
        tau = torch.where(done, tau, step)
    # The rest of the excess is below the resolution of tau: spread it over the entries that can move.
    p = torch.where((p > 0.0) & (p < 1.0), p - excess / inside.clamp(min=1), p).clamp_(0.0, 1.0)
    p = torch.where(full & finite, 1.0, torch.where(share <= 0.0, 0.0, p))
    p = torch.where(certain, (budget / certain.sum(-1, keepdim=True)).clamp(max=1.0), p)
    return torch.where(spoiled, math.nan, p)


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

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        inside, budget = ctx.saved_tensors
        g = torch.where(inside, g, 0.0)
        mean = g.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)
        dims = [i for i, size in enumerate(budget.shape) if size == 1 and mean.shape[i] != 1]
        return torch.where(inside, g - mean, 0.0).to(ctx.dtype), mean.sum(dims, keepdim=True) if dims else mean
