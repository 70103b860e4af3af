"""Scores to weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tamis.functional.rows import chosen, exponent, prepare, restore
from tamis.kernels.rows import ops as rows
from tamis.settings import shown
from tamis.transforms.entmax import entmax_weights, limited
from tamis.transforms.parameters import row_parameter
from tamis.transforms.relatives import budgetmax_weights, normmax_weights
from tamis.transforms.solver import compute_dtype


def entmax(
    input: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sparse weights over `dim`: alpha-entmax, between softmax (alpha = 1) and argmax (alpha -> infinity).

    Solves ``argmax over the simplex of <p, z> + H_alpha(p)``; for alpha > 1 low scores get exactly zero.
    Differentiable, any number of times, in the scores and in alpha.

    Args:
        input: scores of any shape and any floating dtype; -inf is a score that never gets weight.
        alpha: above 0.  A number; a 1-D tensor as one alpha per head, for 4-D input (batch, heads, queries, keys)
            and the last dim; otherwise a tensor that broadcasts against `input` with `dim` reduced to size 1.
        dim: the dimension that sums to one.
        mask: boolean, broadcastable to `input`, True = keep.
        backend: "auto"; "reference" for the plain PyTorch path; "native" (CPU) or "triton" (GPU) to
            insist on a kernel.

    Returns:
        Weights with the shape and dtype of `input` (fp32 under autocast).  A row with nothing to attend
        to is zeros, with zero gradients; +inf takes all the weight, shared on ties; NaN stays in its row.

    Example:
        >>> entmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
    """
    z, dim = prepare(input, dim, mask)
    e = exponent(alpha, input, dim)
    name = chosen(backend, z, e)
    weights = rows.weights(z, e) if name == "triton" else entmax_weights(z, limited(e), name == "native")
    return restore(weights, input, dim)


def sparsemax(input: Tensor, dim: int = -1, *, mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """The Euclidean projection of the scores onto the simplex: :func:`entmax` at alpha = 2."""
    return entmax(input, 2.0, dim, mask=mask, backend=backend)


def entmax15(input: Tensor, dim: int = -1, *, mask: Tensor | None = None, backend: str = "auto") -> Tensor:
    """:func:`entmax` at alpha = 1.5, the usual choice when alpha is not learned."""
    return entmax(input, 1.5, dim, mask=mask, backend=backend)


def entmax_threshold(
    input: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The threshold and the support size behind :func:`entmax`, both with `dim` kept at size 1.

    ``p = relu((alpha - 1) * z - tau) ** (1 / (alpha - 1))``.  At alpha = 1 tau is its limit, -1.  tau is at least
    fp32 and differentiable; a row with nothing to attend to has an infinite tau and a support of 0.  The support is
    counted by the threshold, so entries whose weight is too small for the dtype count.
    """
    z, dim = prepare(input, dim, mask)
    z = z.to(compute_dtype(z.dtype))
    e = limited(exponent(alpha, input, dim))
    if z.shape[-1] == 0:  # nothing to attend to
        z = z.new_full((*z.shape[:-1], 1), -math.inf)
    p = entmax_weights(z, e, not z.is_cuda and chosen("auto", z, e) == "native")
    row_max = z.amax(-1, keepdim=True)
    top = p.amax(-1, keepdim=True)
    empty = row_max == -math.inf
    height = (torch.where(empty, 1.0, top).log() * e).exp()
    sign = torch.sign(torch.as_tensor(e, dtype=z.dtype, device=z.device))
    # Where the largest score is infinite e max z is so too, but for e = 0; an empty row has nothing below tau.
    finite = torch.isfinite(row_max) | row_max.isnan()
    product = torch.where(finite, e * torch.where(finite, row_max, 0.0), torch.where(sign == 0.0, 0.0, sign * math.inf))
    tau = torch.where(empty, torch.where(sign < 0.0, -math.inf, math.inf), product - height)
    with torch.no_grad():
        gap = torch.where(z == row_max, 0.0, z - row_max) * e
        inside = torch.where(torch.as_tensor(e > 0.0, device=z.device), gap + height > 0.0, True)
        support = ((p > 0.0) | inside & (z > -math.inf) & (row_max < math.inf)).sum(-1, keepdim=True)
    return tau.movedim(-1, dim), support.movedim(-1, dim)


def normmax(input: Tensor, alpha: float | Tensor = 2.0, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """``argmax over the simplex of <p, z> - ||p||_alpha`` for alpha > 1.

    Sparse like entmax, and flatter on its support: as alpha grows the weights on it become equal.
    Arguments, special values and derivatives as in :func:`entmax`.
    """
    z, dim = prepare(input, dim, mask)
    weights = normmax_weights(z, row_parameter("alpha", alpha, 1.0, input.shape, input.dtype, dim))
    return restore(weights, input, dim)


def budgetmax(input: Tensor, budget: float | Tensor = 2.0, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """``argmax of <p, z> - ||p||^2 / 2`` over 0 <= p <= 1 with sum p = budget: a soft choice of several.

    `budget` is a number of at least 0 or a tensor as alpha in :func:`entmax`, and has a gradient.  Where fewer scores
    than the budget are there to choose from, each gets weight 1.
    """
    z, dim = prepare(input, dim, mask)
    if not isinstance(budget, Tensor) and z.shape[-1] and isinstance(budget, int | float) and budget > z.shape[-1]:
        raise ValueError(f"budget must be at most the size of dim {dim}, {z.shape[-1]}, got {shown(budget)}")
    checked = row_parameter("budget", budget, 0.0, input.shape, input.dtype, dim, inclusive=True)
    return restore(budgetmax_weights(z, checked), input, dim)
