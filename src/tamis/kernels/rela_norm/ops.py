"""The norm of ReLA as operations of torch: when its kernels can run, launching them, and its gradients.

Triton is imported by the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tamis.kernels.runtime.support import dense, empty_like, tensor_obstacle, unwatched

Plain = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
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


def rela_norm(z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, plain: Plain) -> Tensor:
    """(..., channels) in the dtype of z; gain and gate (channels,) or None.

    `plain` is the same in plain operations, for second derivatives.
    """
    return _RelaNorm.apply(z, gain, gate, epsilon, plain)


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


class _RelaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, plain: Plain) -> Tensor:
        ctx.save_for_backward(z, gain, gate)
        ctx.epsilon, ctx.plain = epsilon, plain
        return (_forward if unwatched(z) else norm_forward)(z, gain, gate, epsilon)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        leaves, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # somebody will differentiate this again
            wanted = [x for x, own in zip(leaves, needed, strict=True) if own]
            found = iter(torch.autograd.grad(ctx.plain(*leaves), wanted, dy, create_graph=True))
            return *(next(found) if own else None for own in needed), None, None
        z, gain, gate = leaves
        gradients = (_backward if unwatched(dy) else norm_backward)(z, gain, gate, ctx.epsilon, dy)
        return *(x if own else None for x, own in zip(gradients, needed, strict=True)), None, None
