"""Checks and layout shared by the functions of rows.  Inner code trusts what has passed here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tamis.kernels.rows import ops as rows
from tamis.native import rows as native_rows
from tamis.transforms.dispatch import transforming
from tamis.transforms.parameters import broadcasts, cast, row_parameter, to_last, values_known

BACKENDS = ("auto", "reference", "native", "triton")


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


def chosen(backend: str, z: Tensor, e: float | Tensor) -> str:
    """Who computes entmax of these scores, with `dim` last: "reference", "native" or "triton"."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return backend
    if backend == "auto" and not z.is_cuda and not isinstance(e, Tensor) and e == 0.0:
        return "reference"  # nothing is faster than torch's own softmax
    name = backend if backend != "auto" else "triton" if z.is_cuda else "native"
    obstacle = rows.obstacle(z) if name == "triton" else _native_obstacle(z, e, backend == name)
    if obstacle is None:
        return name
    if backend == name:
        raise RuntimeError(f'backend="{name}": {obstacle}; backend="auto" takes the plain PyTorch path')
    return "reference"


def _native_obstacle(z: Tensor, e: float | Tensor, strict: bool) -> str | None:
    """Why the C++ kernels cannot compute all rows or, unless `strict`, any of them."""
    if (reason := native_rows.obstacle(z)) is not None:
        return reason
    if isinstance(e, Tensor):
        fits = not strict or not values_known(e) or bool(native_rows.fits(e).all())
    else:
        fits = native_rows.fits(e)
    return None if fits else "the C++ kernels are for alpha in [1, 2]"


def takes_fused_loss(name: str, e: float | Tensor) -> bool:
    """Whether losses of rows that `name` computes run without weights being stored."""
    if name != "native":
        return name == "triton"
    if transforming() is not None:
        return False
    return bool(native_rows.fits(e).all()) if isinstance(e, Tensor) and values_known(e) else not isinstance(e, Tensor)


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
