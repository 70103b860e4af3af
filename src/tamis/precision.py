"""Parameters that half precision would spoil, and what autocast does to activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
