"""alpha-entmax of rows, its gradients and its losses, by the C++ kernels.  Plain tensors in, plain tensors out.

e = alpha - 1, between 0 and 1: a number, or one per row (rows, 1).
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from tamis.native import library

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
KEPT = 7
"""Numbers of a row that its loss keeps for the backward pass, see cpp/loss.cpp."""

Exponent = float | Tensor


class Loss(NamedTuple):
    """What a loss is of: class indices (rows,), or None for the conjugate alone, and weights (classes,) or None."""

    target: Tensor | None = None
    weight: Tensor | None = None
    ignore_index: int = 0
    label_smoothing: float = 0.0


def obstacle(z: Tensor) -> str | None:
    """Why the kernels cannot take these scores, or None."""
    if z.device.type != "cpu":
        return f"the C++ kernels are for CPUs, and the inputs are on {z.device.type}"
    if (reason := library.missing()) is not None:
        return f"no C++ kernels were loaded ({reason})"
    return None if z.dtype in DTYPES else f"the C++ kernels are for fp16, bf16, fp32 and fp64, not for {z.dtype}"


@overload
def fits(e: Tensor) -> Tensor: ...
@overload
def fits(e: float) -> bool: ...
def fits(e: Exponent) -> Tensor | bool:
    """Whether, or where, alpha lies in [1, 2]."""
    return (e >= 0.0) & (e <= 1.0)


def solve(z: Tensor, e: Exponent) -> tuple[Tensor, Tensor]:
    """The weights of rows (rows, n) in the compute dtype, and the floor (rows, 1) that `solve_rows` gives too."""
    z = _in_order(z)
    dtype = _compute_dtype(z)
    p, floor = torch.empty(z.shape, dtype=dtype), torch.empty((z.shape[0], 1), dtype=dtype)
    powers = _powers(e, dtype)
    _call("tamis_forward", *_rows(z, powers, e), p.data_ptr(), floor.data_ptr())
    return p, floor


def gradient(p: Tensor, floor: Tensor, g: Tensor, e: Exponent, with_e: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the scores and, per row (rows, 1), that of alpha: zeros unless asked for."""
    p, g = p.contiguous(), _in_order(g.to(p.dtype))
    dz = torch.empty_like(p)
    de = torch.empty_like(floor) if with_e else torch.zeros_like(floor)
    powers = _powers(e, p.dtype)
    _call(
        "tamis_backward",
        *(p.data_ptr(), floor.data_ptr(), g.data_ptr(), g.stride(0), DTYPES[p.dtype], *p.shape),
        *(powers.data_ptr(), _is_shared(e), dz.data_ptr(), de.data_ptr() if with_e else None),
    )
    return dz, de


def losses(z: Tensor, e: Exponent, loss: Loss, with_e: bool) -> tuple[Tensor, Tensor]:
    """Losses of rows (rows,), or without a target their conjugates, and what to keep of them, (7, rows)."""
    z = _in_order(z)
    dtype = _compute_dtype(z)
    values, kept = torch.empty(z.shape[0], dtype=dtype), torch.empty((KEPT, z.shape[0]), dtype=dtype)
    powers, loss = _powers(e, dtype), _in_memory(loss, dtype)
    _call(
        "tamis_loss_forward",
        *(*_rows(z, powers, e), *_loss(loss), values.data_ptr(), kept.data_ptr(), int(with_e)),
    )
    return values, kept


def loss_gradient(z: Tensor, kept: Tensor, g: Tensor, e: Exponent, loss: Loss, with_e: bool) -> tuple[Tensor, Tensor]:
    """What `gradient` gives, of the losses, in the compute dtype; g: one number for all rows, or (rows,)."""
    z, dtype = _in_order(z), kept.dtype
    kept, g = kept.contiguous(), g.to(dtype).contiguous()
    dz = torch.empty(z.shape, dtype=dtype)
    de = torch.empty((z.shape[0], 1), dtype=dtype) if with_e else torch.zeros((z.shape[0], 1), dtype=dtype)
    powers, loss = _powers(e, dtype), _in_memory(loss, dtype)
    _call(
        "tamis_loss_backward",
        *(*_rows(z, powers, e), *_loss(loss), kept.data_ptr(), g.data_ptr(), int(g.numel() > 1)),
        *(dz.data_ptr(), de.data_ptr() if with_e else None),
    )
    return dz, de


def _call(name: str, *arguments: float | None) -> None:
    native = library.load()
    assert native is not None
    error = getattr(native, name)(*arguments)
    if error == 2:
        raise IndexError("target is out of bounds")
    if error:
        raise MemoryError(f"{name}: memory ran out")


def _compute_dtype(z: Tensor) -> torch.dtype:
    return torch.float64 if z.dtype == torch.float64 else torch.float32


def _in_order(x: Tensor) -> Tensor:
    """Numbers of a row side by side, and rows at any distance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _powers(e: Exponent, dtype: torch.dtype) -> Tensor:
    return e.to(dtype).contiguous() if isinstance(e, Tensor) else torch.tensor([e], dtype=dtype)


def _rows(z: Tensor, powers: Tensor, e: Exponent) -> tuple[int, ...]:
    layout = (z.data_ptr(), DTYPES[z.dtype], z.stride(0), *z.shape)
    return (*layout, powers.data_ptr(), _is_shared(e))


def _is_shared(e: Exponent) -> int:
    """Whether all rows have one alpha.  A tensor never tells: alone, a row would be solved in another way."""
    return int(not isinstance(e, Tensor))


def _in_memory(loss: Loss, dtype: torch.dtype) -> Loss:
    """The same, as the kernels read it."""
    target = None if loss.target is None else loss.target.contiguous()
    return loss._replace(target=target, weight=None if loss.weight is None else loss.weight.to(dtype).contiguous())


def _loss(loss: Loss) -> tuple[float | None, ...]:
    target, weight = (None if x is None else x.data_ptr() for x in loss[:2])
    return (target, weight, loss.ignore_index, loss.label_smoothing)
