"""Row transforms as operations of torch: when the GPU kernels can run, launching them, and their gradients.

The losses have kernels for CPUs too; weights by those are in `tamis.transforms.entmax`.  Opaque to torch.compile,
without synchronisation.  What is asked for a second derivative gets it from the plain operations of
`tamis.transforms`.  Triton is imported by the first launch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tamis.kernels.runtime.support import empty_like, tensor_obstacle, unwatched
from tamis.native import rows as native_rows
from tamis.transforms import losses
from tamis.transforms.dispatch import is_batched
from tamis.transforms.entmax import (
    curvature,
    entmax_conjugate,
    entmax_vjp,
    entmax_weights,
    is_free,
    limited,
    power_rows,
    reduce_to,
)
from tamis.transforms.solver import Power, compute_dtype

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


def conjugate(z: Tensor, e: Power, native: bool = False) -> Tensor:
    """What `entmax_conjugate` gives; `native`: on a CPU, for alphas in [1, 2]."""
    tensor, value = _parts(e)
    return _Conjugate.apply(z, tensor, value, native)


def class_loss(
    e: Power,
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    native: bool = False,
) -> Tensor:
    """What `losses.class_loss` gives, reduced, in the dtype of z; `weight` gets no gradient."""
    tensor, value = _parts(e)
    return _ClassLoss.apply(z, tensor, value, target, weight, ignore_index, label_smoothing, reduction, native)


def _parts(e: Power) -> tuple[Tensor | None, float]:
    """A tensor, whose values the kernels keep between their limits, or a number."""
    return (e, 0.0) if isinstance(e, Tensor) else (None, float(limited(e)))


# ---------------------------------------------------------------------------------------------------------------
# Operations


def _empty_weights(z: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(z), z.new_empty((STATE, *z.shape[:-1]), dtype=torch.float32)


def _empty_losses(z: Tensor) -> tuple[Tensor, Tensor]:
    shape, dtype = z.shape[:-1], compute_dtype(z.dtype)
    return z.new_empty(shape, dtype=dtype), z.new_empty((LOSS_STATE, *shape), dtype=dtype)


def _empty_gradients(source: Tensor, with_e: bool) -> tuple[Tensor, Tensor]:
    shape = (*source.shape[:-1], 1) if with_e else (0,)
    return empty_like(source), source.new_empty(shape, dtype=compute_dtype(source.dtype))


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
    native: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of the rows, or without a target their conjugates, (...), and their states, (7, ...)."""
    values, state = _empty_losses(z)
    if z.numel() and native:
        options = native_rows.Loss(target, weight, ignore_index, label_smoothing)
        found = native_rows.losses(z.reshape(-1, z.shape[-1]), power_rows(z, e, e_value), options, with_e)
        return found[0].view_as(values), found[1].view_as(state)
    if z.numel():
        from tamis.kernels.rows import launch

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
    native: bool,
) -> tuple[Tensor, Tensor]:
    """What `_backward` gives, of the losses.  g: one number for all, or (...)."""
    if z.numel() and native:
        options = native_rows.Loss(target, weight, ignore_index, label_smoothing)
        rows = z.reshape(-1, z.shape[-1]), state.reshape(LOSS_STATE, -1), g.reshape(-1), power_rows(z, e, e_value)
        dz, de = native_rows.loss_gradient(*rows, options, with_e)
        return dz.view(z.shape).to(z.dtype), de.view(*z.shape[:-1], 1) if with_e else de.new_empty(0)
    dz, de = _empty_gradients(z, with_e)
    if z.numel() == 0:
        return dz, de.zero_()
    from tamis.kernels.rows import launch

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
loss_backward.register_fake(lambda z, *others: _empty_gradients(z, others[-2]))


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
    def forward(ctx: Any, z: Tensor, e: Tensor | None, e_value: float, native: bool) -> Tensor:
        run = _loss_forward if unwatched(z) else loss_forward
        values, state = run(z, e, e_value, None, None, 0, 0.0, ctx.needs_input_grad[1], native)
        ctx.e_value, ctx.native = e_value, native
        ctx.save_for_backward(z, state, e)
        return values.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, state, e = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(g):
            return *_plain_gradients(ctx, z, e, lambda power: entmax_conjugate(z, power, ctx.native), g), None
        with_e = ctx.needs_input_grad[1]
        run = _loss_backward if unwatched(g) else loss_backward
        dz, de = run(z, state, g.squeeze(-1), e, ctx.e_value, None, None, 0, 0.0, with_e, ctx.native)
        return dz, reduce_to(de, e) if with_e else None, None, None


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
        native: bool,
    ) -> Tensor:
        run = _loss_forward if unwatched(z) else loss_forward
        options = (target, weight, ignore_index, label_smoothing)
        values, state = run(z, e, e_value, *options, ctx.needs_input_grad[1], native)
        count = state[5].sum() if reduction == "mean" else None
        ctx.save_for_backward(z, state, e, target, weight, count)
        ctx.e_value, ctx.reduction, ctx.native = e_value, reduction, native
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        loss = losses.reduced(values, count, reduction)
        return loss if loss.dtype == z.dtype else loss.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, state, e, target, weight, count = ctx.saved_tensors
        options = (target, weight, ctx.ignore_index, ctx.label_smoothing)
        if torch.is_grad_enabled() or is_batched(g):

            def plain(power: Power) -> Tensor:
                conjugate = functools.partial(entmax_conjugate, e=power, native=ctx.native)
                values, counts = losses.class_loss(conjugate, z, *options)
                return losses.reduced(values, counts.sum(), ctx.reduction).to(z.dtype)

            return *_plain_gradients(ctx, z, e, plain, g), None, None, None, None, None, None
        with_e = ctx.needs_input_grad[1]
        if count is not None:
            g = g / count
        run = _loss_backward if unwatched(g) else loss_backward
        dz, de = run(z, state, g, e, ctx.e_value, *options, with_e, ctx.native)
        return dz, reduce_to(de, e) if with_e else None, None, None, None, None, None, None, None


def _plain_gradients(ctx: Any, z: Tensor, e: Tensor | None, plain: Any, g: Tensor) -> Any:
    """Gradients in z and e that can be differentiated again, or are many at once, through the plain operations."""
    needed = [x for x, wanted in zip((z, e), ctx.needs_input_grad, strict=False) if wanted and x is not None]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        value = plain(ctx.e_value if e is None else limited(e))
    found = iter(torch.autograd.grad(value, needed, g, create_graph=again))
    return *(next(found) if wanted else None for wanted in ctx.needs_input_grad[:2]), None
