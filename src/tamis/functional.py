"""The public functions: arguments are checked here, once, and inner code trusts them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.transforms.entmax import entmax_conjugate, entmax_weights
from tamis.transforms.losses import Conjugate, class_loss, probability_loss
from tamis.transforms.relatives import budgetmax_weights, normmax_conjugate, normmax_weights
from tamis.transforms.solver import compute_dtype

__all__ = [
    "budgetmax",
    "entmax",
    "entmax15",
    "entmax_loss",
    "entmax_threshold",
    "normmax",
    "normmax_loss",
    "sparsemax",
    "sparsemax_loss",
]

# ---------------------------------------------------------------------------------------------------------------
# Transforms


def entmax(input: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Sparse weights over `dim`: alpha-entmax, between softmax (alpha = 1) and argmax (alpha -> infinity).

    Solves ``argmax over the simplex of <p, z> + H_alpha(p)``; for alpha > 1 low scores get exactly zero.
    Differentiable, any number of times, in the scores and in alpha.

    Args:
        input: scores of any shape and any floating dtype; -inf is a score that never gets weight.
        alpha: above 0.  A number; a 1-D tensor as one alpha per head, for 4-D input (batch, heads, queries, keys)
            and the last dim; otherwise a tensor that broadcasts against `input` with `dim` reduced to size 1.
        dim: the dimension that sums to one.
        mask: boolean, broadcastable to `input`, True = keep.

    Returns:
        Weights with the shape and dtype of `input` (fp32 under autocast, as softmax).  A row with nothing to attend
        to is zeros, with zero gradients; +inf takes all the weight, shared on ties; NaN stays in its row.

    Example:
        >>> entmax(torch.tensor([1.0, 0.0, -2.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
    """
    z, dim = _prepare(input, dim, mask)
    return _restore(entmax_weights(z, _exponent(alpha, input, dim)), input, dim)


