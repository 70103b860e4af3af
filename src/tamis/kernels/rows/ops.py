"""Row transforms as operations of torch: when the kernels can run, launching them, and their gradients.

Opaque to torch.compile, without synchronisation.  What is asked for a second derivative gets it from the plain
operations of `tamis.transforms`.  Triton is imported by the first launch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tamis.kernels.runtime.support import empty_like, tensor_obstacle, unwatched
from tamis.transforms import losses
from tamis.transforms.entmax import (
    curvature,
    entmax_conjugate,
    entmax_vjp,
    entmax_weights,
    is_free,
    limited,
    reduce_to,
)
from tamis.transforms.solver import Power

MAX_WIDTH = 131072
STATE, LOSS_STATE = 4, 7
"""Numbers of a row that are kept for the backward pass, see `tamis.kernels.rows.device.state`."""


def obstacle(z: Tensor) -> str | None:
    """Why no kernel can take these scores, or None."""
    if (reason := tensor_obstacle(z)) is not None:
        return reason
    if z.shape[-1] > MAX_WIDTH:
        return f"rows go up to {MAX_WIDTH} scores, got {z.shape[-1]}"
    return None


def weights(z: Tensor, e: Power) -> Tensor:
    """What `entmax_weights` gives, in the dtype of z."""
    tensor, value = _parts(e)
    if torch.is_grad_enabled() and (z.requires_grad or (tensor is not None and tensor.requires_grad)):
        return _Weights.apply(z, tensor, value)
    return (_forward if unwatched(z) else weights_forward)(z, tensor, value)[0]


def conjugate(z: Tensor, e: Power) -> Tensor:
    """What `entmax_conjugate` gives."""
    tensor, value = _parts(e)
    return _Conjugate.apply(z, tensor, value)


def class_loss(
    e: Power,
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """What `losses.class_loss` gives, reduced, in the dtype of z; `weight` gets no gradient."""
    tensor, value = _parts(e)
    return _ClassLoss.apply(z, tensor, value, target, weight, ignore_index, label_smoothing, reduction)


def _parts(e: Power) -> tuple[Tensor | None, float]:
    """A tensor, whose values the kernels keep between their limits, or a number."""
    return (e, 0.0) if isinstance(e, Tensor) else (None, float(limited(e)))


# ---------------------------------------------------------------------------------------------------------------
# Operations


def _empty_weights(z: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(z), z.new_empty((STATE, *z.shape[:-1]), dtype=torch.float32)


def _empty_losses(z: Tensor) -> tuple[Tensor, Tensor]:
    shape = z.shape[:-1]
    return z.new_empty(shape, dtype=torch.float32), z.new_empty((LOSS_STATE, *shape), dtype=torch.float32)


def _empty_gradients(source: Tensor, with_e: bool) -> tuple[Tensor, Tensor]:
    shape = (*source.shape[:-1], 1) if with_e else (0,)
    return empty_like(source), source.new_empty(shape, dtype=torch.float32)


def _forward(z: Tensor, e: Tensor | None, e_value: float) -> tuple[Tensor, Tensor]:
    """Weights (..., n) in the dtype of z, and the states of the rows, (4, ...)."""
    from tamis.kernels.rows import launch

    p, state = _empty_weights(z)
    if z.numel():
        with torch.cuda.device_of(z):  # Triton launches on the current device
            launch.solve(z, e, e_value, p, state)
    return p, state


def _backward(
    source: Tensor, state: Tensor, g: Tensor, e: Tensor | None, e_value: float, from_p: bool, with_e: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the scores and, per row, that of alpha (empty unless asked for)."""
    from tamis.kernels.rows import launch

    dz, de = _empty_gradients(source, with_e)
    if source.numel() == 0:
        return dz, de.zero_()
    with torch.cuda.device_of(source):
        launch.gradient(source, state, g, dz, de, e, e_value, from_p, with_e)
    return dz, de


