"""Fused attention, forward: scores, thresholds, weights and output of a block of queries without leaving the chip.

Where the keys are few (TILES > 0) all scores of a block of queries are computed once and stay in registers, as that
many tiles; otherwise each sweep over the keys computes them anew, which costs less than moving them.  Nothing is added
up by atomics: two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.attention.device.scan import holds_weights
from tamis.kernels.device.ranges import entries, entry, inner_range, key_range, program_tiles, tile_start
from tamis.kernels.device.rules import activation, approach, entmax, exponent, newton_step, reciprocal
from tamis.kernels.device.tiles import (
    LENGTHS,
    ahead_by,
    end_of_keys,
    hold,
    kept_by,
    lane_sums,
    load,
    load_scales,
    locate,
    matrix,
    store,
    tile_scores,
)


@triton.jit
def _unscaled(
    s, m, c, e, unit, bias, RULE: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Weights and slopes of a tile before they are multiplied by the rows' n."""
    if NORMALISED:
        x, v, log_x = entmax(s, m, c, None, e, unit, RULE, RAW, FAST)
        r = v * x
    else:
        r, v = activation(s * unit + bias, RULE)
    return r, v


@triton.jit
def _add_output(
    out, out2, totals, slopes, s, m, c, e, unit, bias, value, dropout, head, q_first, k_first,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, KEEP_O2: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add a tile's weights times values to the output, and its weights and slopes to the row sums."""
    r, v = _unscaled(s, m, c, e, unit, bias, RULE, NORMALISED, RAW, FAST)
    if NORMALISED:
        totals += lane_sums(r)
        slopes += lane_sums(v)
    if dropout.on:
        kept = kept_by(dropout, head, q_first, k_first, BM, BN)
        r = tl.where(kept, r, 0.0)
        v = tl.where(kept, v, 0.0)
    out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    if KEEP_O2:
        out2 = tl.dot(v.to(value.dtype), value, out2, input_precision=PRECISION)
    return out, out2, totals, slopes


@triton.jit
def _count(counts, s, m, c, e, unit, bias, ahead, RULE: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr,
           FAST: tl.constexpr):  # fmt: skip
    """Add a tile to the rows' support size and sums of r, r ln r and r times the distance."""
    support, total, logs, distance = counts
    r, v = _unscaled(s, m, c, e, unit, bias, RULE, NORMALISED, RAW, FAST)  # compiled, they are those of the output
    if not NORMALISED:
        r = tl.abs(r)
    support += tl.sum((r != 0.0).to(tl.int32), 1)
    total += tl.sum(r, 1)
    logs += tl.sum(tl.where(r > 0.0, r * tl.log(tl.where(r > 0.0, r, 1.0)), 0.0), 1)
    distance += tl.sum(r * tl.abs(ahead).to(tl.float32), 1)
    return support, total, logs, distance


@triton.jit
def _solve_start(
    top, m, c, alive, e, unit, RULE: tl.constexpr, TILES: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A first c, from the largest of every few scores."""
    if TILES > 0 and BN > 32:  # a sweep is cheap then, and so should this be
        top = tl.max(tl.reshape(top, (BM, BN // 32, 32)), 1)
    return approach(top, m, c, alive, e, unit, RULE, RAW, FAST)


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def forward(
    Q, K, V, OUT, O2, M, C, N, STATISTICS, LISTS, COUNTS, BITS, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, o_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr, TILES: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, SKIPS: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr,
    KEEP_O2: tl.constexpr, COUNTED: tl.constexpr, CLOSE: tl.constexpr, TOLERANCE: tl.constexpr, RAW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    unit = scale if RAW else 1.0  # times which scores are what they are
    program = tl.program_id(0)
    h = (program // num_blocks) % H
    b = program // (num_blocks * H)
    head = b * H + h
    row = tl.cast(head, tl.int64) * num_q + tl.arange(0, BM)
    all_rows = tl.cast(tl.num_programs(0) // num_blocks, tl.int64) * num_q
    block, q_start, num_q, k_start, num_k = locate(program % num_blocks, num_q, num_k, packed, BM, False)
    q_first = block * BM
    if q_first >= num_q:
        return
    row += q_start + q_first
    present = q_first + tl.arange(0, BM) < num_q
    key_end = end_of_keys(sight, b, num_k)
    low, high = key_range(sight, q_first, num_q, num_k, key_end, BM, BN)
    inner, inner_end = inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, BN)
    listed, count, start, end = program_tiles(
        LISTS, COUNTS, program, num_k, low, high, inner, inner_end, SPLIT, LISTED, BN
    )  # fmt: skip
    q = load(matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW)
    keys = matrix(K, b, h // GROUPS, k_start, k_strides)
    values = matrix(V, b, h // GROUPS, k_start, v_strides)
    if HELD and not NORMALISED:
        q = hold(q)
    e = exponent(E, e_value, h, HAS_E, FAST)
    m = tl.zeros((BM,), tl.float32)
    c = tl.zeros((BM,), tl.float32)
    if RULE == "squares" or RULE == "identity":
        c += 1.0
    out = tl.zeros((BM, DVW), tl.float32)
    out2 = tl.zeros((BM, DVW), tl.float32)
    q_token = q_start.to(tl.int32) + q_first
    tiles = ()
    top = tl.full((BM, BN), float("-inf"), tl.float32)
    if TILES > 0:
        for i in tl.static_range(TILES):
            k = load(keys, low + i * BN, key_end, k_strides, D, BN, DW)
            tile = tile_scores(
                q, k, scale, sight, b, h, q_first, low + i * BN, q_start, num_q, k_start, num_k, key_end, PRECISION,
                BM, BN, True, RAW
            )  # fmt: skip
            tiles = tiles + (tile,)
            top = tl.maximum(top, tile)
    elif NORMALISED and not LISTED:
        for first in range(low, high, BN):
            k = load(keys, first, key_end, k_strides, D, BN, DW)
            top = tl.maximum(top, tile_scores(
                q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end, PRECISION, BM, BN,
                True, RAW
            ))  # fmt: skip
    if NORMALISED:
        if LISTED:
            m = tl.load(M + row, mask=present, other=float("-inf"))
            c = tl.load(C + row, mask=present, other=0.0)
        else:
            m = tl.max(top, 1) * unit
        alive = m > float("-inf")
        m = tl.where(alive, m, 0.0)
        if not LISTED and (TILES != 1 or BN > 32):
            c = _solve_start(top, m, c, alive, e, unit, RULE, TILES, RAW, FAST, BM, BN)
        # Every step squares the error.  Where a sweep computes all scores anew, it is left to the output to find out
        # what the last step left, and to be computed again if that is too much: all weights lie on one side of the
        # solution, so that they are off by no more than their sum.  The factor of the square grows with alpha.
        near = CLOSE if TILES > 0 else CLOSE * tl.where(e < 0.65, 2.0, 1.0)
        worst = tl.full((BM,), float("inf"), tl.float32)
        go = True
        held = q
        if HELD:  # not for the output, which takes the registers
            held = hold(q)
        while go:
            totals = tl.zeros((BM, 8), tl.float32)
            slopes = tl.zeros((BM, 8), tl.float32)
            if TILES > 0:
                for i in tl.static_range(TILES):
                    x, v, log_x = entmax(tiles[i], m, c, None, e, unit, RULE, RAW, FAST)
                    totals += lane_sums(v * x)
                    slopes += lane_sums(v)
            else:
                for part in tl.static_range(2 if SPLIT else 1):
                    for j in range(0, entries(count, start, end, part == 1)):
                        first = tile_start(LISTS, listed, low, entry(j, start, end, part == 1), LISTED, BN)
                        k = load(keys, first, key_end, k_strides, D, BN, DW, part == 1)
                        tile = tile_scores(
                            held, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end,
                            PRECISION, BM, BN, part == 0, RAW
                        )  # fmt: skip
                        x, v, log_x = entmax(tile, m, c, None, e, unit, RULE, RAW, FAST)
                        totals += lane_sums(v * x)
                        slopes += lane_sums(v)
            c, worst, go = newton_step(c, tl.sum(totals, 1), tl.sum(slopes, 1), alive, worst, near, e, RULE)
    nothing = tl.zeros((BM,), tl.float32)
    totals = tl.zeros((BM, 8), tl.float32)
    slopes = tl.zeros((BM, 8), tl.float32)
    counts = (tl.zeros((BM,), tl.int32), nothing, nothing, nothing)
    if TILES > 0:
        for i in tl.static_range(TILES):
            if COUNTED:
                ahead = ahead_by(sight, b, q_first, low + i * BN, q_start, num_q, k_start, num_k, BM, BN)
                counts = _count(counts, tiles[i], m, c, e, unit, bias, ahead, RULE, NORMALISED, RAW, FAST)
            value = load(values, low + i * BN, key_end, v_strides, DV, BN, DVW)
            out, out2, totals, slopes = _add_output(
                out, out2, totals, slopes, tiles[i], m, c, e, unit, bias, value, dropout, head, q_token, low + i * BN,
                RULE, NORMALISED, KEEP_O2, RAW, FAST, PRECISION, BM, BN
            )  # fmt: skip
    else:
        worst = tl.full((BM,), float("inf"), tl.float32)
        yet = True  # Triton 3.6 fails where the condition of a loop is not the last of its variables by name
        while yet:
            out = tl.zeros((BM, DVW), tl.float32)
            out2 = tl.zeros((BM, DVW), tl.float32)
            totals = tl.zeros((BM, 8), tl.float32)
            slopes = tl.zeros((BM, 8), tl.float32)
            counts = (tl.zeros((BM,), tl.int32), nothing, nothing, nothing)
            for part in tl.static_range(2 if SPLIT else 1):
                for j in range(0, entries(count, start, end, part == 1)):
                    first = tile_start(LISTS, listed, low, entry(j, start, end, part == 1), LISTED, BN)
                    k = load(keys, first, key_end, k_strides, D, BN, DW, part == 1)
                    tile = tile_scores(
                        q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end, PRECISION,
                        BM, BN, part == 0, RAW
                    )  # fmt: skip
                    holds = True
                    if SKIPS:
                        holds = holds_weights(tile, unit, bias, BITS, head, q_first, first, num_q, num_k, ROWS, BM, BN)
                    if holds:
                        if COUNTED:
                            ahead = ahead_by(sight, b, q_first, first, q_start, num_q, k_start, num_k, BM, BN)
                            counts = _count(counts, tile, m, c, e, unit, bias, ahead, RULE, NORMALISED, RAW, FAST)
                        value = load(values, first, key_end, v_strides, DV, BN, DVW, part == 1)
                        out, out2, totals, slopes = _add_output(
                            out, out2, totals, slopes, tile, m, c, e, unit, bias, value, dropout, head, q_token, first,
                            RULE, NORMALISED, KEEP_O2, RAW, FAST, PRECISION, BM, BN
                        )  # fmt: skip
            yet = False
            if NORMALISED:
                following, worst, yet = newton_step(
                    c, tl.sum(totals, 1), tl.sum(slopes, 1), alive, worst, TOLERANCE, e, RULE
                )  # fmt: skip
                c = tl.where(yet, following, c)
    if NORMALISED:
        tl.store(M + row, m, mask=present)
        tl.store(C + row, c, mask=present)
    if COUNTED:
        support, mass, logs, distance = counts
        inverse = reciprocal(mass)
        tl.store(STATISTICS + row, support.to(tl.float32), mask=present)
        entropy = tl.where(mass > 0.0, tl.log(tl.where(mass > 0.0, mass, 1.0)) - logs * inverse, 0.0)
        tl.store(STATISTICS + all_rows + row, entropy, mask=present)
        tl.store(STATISTICS + 2 * all_rows + row, distance * inverse, mask=present)
    n = tl.full((BM,), 1.0, tl.float32)
    if NORMALISED:
        n = reciprocal(tl.sum(totals, 1))
        tl.store(N + row, n, mask=present)
    elif HAS_SCALES:
        n = load_scales(SCALES, scales_strides, b, h, q_start + q_first, present, BM)
    out *= (n * dropout.scale)[:, None]
    store(matrix(OUT, b, h, q_start, o_strides), out, q_first, num_q, o_strides, DV, BM, DVW)
    if KEEP_O2:
        out2 *= reciprocal(tl.sum(slopes, 1))[:, None]
        store(matrix(O2, b, h, q_start, o_strides), out2, q_first, num_q, o_strides, DV, BM, DVW)
