"""Checks and layout shared by the functions of rows.  Inner code trusts what has passed here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tamis.kernels.rows import ops as rows
from tamis.transforms.parameters import broadcasts, cast, row_parameter, to_last

BACKENDS = ("auto", "reference", "triton")


def prepare(input: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, int]:
    """The scores with `dim` last and masked ones at -inf, and `dim` counted from the front."""
    dim = check_scores(input, dim)
    z = promote(input)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor (True = keep), got {kind}")
        if not broadcasts(mask.shape, input.shape):
            raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to input {tuple(input.shape)}")
        z = torch.where(mask, z, -math.inf)
    return (to_last(z, dim) if z.ndim else z.reshape(1)), dim


def restore(weights: Tensor, input: Tensor, dim: int) -> Tensor:
    """Weights back in the layout of `input`, and in its dtype (fp32 under autocast)."""
    weights = cast(weights, promoted(input))
    if input.ndim == 0:
        return weights.reshape(())
    if dim == input.ndim - 1:
        return weights
    weights = weights.movedim(-1, dim)
    return weights.contiguous() if input.is_contiguous() else weights


def takes_kernel(backend: str, z: Tensor) -> bool:
    """Whether a row transform of these scores, with `dim` last, runs as a fused kernel."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference" or (backend == "auto" and not z.is_cuda):
        return False
    obstacle = rows.obstacle(z)
    if obstacle is not None and backend == "triton":
        raise RuntimeError(f'backend="triton": {obstacle}; backend="auto" takes the plain PyTorch path')
    return obstacle is None


def check_scores(input: Tensor, dim: int) -> int:
    if not isinstance(input, Tensor) or not input.is_floating_point():
        kind = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be a floating-point tensor, got {kind}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    ndim = max(input.ndim, 1)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must lie in [{-ndim}, {ndim - 1}] for input of shape {tuple(input.shape)}, got {dim}")
    return dim % ndim


def promote(input: Tensor) -> Tensor:
    return cast(input, promoted(input))


def promoted(input: Tensor) -> torch.dtype:
    """Under autocast these functions run in fp32."""
    if input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(input.device.type):
        return torch.float32
    return input.dtype


def exponent(alpha: float | Tensor, input: Tensor, dim: int) -> float | Tensor:
    """alpha - 1, subtracted before any rounding to fp32."""
    return row_parameter("alpha", alpha, 0.0, input.shape, input.dtype, dim, subtract=1.0)
