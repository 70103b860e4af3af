"""Fused attention, backward: weights and slopes are rebuilt from the rows' state (m, c, n), see `rules`.

    backward_whole     one key head whose keys fit one tile: all gradients in one program
    backward_queries   one block of queries, keys in a loop: d query, d alpha
    backward_keys      one block of keys, queries in a loop: d key, d value

The tiles of the last can be TRANSPOSED, keys by queries: their weights and slopes are then operands of its products as
they are, in registers, where those of queries by keys are transposed in shared memory first.  A thread then holds
scores of many rows, and nothing should be worked out for each: `backward_queries` leaves four numbers of every row side
by side, its `row_lines` and delta, the mean of d weights under the slopes, or its scale.

Nothing is added up by atomics: two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.device.ranges import (
    entries,
    entry,
    inner_queries,
    inner_range,
    key_range,
    program_tiles,
    query_range,
    tile_start,
)
from tamis.kernels.device.rules import (
    curvature,
    curvature_unit,
    entmax_on,
    exponent,
    reciprocal,
    row_lines,
    tile_weights,
)
from tamis.kernels.device.tiles import (
    LENGTHS,
    by_query,
    end_of_keys,
    hold,
    kept_by,
    lane_sums,
    load,
    load_scales,
    locate,
    matrix,
    products,
    store,
    tile_scores,
)


@triton.jit
def _load_rows(
    M, C, N, SCALES, scales_strides, b, h, row, first, present, NORMALISED: tl.constexpr, HAS_SCALES: tl.constexpr,
    BM: tl.constexpr
):  # fmt: skip
    """The rows' state (m, c, n)."""
    m = tl.zeros((BM,), tl.float32)
    c = m
    n = m + 1.0
    if NORMALISED:
        m = tl.load(M + row, mask=present, other=1e30)  # so that no row beyond the last has weights
        c = tl.load(C + row, mask=present, other=0.0)
        n = tl.load(N + row, mask=present, other=0.0)
    elif HAS_SCALES:
        n = load_scales(SCALES, scales_strides, b, h, first, present, BM)
    return m, c, n


