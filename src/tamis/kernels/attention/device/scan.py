"""Long rows: which tiles of scores hold weights, so that all others are skipped.

    key_norms    the largest norm of a key in each block, by which far tiles are told from those within reach
    scan         one block of queries after the other: a bit for each tile of scores that may hold weights of entmax
    list_tiles   of those, a list for each block of queries, or of keys

The rectified rules need no scan: whether a tile holds weights shows as soon as its scores are there, and `forward`
notes it by `holds_weights`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.device.ranges import inner_range, key_range
from tamis.kernels.device.rules import advance, approach, entmax, exponent, looser
from tamis.kernels.device.tiles import LENGTHS, end_of_keys, hold, load, matrix, tile_scores


@triton.jit
def _larger(a, b):
    """NaN is the largest of all: the tile that holds it must not be left out."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def holds_weights(
    s, unit, bias, BITS, head, q_first, k_first, num_q, num_k, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Whether any of a tile's scores is above 0; the bits of its blocks of ROWS queries are set, each where one of its
    own is.  Bits are only ever set, so that it does not matter in which order programs come to a word."""
    top = tl.reduce(s, 1, _larger) * unit + bias
    some = tl.reduce_or(tl.where(top <= 0.0, 0, 1 << (tl.arange(0, BM) // ROWS)), 0)
    if BITS is not None:
        local = tl.arange(0, BM // ROWS)
        line = tl.cast(head, tl.int64) * tl.cdiv(num_q, ROWS) + q_first // ROWS + local
        word = BITS + line * tl.cdiv(num_k, 32 * BN) + k_first // (32 * BN)
        inside = q_first + local * ROWS < num_q
        tl.atomic_or(word, 1 << (k_first // BN % 32), mask=inside & ((some >> local) & 1 > 0), sem="relaxed")
    return some > 0


@triton.jit(do_not_specialize=("num_k", "num_blocks"))
def key_norms(
    K, NORMS, strides, key_heads, num_k, num_blocks, D: tl.constexpr, DW: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The largest norm of a key in each block."""
    program = tl.program_id(0)
    head = program // num_blocks
    base = matrix(K, head // key_heads, head % key_heads, tl.zeros((), tl.int64), strides)
    k = load(base, (program % num_blocks) * BN, num_k, strides, D, BN, DW).to(tl.float32)
    tl.store(NORMS + program, tl.sqrt(tl.reduce(tl.sum(k * k, 1), 0, _larger)))


@triton.jit
def _near(
    low, high, q, keys, k_strides, largest, scale, e, sight, b, h, q_first, num_q, num_k, key_end,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Narrow a range of keys to those that a linear bias leaves a chance: a weight needs a score within 1 / e of the
    row's largest, which is no less than those around the query, and no key scores more than the norms' product."""
    zero = tl.zeros((), tl.int64)
    own = q_first + num_k - num_q
    around = tl.full((BM,), float("-inf"), tl.float32)
    for first in range(tl.maximum(own, 0) // BN * BN, tl.minimum(own + BM, high), BN):
        k = load(keys, first, key_end, k_strides, D, BN, DW)
        s = tile_scores(
            q, k, scale, sight, b, h, q_first, first, zero, num_q, zero, num_k, key_end, PRECISION, BM, BN
        )  # fmt: skip
        around = _larger(around, tl.reduce(s, 1, _larger))
    slope = tl.load(sight.slopes + b * sight.slopes_stride + h)
    queries = q.to(tl.float32)
    most = tl.sqrt(tl.sum(queries * queries, 1)) * (largest * tl.abs(scale) * 1.001)
    reach = (most - around + 1.0 / e + 1e-3) / tl.where(slope > 0.0, slope, 1e-20)
    reach = tl.where(reach < 1e9, reach, 1e9)  # also where it is NaN
    reach = tl.max(tl.where(q_first + tl.arange(0, BM) < num_q, reach, 0.0), 0).to(tl.int32) + 1
    return tl.maximum(low, (own - reach) // BN * BN), tl.minimum(high, own + BM + reach)


@triton.jit
def _scan_tiles(
    top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, HIDDEN: tl.constexpr,
    RAW: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Store the largest score of each row in each of the tiles of a step, and let `top` know eight."""
    zero = tl.zeros((), tl.int64)
    tiles: tl.constexpr = STEP // BN
    parts: tl.constexpr = 8 // tiles
    k = load(keys, first, key_end, k_strides, D, STEP, DW, not HIDDEN)
    s = tile_scores(
        q, k, scale, sight, b, h, q_first, first, zero, num_q, zero, num_k, key_end, PRECISION, BM, STEP, HIDDEN, RAW
    )  # fmt: skip
    # A thread has two neighbours of every eight columns: both maxima are taken of what is its own.  Neighbours are
    # merged where there are two tiles, so that there are eight numbers in all.
    some = tl.reduce(tl.reshape(s, (BM, tiles, BN // 8, parts, tiles)), 4, _larger)
    some = tl.reduce(some, 2, _larger)
    places = (first // BN + tl.arange(0, tiles)[None, :]) * BM + tl.arange(0, BM)[:, None]
    tl.store(maxima + places, tl.reduce(some, 2, _larger))
    return _larger(top, tl.reshape(some, (BM, 8)))


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks", "tasks"))
def scan(
    Q, K, M, C, BITS, MAXIMA, NORMS, E, sight, dropout, packed, q_strides, k_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, num_k, num_blocks, tasks,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, SWEEPS: tl.constexpr, NEAR: tl.constexpr,
    RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One pass over all scores: the largest of each row (M), a bound of its solution (C), and one bit for each tile of
    ROWS x BN scores, 0 where the bound proves that it holds no weight.

    The solution over a subset of a row's scores is such a bound.  The subsets are the largest scores of each tile, kept
    in memory of the program, and before that eight maxima over the whole row.  NEAR: a linear bias keeps far tiles from
    being looked at.  RAW: maxima are taken of scores that are yet to be scaled.  STEP: keys at a time, of one tile or
    two.  HELD: queries stay in registers.
    """
    program = tl.program_id(0)
    zero = tl.zeros((), tl.int64)
    num_tiles = tl.cdiv(num_k, BN)
    words = tl.cdiv(num_tiles, 32)
    row_blocks = tl.cdiv(num_q, ROWS)
    heads = tasks // num_blocks
    lanes = tl.arange(0, 32)
    maxima = MAXIMA + tl.cast(program, tl.int64) * tl.cdiv(num_k, STEP) * (STEP // BN * BM)
    unit = scale if RAW else 1.0
    # Tasks are dealt out back and forth, of a causal mask the longest rows first, so that all programs get as much.
    programs = tl.num_programs(0)
    turns = tasks // programs
    back = programs - 1 - program
    turns += tl.where(tl.where(turns % 2 == 0, program, back) < tasks % programs, 1, 0)
    for turn in range(0, turns):
        task = turn * programs + tl.where(turn % 2 == 0, program, back)
        head = task % heads
        q_first = (num_blocks - 1 - task // heads) * BM
        b = head // H
        h = head % H
        rows = tl.arange(0, BM)
        present = q_first + rows < num_q
        key_end = end_of_keys(sight, b, num_k)
        low, high = key_range(sight, q_first, num_q, num_k, key_end, BM, STEP)
        q = load(matrix(Q, b, h, zero, q_strides), q_first, num_q, q_strides, D, BM, DW)
        keys = matrix(K, b, h // GROUPS, zero, k_strides)
        e = exponent(E, e_value, h, HAS_E, FAST)
        if NEAR:
            largest = tl.load(NORMS + b * (H // GROUPS) + h // GROUPS)
            low, high = _near(
                low, high, q, keys, k_strides, largest, scale, e, sight, b, h, q_first, num_q, num_k, key_end,
                D, DW, BM, STEP, PRECISION
            )  # fmt: skip
        if HELD:
            q = hold(q)
        top = tl.full((BM, 8), float("-inf"), tl.float32)
        inner, inner_end = inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, STEP)
        before = (inner - low) // STEP
        for i in range(0, before + tl.cdiv(tl.maximum(high, inner_end) - inner_end, STEP)):
            first = tl.where(i < before, low + i * STEP, inner_end + (i - before) * STEP)
            top = _scan_tiles(
                top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
                D, DW, BM, BN, STEP, True, RAW, PRECISION
            )  # fmt: skip
        for first in range(inner, inner_end, STEP):
            top = _scan_tiles(
                top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
                D, DW, BM, BN, STEP, False, RAW, PRECISION
            )  # fmt: skip
        m = tl.max(top, 1) * unit
        alive = m > float("-inf")
        m = tl.where(alive, m, 0.0)
        c = tl.zeros((BM,), tl.float32)
        if RULE == "squares" or RULE == "identity":
            c += 1.0
        c = approach(top, m, c, alive, e, unit, RULE, RAW, FAST)
        tl.debug_barrier()  # what some threads wrote, others read
        low_tile = low // BN
        end_tile = tl.cdiv(tl.maximum(high, low), BN)
        places = maxima + rows[:, None] + lanes[None, :] * BM
        for _ in range(SWEEPS):
            total = tl.zeros((BM,), tl.float32)
            slope = tl.zeros((BM,), tl.float32)
            for tile in range(low_tile, end_tile, 32):
                inside = (tile + lanes < end_tile)[None, :]
                s = tl.load(places + tile * BM, mask=inside, other=float("-inf"))
                x, v, log_x = entmax(s, m, c, None, e, unit, RULE, RAW, FAST)
                total += tl.sum(v * x, 1)
                slope += tl.sum(v, 1)
            c = advance(c, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
        loose = looser(c, e, RULE)
        blocks = q_first // ROWS + tl.arange(0, BM // ROWS)
        out = BITS + (tl.cast(head, tl.int64) * row_blocks + blocks) * words
        for word in range(0, words):
            tile = word * 32
            bits = tl.zeros((BM // ROWS,), tl.int32)
            if (tile + 32 > low_tile) & (tile < end_tile):
                inside = (tile + lanes >= low_tile) & (tile + lanes < end_tile)
                s = tl.load(places + tile * BM, mask=inside[None, :], other=float("-inf"))
                x, v, log_x = entmax(s, m, loose, None, e, unit, RULE, RAW, FAST)
                holds = tl.max(tl.reshape(tl.where(x <= 0.0, 0, 1), (BM // ROWS, ROWS, 32)), 1)
                bits = tl.sum(holds << lanes[None, :], 1)
            tl.store(out + word, bits, mask=blocks < row_blocks)
        row = tl.cast(head, tl.int64) * num_q + q_first + rows
        tl.store(M + row, tl.where(alive, m, float("-inf")), mask=present)
        tl.store(C + row, c, mask=present)
        tl.debug_barrier()  # before the next block writes its maxima


@triton.jit(do_not_specialize=("row_blocks", "num_tiles"))
def list_tiles(BITS, LISTS, COUNTS, row_blocks, num_tiles, BY_KEY: tl.constexpr):
    """The tiles of each block of queries whose bit is set; or, by key, the blocks of queries of each tile of keys."""
    words = tl.cdiv(num_tiles, 32)
    lines = num_tiles if BY_KEY else row_blocks
    width = row_blocks if BY_KEY else num_tiles
    program = tl.program_id(0)
    bits = BITS + tl.cast(program // lines, tl.int64) * row_blocks * words
    line = program % lines
    out = LISTS + tl.cast(program, tl.int64) * width
    lanes = tl.arange(0, 32)
    count = 0
    for place in range(0, width, 32):
        inside = place + lanes < width
        if BY_KEY:
            word = tl.load(bits + (place + lanes) * words + line // 32, mask=inside, other=0)
            bit = (word >> (line % 32)) & 1
        else:
            bit = tl.where(inside, (tl.load(bits + line * words + place // 32) >> lanes) & 1, 0)
        tl.store(out + count + tl.cumsum(bit, 0) - bit, (place + lanes).to(LISTS.dtype.element_ty), mask=bit > 0)
        count += tl.sum(bit, 0)
    tl.store(COUNTS + program, count)