def _loss_forward(
    z: Tensor,
    e: Tensor | None,
    e_value: float,
    target: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    with_e: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of the rows, or without a target their conjugates, (...), and their states, (7, ...)."""
    from tamis.kernels.rows import launch

    values, state = _empty_losses(z)
    if z.numel():
        loss = launch.Loss(target, weight, ignore_index, label_smoothing)
        with torch.cuda.device_of(z):
            launch.solve(z, e, e_value, None, state, values, loss, with_e)
    return values, state


def _loss_backward(
    z: Tensor,
    state: Tensor,
    g: Tensor,
    e: Tensor | None,
    e_value: float,
    target: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    with_e: bool,
) -> tuple[Tensor, Tensor]:
    """What `_backward` gives, of the losses.  g: one number for all, or (...)."""
    from tamis.kernels.rows import launch

    dz, de = _empty_gradients(z, with_e)
    if z.numel() == 0:
        return dz, de.zero_()
    loss = launch.Loss(target, weight, ignore_index, label_smoothing)
    with torch.cuda.device_of(z):
        launch.loss_gradient(z, state, g, dz, de, e, e_value, loss, with_e)
    return dz, de


weights_forward = torch.library.custom_op("tamis::rows_forward", _forward, mutates_args=())
weights_forward.register_fake(lambda z, *_: _empty_weights(z))
weights_backward = torch.library.custom_op("tamis::rows_backward", _backward, mutates_args=())
weights_backward.register_fake(lambda source, *others: _empty_gradients(source, others[-1]))
loss_forward = torch.library.custom_op("tamis::rows_loss_forward", _loss_forward, mutates_args=())
loss_forward.register_fake(lambda z, *_: _empty_losses(z))
loss_backward = torch.library.custom_op("tamis::rows_loss_backward", _loss_backward, mutates_args=())
loss_backward.register_fake(lambda z, *others: _empty_gradients(z, others[-1]))


# ---------------------------------------------------------------------------------------------------------------
# autograd


class _Weights(torch.autograd.Function):
    """fp32 weights are all that the backward pass needs; weights of 16 bits are computed again from the scores."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, e: Tensor | None, e_value: float) -> Tensor:
        p, state = (_forward if unwatched(z) else weights_forward)(z, e, e_value)
        ctx.from_p = z.dtype == torch.float32
        ctx.e_value = e_value
        ctx.save_for_backward(p if ctx.from_p else z, state, e)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        source, state, e = ctx.saved_tensors
        with_e = ctx.needs_input_grad[1]
        if torch.is_grad_enabled():  # somebody will differentiate this again
            power: Power = ctx.e_value if e is None else limited(e)
            p = source if ctx.from_p else entmax_weights(source, power)
            floor = torch.where(state[0] == math.inf, math.inf, 0.0).unsqueeze(-1)
            dz = entmax_vjp(p, power, floor, g.to(p.dtype))
            de = None
            if with_e:
                de = torch.where(is_free(e), -(curvature(p, power) * dz).sum(-1, keepdim=True), 0.0)
            dz = dz.to(source.dtype)
        else:
            backward = _backward if unwatched(g) else weights_backward
            dz, de = backward(source, state, g, e, ctx.e_value, ctx.from_p, with_e)
        return dz, reduce_to(de, e) if with_e else None, None  # type: ignore[arg-type]


class _Conjugate(torch.autograd.Function):
    """(z, e) -> conjugates (..., 1), of rows whose largest score is 0."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, e: Tensor | None, e_value: float) -> Tensor:
        run = _loss_forward if unwatched(z) else loss_forward
        values, state = run(z, e, e_value, None, None, 0, 0.0, ctx.needs_input_grad[1])
        ctx.e_value = e_value
        ctx.save_for_backward(z, state, e)
        return values.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, state, e = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, z, e, lambda power: entmax_conjugate(z, power), g)
        with_e = ctx.needs_input_grad[1]
        run = _loss_backward if unwatched(g) else loss_backward
        dz, de = run(z, state, g.squeeze(-1), e, ctx.e_value, None, None, 0, 0.0, with_e)
        return dz, reduce_to(de, e) if with_e else None, None


class _ClassLoss(torch.autograd.Function):
    """The reduced loss of samples: z (..., classes), target (...)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        e: Tensor | None,
        e_value: float,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
    ) -> Tensor:
        run = _loss_forward if unwatched(z) else loss_forward
        values, state = run(z, e, e_value, target, weight, ignore_index, label_smoothing, ctx.needs_input_grad[1])
        count = state[5].sum() if reduction == "mean" else None
        ctx.save_for_backward(z, state, e, target, weight, count)
        ctx.e_value, ctx.reduction = e_value, reduction
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        loss = losses.reduced(values, count, reduction)
        return loss if loss.dtype == z.dtype else loss.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, state, e, target, weight, count = ctx.saved_tensors
        options = (target, weight, ctx.ignore_index, ctx.label_smoothing)
        if torch.is_grad_enabled():

            def plain(power: Power) -> Tensor:
                values, counts = losses.class_loss(functools.partial(entmax_conjugate, e=power), z, *options)
                return losses.reduced(values, counts.sum(), ctx.reduction).to(z.dtype)

            return *_plain_gradients(ctx, z, e, plain, g), None, None, None, None, None
        with_e = ctx.needs_input_grad[1]
        if count is not None:
            g = g / count
        run = _loss_backward if unwatched(g) else loss_backward
        dz, de = run(z, state, g, e, ctx.e_value, *options, with_e)
        return dz, reduce_to(de, e) if with_e else None, None, None, None, None, None, None


def _plain_gradients(ctx: Any, z: Tensor, e: Tensor | None, plain: Any, g: Tensor) -> Any:
    """Gradients in z and e that can be differentiated again, through the plain operations."""
    needed = [x for x, wanted in zip((z, e), ctx.needs_input_grad, strict=False) if wanted and x is not None]
    found = iter(torch.autograd.grad(plain(ctx.e_value if e is None else limited(e)), needed, g, create_graph=True))
    return *(next(found) if wanted else None for wanted in ctx.needs_input_grad[:2]), None
