"""Parameters that half precision would spoil, and what autocast does to activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """Its tensors stay fp32 when the model around it is cast to half precision: alphas, gains, gates, slopes."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep, recurse)


def for_products(x: Tensor) -> Tensor:
    """x as autocast will have it in every matrix product: cast once, where several products read it."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def precise_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear map in the precision of its weight, under autocast too; its gradients are there made of half-precision
    products, as those of all other layers are."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return F.linear(x.to(weight.dtype), weight, bias)
    result: Tensor = _PreciseLinear.apply(x, weight, bias, torch.get_autocast_dtype(device))
    return result


class _PreciseLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(weight.dtype), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.dtype = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounded = grad.to(ctx.dtype)
        with torch.autocast(x.device.type, enabled=False):
            dx = rounded @ weight.to(ctx.dtype)
            dweight = rounded.flatten(0, -2).mT @ x.to(ctx.dtype).flatten(0, -2)
        return dx.to(x.dtype), dweight.to(weight.dtype), grad.flatten(0, -2).sum(0), None
