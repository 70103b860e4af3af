"""Tiles: reading and writing blocks of rows, and the scores of a block of queries and one of keys.

`Sight`, `Dropout` and `Packed` are arguments that go together: what decides who sees whom, which weights are dropped,
and where packed sequences begin.  A tile of scores, BM queries by BN keys, or TRANSPOSED keys by queries, is made by
`tile_scores`, which knows all that masks and biases them; `kept_by` says which of its weights dropout leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sight(NamedTuple):
    """What masks and biases scores: pointers (None where absent), strides, and what of it is there."""

    mask: Any
    lengths: Any
    slopes: Any
    query_positions: Any
    key_positions: Any
    mask_strides: Any
    slopes_stride: Any
    query_positions_stride: Any
    key_positions_stride: Any
    left: Any
    right: Any
    mask_kind: tl.constexpr
    """0 none, 1 boolean, 2 additive"""
    mask_by_query: tl.constexpr
    """Or the same for all queries, as padding is."""
    has_lengths: tl.constexpr
    has_slopes: tl.constexpr
    has_query_positions: tl.constexpr
    has_key_positions: tl.constexpr
    has_left: tl.constexpr
    has_right: tl.constexpr


class Dropout(NamedTuple):
    seed: Any
    threshold: Any
    """A weight is dropped if its random 32 bits are below."""
    scale: Any
    on: tl.constexpr


class Packed(NamedTuple):
    """Offsets of packed sequences."""

    cu_q: Any
    cu_k: Any
    count: Any
    on: tl.constexpr
    width: tl.constexpr
    """A power of two that holds `count`."""


LENGTHS = ("num_q", "num_k")
"""Numbers that no kernel is compiled anew for."""


# ---------------------------------------------------------------------------------------------------------------
# Rows in memory


@triton.jit
def _pointers(base, first, stride, stride_d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None] * stride
    return base + tl.cast(first, tl.int64) * stride + rows + tl.arange(0, WIDTH)[None, :] * stride_d


@triton.jit
def _inside(first, end, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr = False):
    inside = tl.full((ROWS, 1), True, tl.int1) if FULL else (first + tl.arange(0, ROWS) < end)[:, None]
    if D != WIDTH:
        inside = inside & (tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def load(
    base, first, end, strides, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr = False
):  # fmt: skip
    """Rows first, first + 1, ... of a (length, D) matrix, zero beyond its end.  FULL: none is beyond."""
    pointers = _pointers(base, first, strides[2], strides[3], ROWS, WIDTH)
    return tl.load(pointers, mask=_inside(first, end, D, ROWS, WIDTH, FULL), other=0.0)


@triton.jit
def hold(x):
    """The left operand of many products, in registers.

    With both operands in shared memory, products of 64 x 64 tiles take all of its bandwidth.  Triton leaves there what
    was loaded; what is the sum of a product it leaves in registers.  So one of zeros is added, which changes nothing.
    """
    rows: tl.constexpr = x.shape[0]
    if x.dtype != tl.float32 and rows >= 64:
        same = tl.dot(tl.zeros((rows, 16), x.dtype), tl.zeros((16, x.shape[1]), x.dtype), x.to(tl.float32))
        x = same.to(x.dtype)
    return x


@triton.jit
def store(base, x, first, end, strides, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    pointers = _pointers(base, first, strides[2], strides[3], ROWS, WIDTH)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=_inside(first, end, D, ROWS, WIDTH))


@triton.jit
def load_scales(SCALES, strides, b, h, first, present, BM: tl.constexpr):
    base = SCALES + b * strides[0] + h * strides[1] + first * strides[2]
    return tl.load(base + tl.arange(0, BM) * strides[2], mask=present, other=0.0)


@triton.jit
def matrix(base, b, h, start, strides):
    """The (length, D) matrix of one sequence and head."""
    return (
        base
        + tl.cast(b, tl.int64) * strides[0]
        + tl.cast(h, tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )


@triton.jit
def locate(block, num_q, num_k, packed, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr):
    """A program's block within its sequence, and where that starts and how long it is.

    Blocks of packed sequences are counted through; one beyond the last has a sequence without queries and keys.
    """
    q_start = tl.zeros((), tl.int64)
    k_start = tl.zeros((), tl.int64)
    if packed.on:
        index = tl.arange(0, packed.width)
        real = index < packed.count
        q_starts = tl.load(packed.cu_q + index, mask=real, other=0)
        k_starts = tl.load(packed.cu_k + index, mask=real, other=0)
        q_lengths = tl.load(packed.cu_q + index + 1, mask=real, other=0) - q_starts
        k_lengths = tl.load(packed.cu_k + index + 1, mask=real, other=0) - k_starts
        blocks = tl.cdiv(k_lengths if OVER_KEYS else q_lengths, BLOCK)
        ends = tl.cumsum(blocks, 0)
        own = (ends > block) & (ends - blocks <= block)
        block = block - tl.sum(tl.where(own, ends - blocks, 0), 0)
        q_start = tl.sum(tl.where(own, q_starts, 0), 0)
        k_start = tl.sum(tl.where(own, k_starts, 0), 0)
        num_q = tl.sum(tl.where(own, q_lengths, 0), 0).to(tl.int32)
        num_k = tl.sum(tl.where(own, k_lengths, 0), 0).to(tl.int32)
    return block.to(tl.int32), q_start, num_q, k_start, num_k


# ---------------------------------------------------------------------------------------------------------------
# Scores


@triton.jit
def end_of_keys(sight, b, num_k):
    if sight.has_lengths:
        num_k = tl.minimum(num_k, tl.load(sight.lengths + b).to(tl.int32))
    return num_k


@triton.jit
def by_query(x, TRANSPOSED: tl.constexpr = False):
    """What a tile's queries have, one each, in the shape that broadcasts over the tile."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def _by_key(x, TRANSPOSED: tl.constexpr = False):
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def products(q, k, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """A tile: products of what its queries have with what its keys have."""
    if TRANSPOSED:
        tile = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    else:
        tile = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return tile


@triton.jit
def ahead_by(
    sight, b, q_first, k_first, q_start, num_q, k_start, num_k, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Positions of a tile's keys less those of its queries."""
    rows, cols = by_query(q_first + tl.arange(0, BM)), _by_key(k_first + tl.arange(0, BN))
    return _ahead_of(sight, b, rows, cols, q_start, num_q, k_start, num_k)


@triton.jit
def _ahead_of(sight, b, rows, cols, q_start, num_q, k_start, num_k):
    query_positions = rows + (num_k - num_q)
    key_positions = cols
    if sight.has_query_positions:
        base = sight.query_positions + tl.cast(b, tl.int64) * sight.query_positions_stride + q_start
        query_positions = tl.load(base + rows, mask=rows < num_q, other=0).to(tl.int32)
    if sight.has_key_positions:
        base = sight.key_positions + tl.cast(b, tl.int64) * sight.key_positions_stride + k_start
        key_positions = tl.load(base + cols, mask=cols < num_k, other=0).to(tl.int32)
    return key_positions - query_positions


@triton.jit
def tile_scores(
    q, k, scale, sight, b, h, q_first, k_first, q_start, num_q, k_start, num_k, key_end, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HIDDEN: tl.constexpr = True, RAW: tl.constexpr = False,
    TRANSPOSED: tl.constexpr = False
):  # fmt: skip
    """Scaled and biased scores of a tile, -inf where a key is hidden.

    HIDDEN: some key of the tile may be hidden by its place.  RAW: not scaled, which the caller does with less work;
    only where nothing is added.
    """
    s = products(q, k, PRECISION, TRANSPOSED)
    if not RAW:
        s *= scale
    lines = tl.arange(0, BM)
    return seen_scores(
        s, sight, b, h, lines, q_first, k_first, q_start, num_q, k_start, num_k, key_end, BN, HIDDEN, TRANSPOSED
    )  # fmt: skip


@triton.jit
def seen_scores(
    s, sight, b, h, lines, q_first, k_first, q_start, num_q, k_start, num_k, key_end, BN: tl.constexpr,
    HIDDEN: tl.constexpr = True, TRANSPOSED: tl.constexpr = False
):  # fmt: skip
    """Scores of the queries q_first + lines, biased, and -inf where a key is hidden.

    h: their head, or (rows, 1) of them.
    """
    lines, along = by_query(lines, TRANSPOSED), _by_key(tl.arange(0, BN), TRANSPOSED)
    rows = q_first + lines
    cols = k_first + along
    ahead = _ahead_of(sight, b, rows, cols, q_start, num_q, k_start, num_k)
    if sight.has_slopes:
        slope = tl.load(sight.slopes + b * sight.slopes_stride + h)
        s -= slope * tl.abs(ahead).to(tl.float32)
    if sight.mask_kind > 0:
        base = sight.mask + tl.cast(b, tl.int64) * sight.mask_strides[0] + tl.cast(h, tl.int64) * sight.mask_strides[1]
        base += (k_start + k_first) * sight.mask_strides[3]
        along *= sight.mask_strides[3]
        if sight.mask_by_query:
            base += (q_start + q_first) * sight.mask_strides[2]
            tile = lines * sight.mask_strides[2] + along
            mask = tl.load(base + tile, mask=(rows < num_q) & (cols < num_k), other=0)
        else:
            mask = tl.load(base + along, mask=cols < num_k, other=0)
        if sight.mask_kind == 1:
            s = tl.where(mask != 0, s, float("-inf"))
        else:
            s += mask.to(tl.float32)
    if HIDDEN:
        seen = cols < key_end
        if sight.has_left:
            seen = seen & (ahead >= -sight.left)
        if sight.has_right:
            seen = seen & (ahead <= sight.right)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def lane_sums(x):
    """Sums over the columns of a tile but for the last steps, from 8 to 1, which are between threads and can wait."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    return tl.sum(tl.reshape(x, (rows, cols // 8, 8)), 1)


# ---------------------------------------------------------------------------------------------------------------
# Dropout


@triton.jit
def _mix(x):
    """Scramble 32 bits so that neighbouring counters give unrelated bits (lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_by(dropout, head, q_first, k_first, BM: tl.constexpr, BN: tl.constexpr):
    """Whether each weight of a tile stays: a hash of the seed, the head and the indices, the same every time.

    Those that stay count 1 / (1 - p), `dropout.scale`, which what they are summed into is multiplied by at the end.

    One multiplication a weight: the product of two odd numbers, one of the row and one of the column, is as good as
    uniform, and two of them as good as independent, unless two rows' numbers are in a small ratio: one pair in 2^31.
    """
    seed = tl.load(dropout.seed)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    rows = (q_first + tl.arange(0, BM)).to(tl.uint32)
    cols = (k_first + tl.arange(0, BN)).to(tl.uint32)
    by_row = _mix(_mix(rows ^ low) + _mix(tl.cast(head, tl.uint32) ^ high)) | 1
    by_col = _mix(cols + high) | 1
    return by_query(by_row) * _by_key(by_col) >= dropout.threshold