def sparsemax(input: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """The Euclidean projection of the scores onto the simplex: :func:`entmax` at alpha = 2."""
    return entmax(input, 2.0, dim, mask=mask)


def entmax15(input: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """:func:`entmax` at alpha = 1.5, the usual choice when alpha is not learned."""
    return entmax(input, 1.5, dim, mask=mask)


def entmax_threshold(
    input: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The threshold and the support size behind :func:`entmax`, both with `dim` kept at size 1.

    ``p = relu((alpha - 1) * z - tau) ** (1 / (alpha - 1))``.  At alpha = 1 tau is its limit, -1.  tau is at least
    fp32 and differentiable; a row with nothing to attend to has an infinite tau and a support of 0.  The support is
    counted by the threshold, so entries whose weight is too small for the dtype count.
    """
    z, dim = _prepare(input, dim, mask)
    z = z.to(compute_dtype(z.dtype))
    e = _exponent(alpha, input, dim)
    p = entmax_weights(z, e)
    row_max = z.amax(-1, keepdim=True)
    top = p.amax(-1, keepdim=True)
    valid = row_max > -math.inf
    height = (torch.where(valid, top, 1.0).log() * e).exp()
    tau = torch.where(valid, e * torch.where(valid, row_max, 0.0) - height, math.inf)
    tau = torch.where(valid | torch.as_tensor(e >= 0.0, device=z.device), tau, -math.inf)
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
    z, dim = _prepare(input, dim, mask)
    weights = normmax_weights(z, _parameter("alpha", alpha, 1.0, input, dim))
    return _restore(weights, input, dim)


def budgetmax(input: Tensor, budget: float | Tensor = 2.0, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """``argmax of <p, z> - ||p||^2 / 2`` over 0 <= p <= 1 with sum p = budget: a soft choice of several.

    `budget` is a number above 0 or a tensor as alpha in :func:`entmax`, and has a gradient.  Where fewer scores than
    the budget are there to choose from, each gets weight 1.
    """
    z, dim = _prepare(input, dim, mask)
    if not isinstance(budget, Tensor) and z.shape[-1] and isinstance(budget, int | float) and budget > z.shape[-1]:
        raise ValueError(f"budget must be at most the size of dim {dim}, {z.shape[-1]}, got {budget}")
    return _restore(budgetmax_weights(z, _parameter("budget", budget, 0.0, input, dim)), input, dim)


# ---------------------------------------------------------------------------------------------------------------
# Losses


def entmax_loss(
    input: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The Fenchel-Young loss of :func:`entmax`; takes what `torch.nn.functional.cross_entropy` takes.

    Its gradient in the scores is ``entmax(input, alpha) - target``; at alpha = 1 it is cross-entropy.  Unlike
    cross-entropy it reaches exactly zero once the target leads by a margin of 1 / (alpha - 1).

    Args:
        input: scores (C), (N, C) or (N, C, d1, ...).
        target: class indices with the shape of `input` without C, or probabilities with the shape of `input`.
        alpha: above 0.  A number, one per sample (the shape of class indices), or any tensor that broadcasts against
            `input` with C reduced to 1.  It has a gradient; with hard targets that gradient is never positive.
        weight: one weight per class (C).
        ignore_index: a class index whose samples do not count.
        reduction: "none", "sum" or "mean".
        label_smoothing: in [0, 1].

    A class whose score is -inf costs +inf as a target and nothing otherwise.
    """
    e, z = _loss_inputs(input, target, alpha, 0.0)
    conjugate = partial(entmax_conjugate, e=e - 1.0)
    return _loss(conjugate, z, input, target, weight, ignore_index, reduction, label_smoothing)


def sparsemax_loss(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`entmax_loss` at alpha = 2."""
    return entmax_loss(
        input,
        target,
        2.0,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def normmax_loss(
    input: Tensor,
    target: Tensor,
    alpha: float | Tensor = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The Fenchel-Young loss of :func:`normmax`, for alpha > 1; arguments as in :func:`entmax_loss`."""
    alpha, z = _loss_inputs(input, target, alpha, 1.0)
    conjugate = partial(normmax_conjugate, alpha=alpha)
    return _loss(conjugate, z, input, target, weight, ignore_index, reduction, label_smoothing)


# ---------------------------------------------------------------------------------------------------------------
# Checks


def _prepare(input: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, int]:
    """The scores with `dim` last and masked ones at -inf, and `dim` counted from the front."""
    dim = _check_scores(input, dim)
    z = _promote(input)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor (True = keep), got {kind}")
        if not _broadcasts(mask.shape, input.shape):
            raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to input {tuple(input.shape)}")
        z = torch.where(mask, z, -math.inf)
    return (z.movedim(dim, -1) if z.ndim else z.reshape(1)), dim


def _restore(weights: Tensor, input: Tensor, dim: int) -> Tensor:
    """Weights back in the layout of `input`, and in its dtype (fp32 under autocast)."""
    dtype = _promote(input[:0] if input.ndim else input).dtype
    if input.ndim == 0:
        return weights.reshape(()).to(dtype)
    weights = weights.to(dtype).movedim(-1, dim)
    return weights.contiguous() if dim != input.ndim - 1 and input.is_contiguous() else weights


def _check_scores(input: Tensor, dim: int) -> int:
    if not isinstance(input, Tensor) or not input.is_floating_point():
        kind = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be a floating-point tensor, got {kind}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    ndim = max(input.ndim, 1)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must lie in [{-ndim}, {ndim - 1}] for input of shape {tuple(input.shape)}, got {dim}")
    return dim % ndim


def _promote(input: Tensor) -> Tensor:
    """Under autocast these functions run in fp32, as softmax does."""
    if input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(input.device.type):
        return input.float()
    return input


def _broadcasts(shape: Any, target: Any) -> bool:
    if len(shape) > len(target):
        return False
    return all(have in (1, want) for have, want in zip(reversed(shape), reversed(target), strict=False))


def _exponent(alpha: float | Tensor, input: Tensor, dim: int) -> float | Tensor:
    """alpha - 1, subtracted before any rounding to fp32."""
    return _parameter("alpha", alpha, 0.0, input, dim, subtract=1.0)


def _parameter(
    name: str, value: float | Tensor, above: float, input: Tensor, dim: int, *, subtract: float = 0.0
) -> float | Tensor:
    """A parameter per row: a checked number, or a tensor (..., 1) with the number of dims of `input`, `dim` last."""
    if isinstance(value, Tensor):
        return _parameter_tensor(name, value, above, input, dim, subtract)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be a finite number above {above:g}, got {value}")
    return float(value) - subtract


def _parameter_tensor(name: str, value: Tensor, above: float, input: Tensor, dim: int, subtract: float) -> Tensor:
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
    ndim = max(input.ndim, 1)
    reduced = list(input.shape) or [1]
    reduced[dim] = 1
    per_head = value.ndim == 1 and ndim == 4 and dim == 3
    shape = (1, *value.shape, 1, 1) if per_head else (*(1,) * (ndim - value.ndim), *value.shape)
    if not _broadcasts(shape, reduced):
        expected = f"one per head ({input.shape[1]},) or " if per_head else ""
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} does not fit input {tuple(input.shape)} and dim {dim}: "
            f"expected {expected}a shape that broadcasts to {tuple(reduced)}"
        )
    if _values_known(value) and value.numel() and not bool(((value > above) & (value < math.inf)).all()):
        bad = value.detach()[~((value > above) & (value < math.inf))].flatten()[0].item()
        raise ValueError(f"{name} must be finite and above {above:g} everywhere, got {bad:g}")
    if compute_dtype(value.dtype) != value.dtype:
        value = value.float()
    return (value.reshape(shape) - subtract).to(compute_dtype(input.dtype)).movedim(dim, -1)


def _values_known(x: Tensor) -> bool:
    """Whether looking at the values costs no synchronisation and is possible at all."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _loss_inputs(input: Tensor, target: Tensor, alpha: float | Tensor, above: float) -> tuple[float | Tensor, Tensor]:
    """alpha per sample, and the scores with the classes last."""
    _check_scores(input, 0)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-dim tensor")
    classes = 0 if input.ndim == 1 else 1
    samples = input.shape[:classes] + input.shape[classes + 1 :]
    if isinstance(alpha, Tensor) and alpha.ndim and alpha.shape == samples and input.ndim > 1:
        alpha = alpha.unsqueeze(classes)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    expected = input.shape if target.is_floating_point() else samples
    if target.shape != expected:
        kind = "probabilities" if target.is_floating_point() else "class indices"
        raise ValueError(
            f"target of {kind} must have shape {tuple(expected)} for input {tuple(input.shape)}, "
            f"got {tuple(target.shape)}"
        )
    return _parameter("alpha", alpha, above, input, classes), _promote(input).movedim(classes, -1)


def _loss(
    conjugate: Conjugate,
    z: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    classes = z.shape[-1]
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if weight is not None and (not isinstance(weight, Tensor) or weight.shape != (classes,)):
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must be a tensor of shape ({classes},), one per class, got {got}")
    if target.is_floating_point():
        losses = probability_loss(
            conjugate, z, target.movedim(0 if input.ndim == 1 else 1, -1), weight, label_smoothing
        )
        count = torch.full((), float(losses.numel()), dtype=losses.dtype, device=losses.device)
    else:
        target = _check_indices(target, classes, ignore_index)
        losses, counts = class_loss(conjugate, z, target, weight, ignore_index, label_smoothing)
        count = counts.sum()
    if reduction == "mean":
        losses = losses.sum() / count
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(_promote(input[:0]).dtype)


def _check_indices(target: Tensor, classes: int, ignore_index: int) -> Tensor:
    if target.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"target must hold class indices or probabilities, got {target.dtype}")
    target = target.long()
    if _values_known(target):
        outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(outside.any()):
            raise ValueError(f"target must lie in [0, {classes - 1}], got {target[outside][0].item()}")
    return target
