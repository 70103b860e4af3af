"""The norm of ReLA as operations of torch: when its kernels can run, launching them, and its gradients.

On CPUs the C++ kernel stands behind the same gradients.  Triton is imported by the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.kernels.runtime.support import dense, empty_like, tensor_obstacle, unwatched
from tamis.native import rela_norm as native
from tamis.transforms.dispatch import transforming

Plain = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class Worker(NamedTuple):
    """Who computes the norm, (z, gain, gate, epsilon) to y, and its gradients, with dy to those of z, gain and gate."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


MAX_CHANNELS = 8192
"""Channels of a row at most: one program holds them in registers."""


def obstacle(z: Tensor) -> str | None:
    """Why no kernel can take these rows, or None."""
    if (reason := tensor_obstacle(z)) is not None:
        return reason
    if torch.compiler.is_compiling():
        return "a compiler makes a kernel of the plain operations itself"
    if z.shape[-1] > MAX_CHANNELS:
        return f"rows go up to {MAX_CHANNELS} channels, got {z.shape[-1]}"
    return None


def worker(z: Tensor) -> Worker | None:
    """Who computes the norm of these rows; None: the plain operations do."""
    if z.is_cuda:
        return TRITON if obstacle(z) is None else None
    return NATIVE if unwatched(z) and transforming() is None and native.obstacle(z) is None else None


def rela_norm(
    z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, plain: Plain, by: Worker | None = None
) -> Tensor:
    """(..., channels) in the dtype of z; gain and gate (channels,) or None.

    `plain` is the same in plain operations, for second derivatives.  By the kernels for GPUs unless said otherwise.
    """
    return _RelaNorm.apply(z, gain, gate, epsilon, plain, by or TRITON)


def _forward(z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float) -> Tensor:
    from tamis.kernels.rela_norm import launch

    y = empty_like(z)
    if z.numel():
        with torch.cuda.device_of(z):  # Triton launches on the current device
            launch.forward(z.contiguous(), dense(gain), dense(gate), epsilon, y)
    return y


def _backward(
    z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, gain and gate; empty for those that are not there."""
    from tamis.kernels.rela_norm import launch

    dz, dgain, dgate = _empty_gradients(z, gain, gate)
    if z.numel() == 0:
        return dz, dgain.zero_(), dgate.zero_()
    with torch.cuda.device_of(z):
        launch.backward(z.contiguous(), dense(gain), dense(gate), epsilon, dy.contiguous(), dz, dgain, dgate)
    return dz, dgain, dgate


def _empty_gradients(z: Tensor, gain: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dgain, dgate = (z.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in (gain, gate))
    return empty_like(z), dgain, dgate


norm_forward = torch.library.custom_op("tamis::rela_norm_forward", _forward, mutates_args=())
norm_forward.register_fake(lambda z, *_: empty_like(z))
norm_backward = torch.library.custom_op("tamis::rela_norm_backward", _backward, mutates_args=())
norm_backward.register_fake(lambda z, gain, gate, *_: _empty_gradients(z, gain, gate))


TRITON = Worker(
    lambda z, *others: (_forward if unwatched(z) else norm_forward)(z, *others),
    lambda *others: (_backward if unwatched(others[-1]) else norm_backward)(*others),
)
NATIVE = Worker(native.forward, native.backward)


class _RelaNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, plain: Plain, by: Worker
    ) -> Tensor:
        ctx.save_for_backward(z, gain, gate)
        ctx.epsilon, ctx.plain, ctx.by = epsilon, plain, by
        return by.forward(z, gain, gate, epsilon)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        leaves, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled()  # somebody will differentiate this again
        if again or (ctx.by is NATIVE and not unwatched(dy)):
            wanted = [x for x, own in zip(leaves, needed, strict=True) if own]
            with torch.enable_grad():
                y = ctx.plain(*leaves)
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again))
            return *(next(found) if own else None for own in needed), None, None, None
        gradients = ctx.by.backward(*leaves, ctx.epsilon, dy)
        return *(x if own else None for x, own in zip(gradients, needed, strict=True)), None, None, None
