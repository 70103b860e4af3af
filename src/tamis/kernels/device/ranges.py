"""Ranges: which tiles a program goes through, and of which of them nothing is hidden.

A causal mask, a window and the end of the keys leave a block of queries one range of keys, and a block of keys one
range of queries.  Of its inner part nothing is hidden: long rows go through that in a loop of its own, which knows
nothing of places.  Where the tiles that hold weights are listed, the inner ones follow one another in every list.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_range(sight, k_first, num_q, num_k, BM: tl.constexpr, BN: tl.constexpr):
    """First and end of the queries that can see a block of keys, where positions are the default ones."""
    low = tl.zeros((), tl.int32)
    high = num_q
    first = k_first - (num_k - num_q)
    if sight.has_right and not (sight.has_query_positions or sight.has_key_positions):
        low = tl.maximum(0, first - sight.right) // BM * BM
    if sight.has_left and not (sight.has_query_positions or sight.has_key_positions):
        high = tl.minimum(high, first + BN + sight.left)
    return low, high


@triton.jit
def key_range(sight, q_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
    """First and end of the keys that a block of queries can see, where positions are the default ones."""
    low = tl.zeros((), tl.int32)
    high = key_end
    first = q_first + num_k - num_q
    if sight.has_right and not (sight.has_query_positions or sight.has_key_positions):
        high = tl.minimum(high, first + BM + sight.right)
    if sight.has_left and not (sight.has_query_positions or sight.has_key_positions):
        low = tl.maximum(0, first - sight.left) // BN * BN
    return low, high


@triton.jit
def inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
    """First and end of the tiles within a range of keys that no query's place hides anything of."""
    inner = low
    end = tl.minimum(high, key_end)
    if sight.has_query_positions or sight.has_key_positions:
        end = low
    own = q_first + num_k - num_q
    if sight.has_left:
        inner = tl.maximum(inner, tl.cdiv(own + BM - 1 - sight.left, BN) * BN)
    if sight.has_right:
        end = tl.minimum(end, own + sight.right + 1)
    end = end // BN * BN
    return tl.where(inner < end, inner, low), tl.where(inner < end, end, low)


@triton.jit
def inner_queries(sight, k_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
    """First and end of the blocks of queries that see all of a tile of keys."""
    inner = tl.zeros((), tl.int32)
    end = num_q // BM * BM
    if sight.has_query_positions or sight.has_key_positions:
        end = inner
    own = k_first - (num_k - num_q)
    if sight.has_right:
        inner = tl.maximum(inner, tl.cdiv(own + BN - 1 - sight.right, BM) * BM)
    if sight.has_left:
        end = tl.minimum(end, (own + sight.left + 1) // BM * BM)
    return inner, tl.where(k_first + BN <= key_end, end, 0)


@triton.jit
def tile_start(LISTS, listed, low, i, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Where the i-th tile of a program begins: of those from `listed` on in LISTS, or of all from `low` on."""
    first = low + i * BLOCK
    if LISTED:
        first = tl.load(LISTS + listed + i).to(tl.int32) * BLOCK  # the list may be of 16 bits
    return first


@triton.jit
def program_tiles(
    LISTS, COUNTS, line, length, low, high, inner, inner_end, SPLIT: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """A program's tiles: where their list begins, how many they are, and the first and end of those that are inner: all
    but few, so that a list is searched from both ends."""
    count = tl.cdiv(tl.maximum(high - low, 0), BLOCK)
    listed = tl.zeros((), tl.int64)
    start = tl.zeros((), tl.int32)
    end = start
    if LISTED:
        count = tl.load(COUNTS + line)
        listed += tl.cast(line, tl.int64) * tl.cdiv(length, BLOCK)
        end += tl.where(inner < inner_end, count, 0)
        last = tl.maximum(count - 1, 0)  # both sides of & are worked out, also for a list of none
        while (start < end) & (tile_start(LISTS, listed, 0, tl.minimum(start, last), True, BLOCK) < inner):
            start += 1
        while (start < end) & (tile_start(LISTS, listed, 0, tl.maximum(end - 1, 0), True, BLOCK) >= inner_end):
            end -= 1
    elif SPLIT:
        start += tl.where(inner < inner_end, (inner - low) // BLOCK, 0)
        end += tl.where(inner < inner_end, (inner_end - low) // BLOCK, 0)
    return listed, count, start, end


@triton.jit
def entry(j, start, end, INNER: tl.constexpr):
    """The j-th of a program's tiles within [start, end), or of those outside."""
    if INNER:
        return start + j
    return tl.where(j < start, j, j + end - start)


@triton.jit
def entries(count, start, end, INNER: tl.constexpr):
    return end - start if INNER else count - (end - start)
