"""When a kernel of any kind can run, and what operations do before they launch one.  Without triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from tamis.transforms.dispatch import transforming
from tamis.transforms.dispatch import unwatched as unwatched

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def tensor_obstacle(x: Tensor) -> str | None:
    """Why no kernel of any kind can take this tensor now, or None."""
    if (reason := _machine(x.device.type)) is not None:
        return reason
    if (reason := transforming()) is not None:
        return reason
    return None if x.dtype in DTYPES else f"there are kernels for fp16, bf16 and fp32, not for {x.dtype}"


@functools.cache
def _generation(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _machine(device: str) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return f"kernels run on CUDA devices, and the inputs are on {device}"
    if device == "cuda" and _generation(torch.cuda.current_device()) < 8:
        return "kernels need a GPU of compute capability 8.0 or more"
    return None


# What torch.compiler.assume_constant_result does; calling that would import the compiler, half the time of an import.
_machine._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dense(x: Tensor | None) -> Tensor | None:
    """Small vectors, which the kernels read without strides."""
    return None if x is None else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
