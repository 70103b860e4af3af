"""Checks and layout shared by the public functions.  Inner code trusts what has passed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tamis.attention.checks import values_known
from tamis.kernels import rows_ops
from tamis.transforms.solver import compute_dtype

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


def to_last(x: Tensor, dim: int) -> Tensor:
    """x with `dim` last.  A view that changes nothing still costs, above all in the backward pass."""
    return x if dim == x.ndim - 1 else x.movedim(dim, -1)


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
    obstacle = rows_ops.obstacle(z)
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


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # a call that changes nothing still costs


def broadcasts(shape: Any, target: Any) -> bool:
    if len(shape) > len(target):
        return False
    # Not `have in (1, want)`: torch.compile takes that for False where `want` is symbolic.
    return all(have == 1 or have == want for have, want in zip(reversed(shape), reversed(target), strict=False))


def exponent(alpha: float | Tensor, input: Tensor, dim: int) -> float | Tensor:
    """alpha - 1, subtracted before any rounding to fp32."""
    return row_parameter("alpha", alpha, 0.0, input.shape, input.dtype, dim, subtract=1.0)


def row_parameter(
    name: str,
    value: float | Tensor,
    above: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    dim: int,
    *,
    subtract: float = 0.0,
) -> float | Tensor:
    """A parameter per row of scores: a checked number, or a tensor (..., 1) with as many dims, `dim` last."""
    if isinstance(value, Tensor):
        return _tensor_parameter(name, value, above, shape, dtype, dim, subtract)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be a finite number above {above:g}, got {value}")
    return float(value) - subtract


def _tensor_parameter(
    name: str, value: Tensor, above: float, scores: Sequence[int], dtype: torch.dtype, dim: int, subtract: float
) -> Tensor:
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
    reduced = list(scores) or [1]
    ndim = len(reduced)
    reduced[dim] = 1
    per_head = value.ndim == 1 and ndim == 4 and dim == 3
    shape = (1, *value.shape, 1, 1) if per_head else (*(1,) * (ndim - value.ndim), *value.shape)
    if not broadcasts(shape, reduced):
        expected = f"one per head ({scores[1]},) or " if per_head else ""
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} does not fit input {tuple(scores)} and dim {dim}: "
            f"expected {expected}a shape that broadcasts to {tuple(reduced)}"
        )
    if values_known(value) and value.numel() and not bool(((value > above) & (value < math.inf)).all()):
        bad = value.detach()[~((value > above) & (value < math.inf))].flatten()[0].item()
        raise ValueError(f"{name} must be finite and above {above:g} everywhere, got {bad:g}")
    if compute_dtype(value.dtype) != value.dtype:
        value = value.float()
    value = value if value.shape == shape else value.reshape(shape)
    return to_last(cast(value - subtract, compute_dtype(dtype)), dim)
