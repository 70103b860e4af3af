"""The kernels as operations of torch: opaque to torch.compile, with shapes, a gradient, and no synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.kernels.arguments import SCHEMA, Arguments, empty_gradients, empty_results


@torch.library.custom_op(
    "tamis::attend_forward", mutates_args=(), schema=f"({SCHEMA}, bool train) -> (Tensor, Tensor, Tensor)"
)
def attend_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from tamis.kernels import launch

    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        return launch.forward(Arguments(*arguments[:-1]), arguments[-1])


@attend_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(Arguments(*arguments[:-1]), arguments[-1])


@torch.library.custom_op(
    "tamis::attend_backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor grad, Tensor out2, Tensor rows, bool with_e) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attend_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tamis.kernels import launch

    with torch.cuda.device_of(arguments[0]):
        return launch.backward(Arguments(*arguments[:-4]), *arguments[-4:])


@attend_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(Arguments(*arguments[:-4]), arguments[-1])


class Attend(torch.autograd.Function):
    """The two operations as one with a gradient: `register_autograd` would cost a third of a millisecond per call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, out2, rows = attend_forward(*arguments)
        ctx.save_for_backward(out2, rows, *(x if isinstance(x, Tensor) else None for x in arguments))
        ctx.others = [None if isinstance(x, Tensor) else x for x in arguments[:-1]]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        out2, rows, *tensors = ctx.saved_tensors
        arguments = [x if x is not None else other for x, other in zip(tensors, ctx.others, strict=False)]
        with_e = ctx.needs_input_grad[3]
        dq, dk, dv, de = attend_backward(*arguments, grad, out2, rows, with_e)
        return dq, dk, dv, de if with_e else None, *(None,) * (len(ctx.others) - 3)
