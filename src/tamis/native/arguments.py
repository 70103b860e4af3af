"""What attention's C++ kernels are given: arguments of custom operations, by name, and the struct they become."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_uint64, c_void_p
from typing import NamedTuple

from torch import Tensor

RULES = ("entmax", "relu", "squared_relu", "leaky_relu")
"""By their numbers in cpp/attention.h."""


class Arguments(NamedTuple):
    """First tensors, of which query, key, value, e and the slopes may have gradients, then numbers: the schema of the
    operations is read off here."""

    query: Tensor
    key: Tensor
    value: Tensor
    e: Tensor | None
    """alpha - 1, broadcastable to (B, H, Lq, 1); None for activations."""
    alibi_slopes: Tensor | None
    row_scale: Tensor | None
    attn_mask: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    key_lengths: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    table: Tensor | None
    seed: Tensor | None
    rule: str
    bias: float
    slope: float
    scale: float
    left: int
    """Positions seen before the query's own, -1 = no bound; and after it, where 0 is a causal mask."""
    right: int
    dropout_p: float
    first_head: int
    """What dropout counts heads and queries from, where these are a part of a larger call."""
    first_query: int

    @property
    def num_keys(self) -> int:
        return self.key.shape[2] if self.table is None else self.table.shape[1] * self.key.shape[2]

    @property
    def rows(self) -> tuple[int, int, int]:
        """(B, H, Lq)"""
        return (self.query.shape[0], self.query.shape[1], self.query.shape[2])


DIFFERENTIABLE = 5
"""So many arguments come first and may have gradients."""


class Strided(ctypes.Structure):
    """`Tensor` of cpp/attention.h."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


class Struct(ctypes.Structure):
    """`Attention` of cpp/attention.h, field by field."""

    _fields_ = (
        *((name, Strided) for name in ("query", "key", "value", "out", "grad", "d_query", "d_key", "d_value")),
        *((name, c_int64) for name in ("batches", "heads", "key_heads", "queries", "keys", "dim", "value_dim")),
        ("key_step", c_int64),
        ("scale", c_double),
        ("rule", c_int64),
        ("bias", c_double),
        ("slope", c_double),
        ("e", Strided),
        ("row_scale", Strided),
        ("mask", c_void_p),
        ("mask_kind", c_int64),
        *((name, c_int64) for name in ("mask_batch", "mask_head", "mask_row", "mask_key")),
        ("slopes", c_void_p),
        ("slopes_batch", c_int64),
        ("slopes_head", c_int64),
        ("query_positions", c_void_p),
        ("query_positions_batch", c_int64),
        ("key_positions", c_void_p),
        ("key_positions_batch", c_int64),
        ("lengths", c_void_p),
        ("cu_queries", c_void_p),
        ("cu_keys", c_void_p),
        ("segments", c_int64),
        ("left", c_int64),
        ("right", c_int64),
        ("pages", c_void_p),
        ("pages_batch", c_int64),
        ("page", c_int64),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("first_head", c_int64),
        ("first_query", c_int64),
        ("kept", c_void_p),
        ("capacity", c_int64),
        ("places", c_void_p),
        ("counts", c_void_p),
        ("statistics", c_void_p),
        ("d_e", c_void_p),
        ("d_slopes", c_void_p),
    )


SIGNATURES = {
    "tamis_attention_forward": [c_void_p],
    "tamis_attention_backward": [c_void_p],
    "tamis_attention_collect": [c_void_p, c_void_p, c_void_p, c_void_p],
    "tamis_attention_total": [c_void_p, *(c_int64,) * 3, c_void_p, *(c_int64,) * 3],
}
"""Signatures of the functions in cpp/attention_*.cpp."""