@triton.jit
def _whole_block(
    dk, dv, k, value, Q, DO, DQ, M, C, N, SCALES, E, q_strides, do_strides, dq_strides, scales_strides, sight, dropout,
    e_value, scale, bias, b, h, H, q_first, num_q, num_k, key_end,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr, WITH_E: tl.constexpr,
    RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One block of queries against all keys: d query is stored, d key and d value added up, d alpha returned."""
    unit = scale if RAW else 1.0
    zero = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int32)
    head = b * H + h
    e = exponent(E, e_value, h, HAS_E, FAST)
    row = tl.cast(head, tl.int64) * num_q + q_first + tl.arange(0, BM)
    present = q_first + tl.arange(0, BM) < num_q
    q = load(matrix(Q, b, h, zero, q_strides), q_first, num_q, q_strides, D, BM, DW)
    do = load(matrix(DO, b, h, zero, do_strides), q_first, num_q, do_strides, DV, BM, DVW)
    m, c, n = _load_rows(M, C, N, SCALES, scales_strides, b, h, row, q_first, present, NORMALISED, HAS_SCALES, BM)
    s = tile_scores(
        q, k, scale, sight, b, h, q_first, first, zero, num_q, zero, num_k, key_end, PRECISION, BM, BN, True, RAW
    )  # fmt: skip
    p, v, x, log_x = tile_weights(s, m, c, n, e, unit, bias, RULE, NORMALISED, RAW, FAST)
    # In this order as little as possible is alive at a time: registers are what limits this kernel.
    kappa = v
    if WITH_E:
        kappa = curvature(x, log_x, e, FAST)
    if dropout.on:
        kept = kept_by(dropout, head, q_first, first, BM, BN)
        p = tl.where(kept, p, 0.0)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
    if dropout.on:
        dp = tl.where(kept, dp, 0.0)
    if NORMALISED:
        dp -= (tl.sum(v * dp, 1) * reciprocal(tl.sum(v, 1)))[:, None]
    ds = v * dp
    de = 0.0
    if WITH_E:
        de = -tl.sum(tl.sum(kappa * ds, 1), 0) * (curvature_unit(e, FAST) * dropout.scale)
    ds = ds.to(q.dtype)
    dq = tl.dot(ds, k, input_precision=PRECISION) * (scale * dropout.scale)
    store(matrix(DQ, b, h, zero, dq_strides), dq, q_first, num_q, dq_strides, D, BM, DW)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    return dk, dv, de


@triton.jit(do_not_specialize=LENGTHS)
def backward_whole(
    Q, K, V, DO, DQ, DK, DV_, DE, M, C, N, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, do_strides, dq_strides, dk_strides, dv_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, num_k,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr, WITH_E: tl.constexpr,
    ONE_BLOCK: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    key_heads = H // GROUPS
    b = program // key_heads
    key_head = program % key_heads
    zero = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int32)
    key_end = end_of_keys(sight, b, num_k)
    k = load(matrix(K, b, key_head, zero, k_strides), first, key_end, k_strides, D, BN, DW)
    value = load(matrix(V, b, key_head, zero, v_strides), first, key_end, v_strides, DV, BN, DVW)
    dk = tl.zeros((BN, DW), tl.float32)
    dv = tl.zeros((BN, DVW), tl.float32)
    if ONE_BLOCK:  # a loop around it would cost a third of the speed
        dk, dv, de = _whole_block(
            dk, dv, k, value, Q, DO, DQ, M, C, N, SCALES, E, q_strides, do_strides, dq_strides, scales_strides, sight,
            dropout, e_value, scale, bias, b, key_head, H, first, num_q, num_k, key_end,
            D, DW, DV, DVW, BM, BN, RULE, NORMALISED, HAS_E, HAS_SCALES, WITH_E, RAW, FAST, PRECISION
        )  # fmt: skip
        if WITH_E:
            tl.store(DE + program, de)
    else:
        for h in range(key_head * GROUPS, key_head * GROUPS + GROUPS):
            head_de = tl.zeros((), tl.float32)
            for q_first in range(first, num_q, BM):
                dk, dv, de = _whole_block(
                    dk, dv, k, value, Q, DO, DQ, M, C, N, SCALES, E, q_strides, do_strides, dq_strides, scales_strides,
                    sight, dropout, e_value, scale, bias, b, h, H, q_first, num_q, num_k, key_end,
                    D, DW, DV, DVW, BM, BN, RULE, NORMALISED, HAS_E, HAS_SCALES, WITH_E, RAW, FAST, PRECISION
                )  # fmt: skip
                head_de += de
            if WITH_E:
                tl.store(DE + b * H + h, head_de)
    dk *= scale * dropout.scale
    dv *= dropout.scale
    store(matrix(DK, b, key_head, zero, dk_strides), dk, first, num_k, dk_strides, D, BN, DW)
    store(matrix(DV_, b, key_head, zero, dv_strides), dv, first, num_k, dv_strides, DV, BN, DVW)


@triton.jit
def _store_lines(LINES, slope, origin, height, delta, row, present, BM: tl.constexpr):
    lines = tl.reshape(tl.join(tl.join(slope, delta), tl.join(origin, height)), (BM, 4))
    tl.store(LINES + row[:, None] * 4 + tl.arange(0, 4)[None, :], lines, mask=present[:, None])


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def backward_queries(
    Q, K, V, DO, DQ, DE, O2, LINES, M, C, N, LISTS, COUNTS, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, do_strides, dq_strides, o2_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HELD: tl.constexpr, RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr,
    HAS_SCALES: tl.constexpr, WITH_E: tl.constexpr, SPLIT: tl.constexpr, LISTED: tl.constexpr, RAW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """HELD: 1 if queries stay in registers, 2 if the gradients of their outputs do too."""
    unit = scale if RAW else 1.0
    program = tl.program_id(0)
    h = (program // num_blocks) % H
    b = program // (num_blocks * H)
    head = b * H + h
    row = tl.cast(head, tl.int64) * num_q + tl.arange(0, BM)
    block, q_start, num_q, k_start, num_k = locate(program % num_blocks, num_q, num_k, packed, BM, False)
    q_first = block * BM
    if q_first >= num_q:
        if WITH_E:
            tl.store(DE + program, 0.0)
        return
    row += q_start + q_first
    present = q_first + tl.arange(0, BM) < num_q
    key_end = end_of_keys(sight, b, num_k)
    low, high = key_range(sight, q_first, num_q, num_k, key_end, BM, BN)
    keys = matrix(K, b, h // GROUPS, k_start, k_strides)
    values = matrix(V, b, h // GROUPS, k_start, v_strides)
    e = exponent(E, e_value, h, HAS_E, FAST)
    q = load(matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW)
    do = load(matrix(DO, b, h, q_start, do_strides), q_first, num_q, do_strides, DV, BM, DVW)
    m, c, n = _load_rows(M, C, N, SCALES, scales_strides, b, h, row, q_start + q_first, present, NORMALISED, HAS_SCALES,
                         BM)  # fmt: skip
    if HELD >= 1:
        q = hold(q)
    if HELD >= 2:
        do = hold(do)
    delta = tl.zeros((BM,), tl.float32)
    if NORMALISED:
        o2 = load(matrix(O2, b, h, q_start, o2_strides), q_first, num_q, o2_strides, DV, BM, DVW)
        delta = tl.sum(o2 * do.to(tl.float32), 1)
        slope, origin, height = row_lines(m, c, n, e, unit, RULE, RAW, FAST)
        _store_lines(LINES, slope, origin, height, delta, row, present, BM)
    elif HAS_SCALES:
        _store_lines(LINES, n, n, n, n, row, present, BM)
    dq = tl.zeros((BM, DW), tl.float32)
    # O2 comes from rounded slopes, which is enough for d query but not for d alpha: it gets its mean from exact sums.
    kappa_v = tl.zeros((BM, 8), tl.float32)
    kappa_v_dp = tl.zeros((BM, 8), tl.float32)
    sum_v = tl.zeros((BM, 8), tl.float32)
    sum_v_dp = tl.zeros((BM, 8), tl.float32)
    q_token = q_start.to(tl.int32) + q_first
    inner, inner_end = inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, BN)
    listed, count, start, end = program_tiles(
        LISTS, COUNTS, program, num_k, low, high, inner, inner_end, SPLIT, LISTED, BN
    )  # fmt: skip
    for part in tl.static_range(2 if SPLIT else 1):
        for j in range(0, entries(count, start, end, part == 1)):
            first = tile_start(LISTS, listed, low, entry(j, start, end, part == 1), LISTED, BN)
            k = load(keys, first, key_end, k_strides, D, BN, DW, part == 1)
            value = load(values, first, key_end, v_strides, DV, BN, DVW, part == 1)
            s = tile_scores(
                q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end, PRECISION, BM, BN,
                part == 0, RAW
            )  # fmt: skip
            p, v, x, log_x = tile_weights(s, m, c, n, e, unit, bias, RULE, NORMALISED, RAW, FAST)
            curved = v
            if WITH_E:  # before d weights, so that less is alive with them
                curved = curvature(x, log_x, e, FAST) * v
            dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
            if dropout.on:
                dp = tl.where(kept_by(dropout, head, q_token, first, BM, BN), dp, 0.0)
            if WITH_E:
                kappa_v += lane_sums(curved)
                kappa_v_dp += lane_sums(curved * dp)
                sum_v += lane_sums(v)
                sum_v_dp += lane_sums(v * dp)
            ds = v * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= scale * dropout.scale
    store(matrix(DQ, b, h, q_start, dq_strides), dq, q_first, num_q, dq_strides, D, BM, DW)
    if WITH_E:
        mean_dp = tl.sum(sum_v_dp, 1) * reciprocal(tl.sum(sum_v, 1))
        de = tl.sum(mean_dp * tl.sum(kappa_v, 1) - tl.sum(kappa_v_dp, 1), 0)
        tl.store(DE + program, de * (curvature_unit(e, FAST) * dropout.scale))


@triton.jit
def _load_lines(LINES, start, first, end, BM: tl.constexpr, FULL: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What `_store_lines` stored, shaped for a tile.  In one load: of fewer numbers than there are threads each would
    load all that it needs by itself."""
    lines = load(LINES + start * 4, first, end, (0, 0, 4, 1), 4, BM, 4, FULL)
    left, right = tl.split(tl.reshape(lines, (BM, 2, 2)))
    slope, delta = tl.split(left)
    origin, height = tl.split(right)
    return (
        by_query(slope, TRANSPOSED),
        by_query(origin, TRANSPOSED),
        by_query(height, TRANSPOSED),
        by_query(delta, TRANSPOSED),
    )


@triton.jit
def _by_keys(x, TRANSPOSED: tl.constexpr):
    """A tile as keys by queries."""
    return x if TRANSPOSED else tl.trans(x)


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def backward_keys(
    Q, K, V, DO, DK, DV_, LINES, LISTS, COUNTS, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, HELD: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """ROWS: queries of a tile, which are taken BM at a time.  HELD: 1 if keys stay in registers, 2 if values do too."""
    unit = scale if RAW else 1.0
    program = tl.program_id(0)
    key_heads = H // GROUPS
    key_head = (program // num_blocks) % key_heads
    b = program // (num_blocks * key_heads)
    rows_per_head = num_q
    block, q_start, num_q, k_start, num_k = locate(program % num_blocks, num_q, num_k, packed, BN, True)
    k_first = block * BN
    if k_first >= num_k:
        return
    key_end = end_of_keys(sight, b, num_k)
    low, high = query_range(sight, k_first, num_q, num_k, ROWS, BN)
    inner, inner_end = inner_queries(sight, k_first, num_q, num_k, key_end, ROWS, BN)
    k = load(matrix(K, b, key_head, k_start, k_strides), k_first, key_end, k_strides, D, BN, DW)
    value = load(matrix(V, b, key_head, k_start, v_strides), k_first, key_end, v_strides, DV, BN, DVW)
    if HELD >= 1:
        k = hold(k)
    if HELD >= 2:
        value = hold(value)
    dk = tl.zeros((BN, DW), tl.float32)
    dv = tl.zeros((BN, DVW), tl.float32)
    for h in range(key_head * GROUPS, key_head * GROUPS + GROUPS):
        head = b * H + h
        row = tl.cast(head, tl.int64) * rows_per_head + q_start
        e = exponent(E, e_value, h, HAS_E, FAST)
        line = tl.cast(head, tl.int64) * num_blocks + block
        listed, count, start, end = program_tiles(
            LISTS, COUNTS, line, num_q, low, high, inner, inner_end, SPLIT, LISTED, ROWS
        )  # fmt: skip
        for part in tl.static_range(2 if SPLIT else 1):
            for j in range(0, entries(count, start, end, part == 1) * (ROWS // BM)):
                q_first = tile_start(LISTS, listed, low, entry(j // (ROWS // BM), start, end, part == 1), LISTED, ROWS)
                q_first += j % (ROWS // BM) * BM
                q = load(matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW, part == 1)
                do = load(matrix(DO, b, h, q_start, do_strides), q_first, num_q, do_strides, DV, BM, DVW, part == 1)
                s = tile_scores(
                    q, k, scale, sight, b, h, q_first, k_first, q_start, num_q, k_start, num_k, key_end, PRECISION,
                    BM, BN, part == 0, RAW, TRANSPOSED
                )  # fmt: skip
                if NORMALISED or HAS_SCALES:
                    slope, origin, height, delta = _load_lines(LINES, row, q_first, num_q, BM, part == 1, TRANSPOSED)
                if NORMALISED:
                    if part == 0:  # so that no row beyond the last has weights
                        present = by_query(q_first + tl.arange(0, BM) < num_q, TRANSPOSED)
                        slope = tl.where(present, slope, 1.0)
                        origin = tl.where(present, origin, -1e30 if RAW else 1e30)
                    x, v, _ = entmax_on(s, slope, origin, height, e, RULE, RAW, FAST)
                    p = v * x
                else:
                    n = slope if HAS_SCALES else tl.full((1, 1), 1.0, tl.float32)
                    p, v, _, _ = tile_weights(s, n, n, n, e, unit, bias, RULE, False, RAW, FAST)
                dp = products(do, value, PRECISION, TRANSPOSED)
                if dropout.on:
                    kept = kept_by(dropout, head, q_start.to(tl.int32) + q_first, k_first, BM, BN)
                    p = tl.where(kept, p, 0.0)
                    dp = tl.where(kept, dp, 0.0)
                if NORMALISED:
                    dp -= delta
                dk = tl.dot(_by_keys((v * dp).to(q.dtype), TRANSPOSED), q, dk, input_precision=PRECISION)
                dv = tl.dot(_by_keys(p.to(do.dtype), TRANSPOSED), do, dv, input_precision=PRECISION)
    dk *= scale * dropout.scale
    dv *= dropout.scale
    store(matrix(DK, b, key_head, k_start, dk_strides), dk, k_first, num_k, dk_strides, D, BN, DW)
    store(matrix(DV_, b, key_head, k_start, dv_strides), dv, k_first, num_k, dv_strides, DV, BN, DVW)
