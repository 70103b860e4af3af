"""Encoders and decoders as the C++ kernels run them: what cpp/layers.h declares, and calls of cpp/decode.cpp."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from tamis.native import product
from tamis.native.product import Matrix, check

NORMS = {"none": 0, "layernorm": 1, "rmsnorm": 2}
WEIGHTS = {"softmax": 0, "entmax": 1, "relu": 2}


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("kind", c_int32))


class Rectifier(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("bias", c_float), ("exponents", c_void_p), ("per_count", c_int32))


class Merge(ctypes.Structure):
    _fields_ = (("norm", Norm), ("gate", c_void_p))


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("query", "key", "value", "output")),
        ("rule", Rectifier),
        ("merge", Merge),
    )


class Sublayer(ctypes.Structure):
    _fields_ = (("before", Norm), ("after", Norm), ("last", Norm))


class Layer(ctypes.Structure):
    _fields_ = (
        ("own", Attention),
        ("cross", Attention),
        *((name, Matrix) for name in ("up", "gate", "down")),
        *((name, Sublayer) for name in ("around_own", "around_cross", "around_feed")),
        ("function", c_int32),
    )


class Stack(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("count", "embed_dim", "heads", "kv_heads", "head_dim", "ffn_dim")),
        ("slopes", c_void_p),
        ("last", Norm),
        ("output", Matrix),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
    )


SIGNATURES = {
    "tamis_encode": ([POINTER(Stack), c_void_p, c_void_p, c_int64], c_int32),
    "tamis_decoding_new": ([POINTER(Stack), c_void_p, c_void_p, c_int64], c_void_p),
    "tamis_decoding_free": ([c_void_p], None),
    "tamis_decoding_step": ([c_void_p, c_void_p, c_int64, c_void_p, c_void_p], c_int32),
    "tamis_decoding_choose": ([c_void_p, c_void_p, c_int64], c_int32),
    "tamis_decoding_keep": ([c_void_p, c_void_p, c_int64], c_int32),
    "tamis_decoding_places": ([c_void_p], c_int64),
    "tamis_best": ([c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p], c_int32),
}
"""Signatures of the functions in cpp/layers.cpp, cpp/decode.cpp and cpp/best.cpp: arguments and result."""


@functools.cache
def functions() -> ctypes.CDLL:
    native = product.functions()
    for name, (arguments, result) in SIGNATURES.items():
        getattr(native, name).argtypes, getattr(native, name).restype = arguments, result
    return native


def encode(stack: Stack, x: Tensor, starts: Tensor) -> None:
    """Run an encoder over x (all tokens, embed_dim), in place; sentence i is rows starts[i] to starts[i + 1]."""
    check(functions().tamis_encode(byref(stack), x.data_ptr(), starts.data_ptr(), starts.numel() - 1))


class Decoding:
    """Sentences that are being decoded by a stack, which the caller keeps alive.

    Args:
        memory: what the encoder made of all tokens of all sources, (tokens, embed_dim).
        starts: (sentences + 1,), where each source begins.
    """

    def __init__(self, stack: Stack, memory: Tensor, starts: Tensor) -> None:
        self._native, self._vocabulary = functions(), stack.output.outputs
        handle = self._native.tamis_decoding_new(byref(stack), memory.data_ptr(), starts.data_ptr(), starts.numel() - 1)
        if not handle:
            raise MemoryError("memory ran out in a C++ kernel")
        self._handle = handle
        weakref.finalize(self, self._native.tamis_decoding_free, handle)

    def step(self, tokens: Tensor, position: Tensor | None) -> Tensor:
        """Logits (B, W, vocabulary) after tokens (B, W), to whose embeddings `position` (embed_dim,) is added."""
        tokens = tokens.contiguous()
        logits = torch.empty((*tokens.shape, self._vocabulary))
        place = None if position is None else position.data_ptr()
        check(
            self._native.tamis_decoding_step(self._handle, tokens.data_ptr(), tokens.shape[1], place, logits.data_ptr())
        )
        return logits

    def choose(self, parents: Tensor) -> None:
        parents = parents.contiguous()
        check(self._native.tamis_decoding_choose(self._handle, parents.data_ptr(), parents.shape[1]))

    def keep(self, sentences: Tensor) -> None:
        sentences = sentences.contiguous()
        check(self._native.tamis_decoding_keep(self._handle, sentences.data_ptr(), sentences.numel()))

    def places(self) -> int:
        """How many tokens of each sentence there is room for."""
        return int(self._native.tamis_decoding_places(self._handle))


def starts_of(lengths: Sequence[int]) -> Tensor:
    """(sentences + 1,)"""
    return torch.tensor([0, *lengths]).cumsum(0)


def best(scores: Tensor, count: int, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities under softmax (..., count) of the best in each row of scores (..., n), and their indices.

    `forbidden` indices are not among them; -inf fills up where there are fewer.
    """
    scores, forbidden = scores.contiguous(), forbidden.sort().values
    top = torch.empty((*scores.shape[:-1], count))
    index = torch.empty(top.shape, dtype=torch.long)
    width = scores.shape[-1]
    check(
        functions().tamis_best(
            *(scores.data_ptr(), top.numel() // count, width, count, forbidden.data_ptr(), forbidden.numel()),
            *(top.data_ptr(), index.data_ptr()),
        )
    )
    return top, index
