"""Fenchel-Young losses with the arguments of cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tamis.functional.rows import check_scores, chosen, promote, takes_fused_loss
from tamis.kernels.rows import ops as rows
from tamis.transforms.entmax import entmax_conjugate, limited
from tamis.transforms.losses import Conjugate, class_loss, probability_loss, reduced
from tamis.transforms.parameters import row_parameter, to_last, values_known
from tamis.transforms.relatives import normmax_conjugate


def entmax_loss(
    input: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute the Fenchel-Young loss of :func:`entmax`; takes what `torch.nn.functional.cross_entropy` takes.

    Its gradient in the scores is ``entmax(input, alpha) - target``; at alpha = 1 it is cross-entropy.  Unlike
    cross-entropy it reaches exactly zero once the target leads by a margin of 1 / (alpha - 1).

    Args:
        input: scores (C), (N, C) or (N, C, d1, ...).
        target: class indices with the shape of `input` without C, or probabilities with the shape of `input`.
        alpha: above 0.  A number, one per sample (the shape of class indices), or any tensor that broadcasts against
            `input` with C reduced to 1.  It has a gradient, which is never positive.
        weight: one weight per class (C).
        ignore_index: a class index whose samples do not count.
        reduction: "none", "sum" or "mean".
        label_smoothing: in [0, 1].
        backend: "auto"; "reference" for the plain PyTorch path; "native" (CPU) or "triton" (GPU) to
            insist on a kernel.

    A class whose score is -inf costs +inf as a target and nothing otherwise.

    Returns:
        the loss of each sample, or their sum or mean.
    """
    e, z = _loss_inputs(input, target, alpha, 0.0, subtract=1.0)
    name = chosen(backend, z, e)
    native, fused = name == "native", takes_fused_loss(name, e)
    function, power = (rows.conjugate, e) if fused else (entmax_conjugate, limited(e))
    conjugate = partial(function, e=power, native=native)
    # No weights are stored then; but class weights that are learned need the plain operations.
    learns = isinstance(weight, Tensor) and weight.requires_grad
    by_class = partial(rows.class_loss, e, native=native) if fused and not learns else None
    return _loss(conjugate, z, input, target, weight, ignore_index, reduction, label_smoothing, by_class)


def sparsemax_loss(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`entmax_loss` at alpha = 2.

    Args:
        input, target, and the rest: as in :func:`entmax_loss`.

    Returns:
        the loss of each sample, or their sum or mean.
    """
    return entmax_loss(
        input,
        target,
        2.0,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        backend=backend,
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
    """Compute the Fenchel-Young loss of :func:`normmax`, for alpha > 1.

    Args:
        input, target, alpha, and the rest: as in :func:`entmax_loss`.

    Returns:
        the loss of each sample, or their sum or mean.
    """
    alpha, z = _loss_inputs(input, target, alpha, 1.0, subtract=0.0)
    conjugate = partial(normmax_conjugate, alpha=alpha)
    return _loss(conjugate, z, input, target, weight, ignore_index, reduction, label_smoothing)


def _loss_inputs(
    input: Tensor, target: Tensor, alpha: float | Tensor, above: float, *, subtract: float
) -> tuple[float | Tensor, Tensor]:
    """alpha per sample, less `subtract`, and the scores with the classes last."""
    check_scores(input, 0)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-dim tensor")
    classes = 0 if input.ndim == 1 else 1
    if input.shape[classes] == 0:
        raise ValueError(f"input must have at least one class, got shape {tuple(input.shape)}")
    samples = input.shape[:classes] + input.shape[classes + 1 :]
    if isinstance(alpha, Tensor) and alpha.ndim and alpha.shape == samples and input.ndim > 1:
        alpha = alpha.unsqueeze(classes)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.device != input.device:
        raise ValueError(f"target must be on the device of input, {input.device}, got {target.device}")
    expected = input.shape if target.is_floating_point() else samples
    if target.shape != expected:
        kind = "probabilities" if target.is_floating_point() else "class indices"
        raise ValueError(
            f"target of {kind} must have shape {tuple(expected)} for input {tuple(input.shape)}, "
            f"got {tuple(target.shape)}"
        )
    checked = row_parameter("alpha", alpha, above, input.shape, input.dtype, classes, subtract=subtract)
    return checked, to_last(promote(input), classes)


def _loss(
    conjugate: Conjugate,
    z: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    by_class: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`by_class`: the reduced loss for class indices, where there is a faster way to it."""
    classes = z.shape[-1]
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, int | float):
        raise TypeError(f"label_smoothing must be a number, got {type(label_smoothing).__name__}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    if target.is_floating_point() and ignore_index != -100:
        raise ValueError(f"ignore_index={ignore_index} has no meaning for probabilities as targets")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if weight is not None and (not isinstance(weight, Tensor) or weight.shape != (classes,)):
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must be a tensor of shape ({classes},), one per class, got {got}")
    if weight is not None and weight.device != z.device:
        raise ValueError(f"weight must be on the device of input, {z.device}, got {weight.device}")
    if target.is_floating_point():
        losses = probability_loss(conjugate, z, to_last(target, 0 if input.ndim == 1 else 1), weight, label_smoothing)
        count = torch.full((), float(losses.numel()), dtype=losses.dtype, device=losses.device)
    else:
        target = _check_indices(target, classes, ignore_index)
        if by_class is not None:
            return by_class(z, target, weight, ignore_index, label_smoothing, reduction)
        losses, counts = class_loss(conjugate, z, target, weight, ignore_index, label_smoothing)
        count = counts.sum()
    return reduced(losses, count, reduction).to(z.dtype)


def _check_indices(target: Tensor, classes: int, ignore_index: int) -> Tensor:
    if target.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"target must hold class indices or probabilities, got {target.dtype}")
    target = target.long()
    if values_known(target):
        outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(outside.any()):
            raise ValueError(f"target must lie in [0, {classes - 1}], got {target[outside][0].item()}")
    return target
