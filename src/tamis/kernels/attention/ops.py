"""Attention as operations of torch: opaque to torch.compile, with shapes, a gradient, and no synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.kernels.attention.arguments import SCHEMA, Arguments, empty_gradients, empty_results
from tamis.kernels.runtime.support import unwatched


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from tamis.kernels.attention import launch

    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        return launch.forward(Arguments(*arguments[:-1]), arguments[-1])


attend_forward = torch.library.custom_op(
    "tamis::attend_forward",
    _forward,
    mutates_args=(),
    schema=f"({SCHEMA}, bool train) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@attend_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_results(Arguments(*arguments[:-1]), arguments[-1])


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tamis.kernels.attention import launch

    with torch.cuda.device_of(arguments[0]):
        return launch.backward(Arguments(*arguments[:-5]), *arguments[-5:])


attend_backward = torch.library.custom_op(
    "tamis::attend_backward",
    _backward,
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor grad, Tensor out2, Tensor rows, Tensor bits, bool with_e)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@attend_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(Arguments(*arguments[:-5]), arguments[-1])


def attend(arguments: Arguments, train: bool) -> tuple[Tensor, Tensor]:
    """The output, with a gradient if `train`, and the rows' statistics, if they are counted."""
    if train:
        return Attend.apply(*arguments, train)
    forward = _forward if unwatched(arguments.query) else attend_forward
    out, *_, statistics = forward(*arguments, train)
    return out, statistics


class Attend(torch.autograd.Function):
    """The two operations as one with a gradient: `register_autograd` would cost a third of a millisecond per call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, out2, rows, bits, statistics = (_forward if unwatched(arguments[0]) else attend_forward)(*arguments)
        ctx.save_for_backward(out2, rows, bits, *(x if isinstance(x, Tensor) else None for x in arguments))
        ctx.others = [None if isinstance(x, Tensor) else x for x in arguments[:-1]]
        ctx.mark_non_differentiable(statistics)
        return out, statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        out2, rows, bits, *tensors = ctx.saved_tensors
        arguments = [x if x is not None else other for x, other in zip(tensors, ctx.others, strict=False)]
        with_e = ctx.needs_input_grad[3]
        backward = _backward if unwatched(grad) else attend_backward
        dq, dk, dv, de = backward(*arguments, grad, out2, rows, bits, with_e)
        return dq, dk, dv, de if with_e else None, *(None,) * (len(ctx.others) - 3)
