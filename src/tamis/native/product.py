"""Products with weights that are packed once for the C++ kernels, in fp32, bf16 or int8 (cpp/product.h)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from tamis.native import library

PRECISIONS = {"fp32": 0, "bf16": 1, "int8": 2}
MAX_INPUTS = 65536
"""Inputs of int8 at most: more might not fit into sums of 32 bits."""
FUNCTIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}


class Matrix(ctypes.Structure):
    """As cpp/product.h declares it; all zeros where there is no matrix."""

    _fields_ = (
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("words", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("precision", c_int32),
    )


SIGNATURES = {
    "tamis_packed_words": ([c_int32, c_int64, c_int64], c_int64),
    "tamis_pack": ([c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p], c_int32),
    "tamis_product": ([POINTER(Matrix), c_void_p, c_int64, c_int32, c_void_p], c_int32),
    "tamis_has_instructions": ([c_int32], c_int32),
    "tamis_sample": ([c_void_p, c_void_p, c_int64], c_int64),
}
"""Signatures of the functions in cpp/product.cpp: arguments and result."""


@functools.cache
def functions() -> ctypes.CDLL:
    """The library, which must have been loaded."""
    native = library.load()
    assert native is not None
    for name, (arguments, result) in SIGNATURES.items():
        getattr(native, name).argtypes, getattr(native, name).restype = arguments, result
    return native


def obstacle() -> str | None:
    """Why there are no native products here, or None."""
    return None if library.load() is not None else f"no C++ kernels were loaded ({library.status().reason})"


def has_instructions(precision: str) -> bool:
    """Whether this CPU multiplies in that precision; where not, it is spelled out with others."""
    return obstacle() is None and bool(functions().tamis_has_instructions(PRECISIONS[precision]))


class Packed:
    """Weights (outputs, inputs) and their bias, packed.

    Args:
        precision: "fp32", "bf16" or "int8".
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, precision: str = "fp32") -> None:
        if precision == "int8" and weight.shape[1] > MAX_INPUTS:
            raise ValueError(f"sums of int8 go over {MAX_INPUTS} inputs at most, got {weight.shape[1]}")
        if weight.shape[1] == 0:
            raise ValueError(f"a product needs inputs, got weights of shape {tuple(weight.shape)}")
        self.precision = precision
        native, kind = functions(), PRECISIONS[precision]
        weight = weight.detach().to("cpu", torch.float32)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.outputs, self.inputs = weight.shape
        self._words = torch.empty(native.tamis_packed_words(kind, *weight.shape), dtype=torch.int32)
        self._scales = torch.empty(self.outputs if precision == "int8" else 0)
        self._sums = torch.empty(self._scales.shape, dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().to("cpu", torch.float32).clone()
        check(
            native.tamis_pack(
                *(kind, weight.data_ptr(), weight.stride(0), *weight.shape),
                *(self._words.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr()),
            )
        )
        self.matrix = Matrix(
            *(self.outputs, self.inputs, self._words.data_ptr(), None if self._bias is None else self._bias.data_ptr()),
            *(self._scales.data_ptr(), self._sums.data_ptr(), kind),
        )

    def __call__(self, x: Tensor, function: str = "none") -> Tensor:
        """function(x weight^T + bias), of x (..., inputs) in fp32."""
        rows = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outputs))
        count = out.numel() // max(1, self.outputs)
        check(
            functions().tamis_product(byref(self.matrix), rows.data_ptr(), count, FUNCTIONS[function], out.data_ptr())
        )
        return out


def sample(tensors: Sequence[Tensor]) -> int:
    """A number that changes, but for rare chance, when many values of these tensors in memory do."""
    pointers = (c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    sizes = (c_int64 * len(tensors))(*(tensor.nbytes if tensor.is_contiguous() else 0 for tensor in tensors))
    return int(functions().tamis_sample(pointers, sizes, len(tensors)))


def check(status: int) -> None:
    if status == 2:
        raise IndexError("token is out of the vocabulary")
    if status:
        raise MemoryError("memory ran out in a C++ kernel")
