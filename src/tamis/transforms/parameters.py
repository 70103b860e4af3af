"""Parameters of rows, such as alpha: a number, or a tensor that is brought into one form."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tamis.settings import shown
from tamis.transforms.solver import compute_dtype


def row_parameter(
    name: str,
    value: float | Tensor,
    above: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    dim: int,
    *,
    subtract: float = 0.0,
    inclusive: bool = False,
) -> float | Tensor:
    """A parameter per row of scores: a checked number, or a tensor (..., 1) with as many dims, `dim` last.

    It lies above a bound, or on it where that is `inclusive`.
    """
    bound = f"{'at least' if inclusive else 'above'} {above:g}"
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")
        if values_known(value):
            wrong = ~((value >= above if inclusive else value > above) & (value < math.inf))
            if bool(wrong.any()):
                bad = value.detach()[wrong].flatten()[0].item()
                raise ValueError(f"{name} must be finite and {bound} everywhere, got {bad:g}")
        return _tensor_parameter(name, value, shape, dtype, dim, subtract)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not (above <= value if inclusive else above < value) or not value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number {'of ' * inclusive}{bound}, got {shown(value)}")
    return float(value) - subtract


def number(name: str, value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> float:
    """A number that is no parameter: a tensor would lose its gradient, so none is taken."""
    if isinstance(value, torch.SymFloat | torch.SymInt):  # torch.compile may know it as a symbol only
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number, got a tensor: it would have no gradient")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not low <= found <= high:
        bound = "be finite" if low == -sys.float_info.max else f"be finite and at least {low:g}"
        wanted = bound if high == sys.float_info.max else f"lie in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must {wanted}, got {shown(value)}")
    return found


def switch(name: str, value: Any) -> bool:
    """True or False, and not what Python takes for it."""
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value  # type: ignore[return-value]


def _tensor_parameter(
    name: str, value: Tensor, scores: Sequence[int], dtype: torch.dtype, dim: int, subtract: float
) -> Tensor:
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
    if compute_dtype(value.dtype) != value.dtype:
        value = value.float()
    value = value if value.shape == shape else value.reshape(shape)
    return to_last(cast(value - subtract, compute_dtype(dtype)), dim)


def values_known(x: Tensor) -> bool:
    """Whether looking at the values costs no synchronisation and is possible at all."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def broadcasts(shape: Any, target: Any) -> bool:
    if len(shape) > len(target):
        return False
    # Not `have in (1, want)`: torch.compile takes that for False where `want` is symbolic.
    return all(have == 1 or have == want for have, want in zip(reversed(shape), reversed(target), strict=False))


def to_last(x: Tensor, dim: int) -> Tensor:
    """x with `dim` last.  A view that changes nothing still costs, above all in the backward pass."""
    return x if dim == x.ndim - 1 else x.movedim(dim, -1)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # a call that changes nothing still costs
