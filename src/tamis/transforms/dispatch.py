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


def is_mapped(x: Tensor) -> bool:
    """Whether `torch.vmap` has this tensor stand for many, within other transforms or not."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def differentiating_forward() -> bool:
    """Whether forward-mode derivatives are taken, by `torch.func.jvp` for example."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def transforming() -> str | None:
    """Who differentiates in a way that no kernel has, or None."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.peek_interpreter_stack() is None and not differentiating_forward():
        return None
    return "torch.func transforms and forward-mode derivatives need the plain operations"
