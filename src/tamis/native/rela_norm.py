"""The norm of ReLA and its gradients by the C++ kernels, of fp32.  Plain tensors in, plain tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.native import library


def obstacle(z: Tensor) -> str | None:
    """Why the kernel cannot take these rows, or None."""
    if z.device.type != "cpu":
        return f"the C++ kernels are for CPUs, and the inputs are on {z.device.type}"
    if (reason := library.missing()) is not None:
        return f"no C++ kernels were loaded ({reason})"
    return None if z.dtype == torch.float32 else f"the C++ kernel is for fp32, not for {z.dtype}"


def forward(z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float) -> Tensor:
    """(..., channels); gain and gate (channels,) or None."""
    z, (gain, gate) = _plain(z), map(_of_channels, (gain, gate))
    y = torch.empty_like(z)
    _call("tamis_rela_norm_forward", _at(z), *_shape(z), _at(gain), _at(gate), epsilon, _at(y))
    return y


def backward(
    z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of z, gain and gate; empty for those that are not there."""
    z, dy, (gain, gate) = _plain(z), _plain(dy), map(_of_channels, (gain, gate))
    dz = torch.empty_like(z)
    dgain, dgate = (z.new_empty(0 if x is None else x.shape) for x in (gain, gate))
    sums = (None if x is None else _at(found) for x, found in ((gain, dgain), (gate, dgate)))
    _call("tamis_rela_norm_backward", _at(z), _at(dy), *_shape(z), _at(gain), _at(gate), epsilon, _at(dz), *sums)
    return dz, dgain, dgate


def _call(name: str, *arguments: float | None) -> None:
    native = library.load()
    assert native is not None
    if getattr(native, name)(*arguments):
        raise MemoryError(f"{name}: memory ran out")


def _shape(z: Tensor) -> tuple[int, int]:
    return z.numel() // max(z.shape[-1], 1), z.shape[-1]


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _of_channels(x: Tensor | None) -> Tensor | None:
    return None if x is None else _plain(x)
