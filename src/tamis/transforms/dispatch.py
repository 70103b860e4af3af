"""Who stands between a call and its operations: a compiler, a mode, a transform of torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def unwatched(x: Tensor) -> bool:
    """Whether nobody sees the difference between an operation and its implementation: no compiler, mode or subclass.

    The way through the dispatcher takes the host longer than all the rest of a call.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not is_batched(x)


def is_batched(x: Tensor) -> bool:
    """Whether this is many gradients at once, as `torch.autograd.grad(..., is_grads_batched=True)` hands them on."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(x)


def forward_mode() -> bool:
    """Whether somebody takes derivatives in forward mode."""
    if torch.compiler.is_compiling():
        return False
    jvp, levels = torch._C._functorch.TransformType.Jvp, torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() == jvp for level in levels)


def is_mapped(x: Tensor) -> bool:
    """Whether `torch.vmap` has this tensor stand for many, within other transforms or not."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def transforming() -> str | None:
    """Who differentiates in a way that no kernel has, or None."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.peek_interpreter_stack() is None and not forward_mode():
        return None
    return "torch.func transforms and forward-mode derivatives need the plain operations"
