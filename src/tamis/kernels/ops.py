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

    return launch.backward(Arguments(*arguments[:-4]), *arguments[-4:])


@attend_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(Arguments(*arguments[:-4]))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(output[1], output[2], *tensors)
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs[:-1]]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
    nothing = (None,) * (len(ctx.others) + 1)
    if grad is None:
        return nothing
    out2, rows, *tensors = ctx.saved_tensors
    arguments = [x if x is not None else other for x, other in zip(tensors, ctx.others, strict=False)]
    with_e = ctx.needs_input_grad[3]
    dq, dk, dv, de = attend_backward(*arguments, grad, out2, rows, with_e)
    return dq, dk, dv, de if with_e else None, *nothing[4:]


attend_forward.register_autograd(_backward, setup_context=_setup_context)
