"""Decoding: a few queries of each sequence against many keys, without gradients.

The rows of a key head, those of all query heads that share it, make one tile, so that a key is read once for all of
them; the keys are split among programs, so that a single sequence keeps a GPU busy.

    scores   for entmax: reads the keys, writes fp32 scores and the largest of every GROUP
    solve    one row: bounds its solution by those maxima, lists the groups that may hold weights, solves over them
             alone, and writes their weights over their scores
    values   one span of keys: reads the values that have a weight in some row.  Elementwise rules have no row to
             solve, and their scores are made here, so that they need none of the above
    gather   adds up the spans of a row, always in the same order

What must move is the keys, and of the values only those with weights.  For 131072 keys, 32 heads in groups of 4 and
head size 128 in bf16 the keys are 268 MB, 64 us at 4.2 TB/s, where dense attention reads 537 MB.  Beside them: 17 MB of
scores written, and of the values at most 8 % (four heads that share none of 2 % of the keys each), 21 MB; about 10 us
together.  `solve` has only one program a row, so it must not read whole rows: 8192 maxima are 32 kB, and 2 % of the
keys, scattered, lie in 28 % of the groups, 145 kB a sweep, 1.3 us at the 64 bytes a cycle of one multiprocessor.

A paged cache is a pool of pages (pages, key heads, page, D) and a table of those of each sequence.  With ALiBi and a
bound of the keys' norms in each page, pages that cannot reach the threshold of any row are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.arguments import PAGE_UNIT
from tamis.kernels.ranges import _key_range
from tamis.kernels.rules import _activation, _advance, _approach, _entmax, _exponent, _inverse, _looser, _step
from tamis.kernels.tiles import LENGTHS, _key_end, _seen

GROUP = tl.constexpr(PAGE_UNIT)
"""Keys of which `solve` knows the largest score: 64 bytes of scores, what memory moves at least."""
COUNTS = ("page", "blocks", "parts", "chunk", "groups")


@triton.jit
def _rows(H, GROUPS, num_q, blocks, parts, BM: tl.constexpr):
    """The part of the keys that is a program's, its sequence and key head, and its rows: their heads, their queries,
    their places among all rows, and whether they are there (those that are not repeat the last)."""
    program = tl.program_id(0)
    block = (program // parts) % blocks
    head = program // (parts * blocks)
    line = block * BM + tl.arange(0, BM)
    present = line < GROUPS * num_q
    line = tl.minimum(line, GROUPS * num_q - 1)
    row = tl.cast(head, tl.int64) * (GROUPS * num_q) + line
    b = head // (H // GROUPS)
    key_head = head % (H // GROUPS)
    h = key_head * GROUPS + line // num_q
    return program % parts, b, key_head, h, line % num_q, row, present


@triton.jit
def _load_queries(Q, b, h, queries, strides, D: tl.constexpr, DW: tl.constexpr):
    places = tl.cast(b, tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + queries.to(tl.int64) * strides[2]
    dims = tl.arange(0, DW)[None, :]
    return tl.load(Q + places[:, None] + dims * strides[3], mask=dims < D, other=0.0)


@triton.jit
def _page(TABLE, b, cols, end, page, num_k):
    pages = TABLE + tl.cast(b, tl.int64) * (num_k // page) + cols // page
    return tl.load(pages, mask=cols < end, other=0).to(tl.int64)


@triton.jit
def _load_keys(
    base, TABLE, b, key_head, cols, wanted, end, strides, page, num_k, D: tl.constexpr, DW: tl.constexpr,
    PAGED: tl.constexpr
):  # fmt: skip
    """The keys or values `cols` of a sequence, zero where they are not wanted."""
    if PAGED:
        places = _page(TABLE, b, cols, end, page, num_k) * strides[0] + (cols % page).to(tl.int64) * strides[2]
    else:
        places = tl.cast(b, tl.int64) * strides[0] + cols.to(tl.int64) * strides[2]
    dims = tl.arange(0, DW)[None, :]
    inside = wanted[:, None]
    if D != DW:
        inside = inside & (dims < D)
    places += tl.cast(key_head, tl.int64) * strides[1]
    return tl.load(base + places[:, None] + dims * strides[3], mask=inside, other=0.0)


@triton.jit
def _tile_scores(
    q, K, TABLE, scale, sight, b, key_head, h, queries, first, num_q, length, key_end, k_strides, page, num_k,
    D: tl.constexpr, DW: tl.constexpr, BN: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Scores of the BN keys from `first` on; `length` keys count for where the queries are."""
    zero = tl.zeros((), tl.int64)
    cols = first + tl.arange(0, BN)
    k = _load_keys(K, TABLE, b, key_head, cols, cols < key_end, key_end, k_strides, page, num_k, D, DW, PAGED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return _seen(s, sight, b, h[:, None], queries, 0, first, zero, num_q, zero, length, key_end, BN)


@triton.jit
def _range(
    start, end, q, K, TABLE, NORMS, E, e_value, scale, bias, sight, b, key_head, h, queries, H, GROUPS, num_q, length,
    key_end, k_strides, page, num_k, D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NORMALISED: tl.constexpr, HAS_E: tl.constexpr, PAGED: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Of the keys from `start` to `end`, first and end of the tiles in which some row may have a weight.

    NEAR: a score is at most the norms' product less the bias.  A weight of entmax needs one within 1 / e of the row's
    largest, which is no less than those of the last keys; a rectified one needs more than -bias.
    """
    low, high = _key_range(sight, 0, num_q, length, key_end, BM, BN)
    low = tl.minimum(tl.maximum(low, start), end)
    high = tl.maximum(tl.minimum(high, end), low)
    if NEAR:
        least = tl.zeros((BM,), tl.float32) - bias
        if NORMALISED:
            s = _tile_scores(
                q, K, TABLE, scale, sight, b, key_head, h, queries, tl.maximum(key_end - BN, 0), num_q, length, key_end,
                k_strides, page, num_k, D, DW, BN, PAGED, PRECISION
            )  # fmt: skip
            least = tl.max(s, 1) - 1.0 / _exponent(E, e_value, h, HAS_E, FAST)
        slope = tl.load(sight.slopes + b * sight.slopes_stride + h)
        # More than any rounding, also of keys that became bf16 after their norms were taken.
        norm = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * (tl.abs(scale) * 1.01)
        own = (queries + (length - num_q))[:, None]
        first = high
        last = low
        for place in range(low, high, 64 * GROUP):
            keys = place + tl.arange(0, 64) * GROUP  # a group lies in one page
            norms = tl.load(NORMS + _page(TABLE, b, keys, high, page, num_k) * (H // GROUPS) + key_head)
            distance = tl.maximum(own - (keys + (GROUP - 1))[None, :], keys[None, :] - own)
            most = norm[:, None] * norms[None, :] - slope[:, None] * tl.maximum(distance, 0).to(tl.float32)
            below = (most < (least - 1e-3)[:, None]) & (slope >= 0.0)[:, None]
            reached = (tl.min(below.to(tl.int32), 0) == 0) & (keys < high)
            first = tl.minimum(first, tl.min(tl.where(reached, keys, high), 0))
            last = tl.maximum(last, tl.max(tl.where(reached, keys + GROUP, low), 0))
        low = first // BN * BN
        high = tl.maximum(tl.minimum(high, last), low)
    return low, low + tl.cdiv(high - low, BN) * BN


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def scores(
    Q, K, S, TOP, TABLE, NORMS, E, sight, dropout, packed, q_strides, k_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts, chunk, groups,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NORMALISED: tl.constexpr,
    HAS_E: tl.constexpr, PAGED: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One chunk of keys.  Where it is not read, maxima are -inf, and nobody looks at the scores."""
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM)
    key_end = _key_end(sight, b, num_k)
    length = key_end if PAGED else num_k
    start = part * chunk
    end = tl.minimum(start + chunk, groups * GROUP)
    q = _load_queries(Q, b, h, queries, q_strides, D, DW)
    low, high = _range(
        start, end, q, K, TABLE, NORMS, E, e_value, scale, bias, sight, b, key_head, h, queries, H, GROUPS, num_q,
        length, key_end, k_strides, page, num_k, D, DW, BM, BN, NORMALISED, HAS_E, PAGED, NEAR, FAST, PRECISION
    )  # fmt: skip
    tops = TOP + (row * groups)[:, None] + tl.arange(0, BN // GROUP)[None, :]
    nothing = tl.full((BM, BN // GROUP), float("-inf"), tl.float32)
    for first in range(start, low, BN):
        tl.store(tops + first // GROUP, nothing, mask=present[:, None])
    for first in range(high, end, BN):
        tl.store(tops + first // GROUP, nothing, mask=present[:, None])
    for first in range(low, high, BN):
        s = _tile_scores(
            q, K, TABLE, scale, sight, b, key_head, h, queries, first, num_q, length, key_end, k_strides, page, num_k,
            D, DW, BN, PAGED, PRECISION
        )  # fmt: skip
        tl.store(S + (row * groups * GROUP)[:, None] + (first + tl.arange(0, BN))[None, :], s, mask=present[:, None])
        # NaN counts as more than all others, so that no group that holds one is left out.
        top = tl.reshape(tl.where(s == s, s, float("inf")), (BM, BN // GROUP, GROUP))
        tl.store(tops + first // GROUP, tl.max(top, 2), mask=present[:, None])


@triton.jit
def _listed(S, LIST, place, count, WIDTH: tl.constexpr):
    """Where the scores of the groups from place / GROUP on in a list are, and whether they are there, (1, WIDTH)."""
    index = place + tl.arange(0, WIDTH)[None, :]
    there = index < count * GROUP
    group = tl.load(LIST + index // GROUP, mask=there, other=0)
    return S + group.to(tl.int64) * GROUP + index % GROUP, there


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def solve(
    S, TOP, LIST, N, E, sight, dropout, packed, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, groups,
    RULE: tl.constexpr, HAS_E: tl.constexpr, TOLERANCE: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Weights, up to the factor N, over the scores of the groups that may hold some; in place of the maxima 1 for those
    groups and 0 for others."""
    row = tl.program_id(0)
    e = _exponent(E, e_value, (row // num_q) % H, HAS_E, FAST)
    TOP += tl.cast(row, tl.int64) * groups
    LIST += tl.cast(row, tl.int64) * groups
    S += tl.cast(row, tl.int64) * groups * GROUP
    lanes = tl.arange(0, WIDTH)[None, :]
    best = tl.full((1, WIDTH), float("-inf"), tl.float32)
    for first in range(0, groups, WIDTH):
        best = tl.maximum(best, tl.load(TOP + first + lanes, mask=first + lanes < groups, other=float("-inf")))
    m = tl.max(best, 1)
    alive = m > float("-inf")
    m = tl.where(alive, m, 0.0)
    c = tl.zeros((1,), tl.float32)
    if RULE == "squares" or RULE == "identity":
        c += 1.0
    c = _approach(best, m, c, alive, e, 1.0, RULE, False, FAST)  # a subset of the maxima, which are one of the scores
    for _ in range(2):
        total = tl.zeros((1,), tl.float32)
        slope = tl.zeros((1,), tl.float32)
        for first in range(0, groups, WIDTH):
            top = tl.load(TOP + first + lanes, mask=first + lanes < groups, other=float("-inf"))
            x, v, log_x = _entmax(top, m, c, None, e, 1.0, RULE, False, FAST)
            total += tl.sum(v * x, 1)
            slope += tl.sum(v, 1)
        c = _advance(c, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
    loose = _looser(c, e, RULE)
    count = 0
    for first in range(0, groups, WIDTH):
        inside = first + lanes < groups
        top = tl.load(TOP + first + lanes, mask=inside, other=float("-inf"))
        x, v, log_x = _entmax(top, m, loose, None, e, 1.0, RULE, False, FAST)
        holds = tl.where((x <= 0.0) | (first + lanes >= groups), 0, 1)
        tl.store(LIST + count + tl.cumsum(holds, 1) - holds, first + lanes, mask=holds > 0)
        tl.store(TOP + first + lanes, holds.to(tl.float32), mask=inside)
        count += tl.sum(tl.sum(holds, 1), 0)
    tl.debug_barrier()  # what some threads wrote, others read
    worst = float("inf")
    go = True
    while go:
        total = tl.zeros((1,), tl.float32)
        slope = tl.zeros((1,), tl.float32)
        for place in range(0, count * GROUP, WIDTH):
            places, there = _listed(S, LIST, place, count, WIDTH)
            s = tl.load(places, mask=there, other=float("-inf"))
            x, v, log_x = _entmax(s, m, c, None, e, 1.0, RULE, False, FAST)
            total += tl.sum(v * x, 1)
            slope += tl.sum(v, 1)
        c, worst, go = _step(c, total, slope, alive, worst, TOLERANCE, e, RULE)
    total = tl.zeros((1,), tl.float32)
    for place in range(0, count * GROUP, WIDTH):
        places, there = _listed(S, LIST, place, count, WIDTH)
        s = tl.load(places, mask=there, other=float("-inf"))
        x, v, log_x = _entmax(s, m, c, None, e, 1.0, RULE, False, FAST)
        total += tl.sum(v * x, 1)
        tl.store(places, v * x, mask=there)
    tl.store(N + row + tl.arange(0, 1), _inverse(total))


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def values(
    Q, K, V, S, TOP, OUTS, LIVE, TABLE, NORMS, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts, groups,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPAN: tl.constexpr, RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, PAGED: tl.constexpr,
    NEAR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One span of keys: its weights times its values, and whether it has any.

    No branch but the first: the loop is one that the compiler can load ahead in, and a value whose weights are all 0
    is not fetched because its load is masked.
    """
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM)
    key_end = _key_end(sight, b, num_k)
    length = key_end if PAGED else num_k
    start = part * SPAN
    end = tl.minimum(start + SPAN, groups * GROUP)
    held = TOP
    if NORMALISED:
        low = start
        high = end
        held += (row * groups)[:, None]
        place = start // GROUP + tl.arange(0, SPAN // GROUP)[None, :]
        live = tl.max(tl.max(tl.load(held + place, mask=place < groups, other=0.0), 1), 0).to(tl.int32)
    else:
        q = _load_queries(Q, b, h, queries, q_strides, D, DW)
        low, high = _range(
            start, end, q, K, TABLE, NORMS, E, e_value, scale, bias, sight, b, key_head, h, queries, H, GROUPS, num_q,
            length, key_end, k_strides, page, num_k, D, DW, BM, BN, NORMALISED, HAS_E, PAGED, NEAR, FAST, PRECISION
        )  # fmt: skip
        live = (low < high).to(tl.int32)
    tl.store(LIVE + tl.program_id(0), live)
    if live == 0:
        return
    out = tl.zeros((BM, DVW), tl.float32)
    for first in range(low, high, BN):
        cols = first + tl.arange(0, BN)
        if NORMALISED:
            holds = tl.load(held + (cols // GROUP)[None, :])
            r = tl.load(S + (row * groups * GROUP)[:, None] + cols[None, :], mask=holds > 0.0, other=0.0)
        else:
            s = _tile_scores(
                q, K, TABLE, scale, sight, b, key_head, h, queries, first, num_q, length, key_end, k_strides, page,
                num_k, D, DW, BN, PAGED, PRECISION
            )  # fmt: skip
            r, v = _activation(s + bias, RULE)
        wanted = (tl.max((r != 0.0).to(tl.int32), 0) > 0) & (cols < key_end)
        value = _load_keys(V, TABLE, b, key_head, cols, wanted, key_end, v_strides, page, num_k, DV, DVW, PAGED)
        out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    dims = tl.arange(0, DVW)[None, :]
    places = ((row * parts + part) * DV)[:, None] + dims
    tl.store(OUTS + places, out, mask=present[:, None] & (dims < DV))


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def gather(
    OUTS, LIVE, N, OUT, SCALES, sight, dropout, packed, o_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts,
    DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, NORMALISED: tl.constexpr, HAS_SCALES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    query = row % num_q
    h = (row // num_q) % H
    b = row // (num_q * H)
    line = row % (GROUPS * num_q)
    live = LIVE + (row // (GROUPS * num_q) * blocks + line // BM) * parts
    dims = tl.arange(0, DVW)
    out = tl.zeros((DVW,), tl.float32)
    for first in range(0, parts, 32):
        part = first + tl.arange(0, 32)
        there = tl.load(live + part, mask=part < parts, other=0) > 0
        places = ((tl.cast(row, tl.int64) * parts + part) * DV)[:, None] + dims[None, :]
        out += tl.sum(tl.load(OUTS + places, mask=there[:, None] & (dims < DV)[None, :], other=0.0), 0)
    if NORMALISED:
        out *= tl.load(N + row)
    elif HAS_SCALES:
        out *= tl.load(SCALES + b * scales_strides[0] + h * scales_strides[1] + query * scales_strides[2])
    place = tl.cast(b, tl.int64) * o_strides[0] + h * o_strides[1] + query * o_strides[2]
    tl.store(OUT + place + dims * o_strides[3], out.to(OUT.dtype.element_ty), mask=dims < DV)
