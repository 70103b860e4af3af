"""Decoding: a few queries of each sequence against many keys, without gradients.

The rows of a key head, those of all query heads that share it, make one tile, so that a key is read once for all of
them; the keys are split among programs, so that a single sequence keeps a GPU busy.

    scores     for entmax: reads the keys, writes fp32 scores and the largest of every GROUP
    solve      one row: bounds its solution by those maxima, copies the scores that pass the bound side by side, and
               solves over them alone
    values     one span of keys: lists those with a weight in some row, then reads their values and no others
    streamed   the same for many rows, which between them want many of the keys: all of the span, tile after tile
    activated  for elementwise rules, whose rows need no solution: scores and values of a span in one pass
    gather     adds up the spans of a row, always in the same order

What must move is the keys, and of the values only those with weights.  For 131072 keys, 32 heads in groups of 4 and
head size 128 in bf16 the keys are 268 MB, 64 us at 4.2 TB/s, where dense attention reads 537 MB.  Beside them: 17 MB of
scores written, and of the values at most 8 % (four heads that share none of 2 % of the keys each), 21 MB; about 10 us
together.  `solve` has only one program a row, and waits for memory rather than for bytes: it takes thousands of numbers
at a time, and goes over whole rows of maxima (8192) and of what passed the bound (about the support), not of scores.

A paged cache is a pool of pages (pages, key heads, page, D) and a table of those of each sequence.  With ALiBi and a
bound of the keys' norms in each page, pages that cannot reach the threshold of any row are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.attention.arguments import PAGE_UNIT
from tamis.kernels.device.ranges import key_range
from tamis.kernels.device.rules import activation, approach, entmax, exponent, log1p, looser, newton_step, reciprocal
from tamis.kernels.device.tiles import LENGTHS, end_of_keys, seen_scores

GROUP = tl.constexpr(PAGE_UNIT)
"""Keys of which `solve` knows the largest score: 64 bytes of scores, what memory moves at least."""
COUNTS = ("page", "blocks", "parts", "chunk", "groups")


@triton.jit
def _rows(H, GROUPS, num_q, blocks, parts, BM: tl.constexpr, LINES: tl.constexpr):
    """The part of the keys that is a program's, its sequence and key head, and the first LINES of its rows: heads,
    queries, places among all rows, and whether they are there (those that are not repeat the last)."""
    program = tl.program_id(0)
    block = (program // parts) % blocks
    head = program // (parts * blocks)
    line = block * BM + tl.arange(0, LINES)
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
    PAGED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The keys or values `cols` of a sequence, zero where they are not wanted.  WHOLE: all lie in one page."""
    if PAGED:
        at = cols
        if WHOLE:
            at = tl.min(cols, 0)
        places = _page(TABLE, b, at, end, page, num_k) * strides[0] + (cols % page).to(tl.int64) * strides[2]
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
    D: tl.constexpr, DW: tl.constexpr, BN: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Scores of the BN keys from `first` on; `length` keys count for where the queries are."""
    zero = tl.zeros((), tl.int64)
    cols = first + tl.arange(0, BN)
    k = _load_keys(K, TABLE, b, key_head, cols, cols < key_end, key_end, k_strides, page, num_k, D, DW, PAGED, WHOLE)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return seen_scores(s, sight, b, h[:, None], queries, 0, first, zero, num_q, zero, length, key_end, BN)


@triton.jit
def _range(
    start, end, q, K, TABLE, NORMS, E, e_value, scale, bias, sight, b, key_head, h, queries, H, GROUPS, num_q, length,
    key_end, k_strides, page, num_k, D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NORMALISED: tl.constexpr, HAS_E: tl.constexpr, PAGED: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """First and end of the tiles, among keys from `start` to `end`, in which some row may have a weight.

    NEAR: a score is at most the norms' product less the bias.  A weight of entmax needs one within 1 / e of the row's
    largest, which is no less than those of the last keys; a rectified one needs more than -bias.
    """
    low, high = key_range(sight, 0, num_q, length, key_end, BM, BN)
    low = tl.minimum(tl.maximum(low, start), end)
    high = tl.maximum(tl.minimum(high, end), low)
    if NEAR:
        least = tl.zeros((BM,), tl.float32) - bias
        if NORMALISED:
            s = _tile_scores(
                q, K, TABLE, scale, sight, b, key_head, h, queries, tl.maximum(key_end - BN, 0), num_q, length, key_end,
                k_strides, page, num_k, D, DW, BN, PAGED, False, PRECISION
            )  # fmt: skip
            least = tl.max(s, 1) - 1.0 / exponent(E, e_value, h, HAS_E, FAST)
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
    HAS_E: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """One chunk of keys.  Where it is not read, maxima are -inf, and nobody looks at the scores."""
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM, BM)
    key_end = end_of_keys(sight, b, num_k)
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
            D, DW, BN, PAGED, WHOLE, PRECISION
        )  # fmt: skip
        tl.store(S + (row * groups * GROUP)[:, None] + (first + tl.arange(0, BN))[None, :], s, mask=present[:, None])
        # NaN counts as more than all others, so that no group that holds one is left out.
        top = tl.reshape(tl.where(s == s, s, float("inf")), (BM, BN // GROUP, GROUP))
        tl.store(tops + first // GROUP, tl.max(top, 2), mask=present[:, None])


@triton.jit
def _reach(c, e, RULE: tl.constexpr):
    """How far below its row's largest a score may be and have a weight; rounding cannot have made it less."""
    c = looser(c, e, RULE)
    if RULE == "squares":
        return 2.0 * c
    if RULE == "identity":
        return c
    return tl.exp(-e * c) * (1.0 + 1e-5) / e


@triton.jit
def _passes(s, m, reach):
    """1 for scores that may have a weight, and for those that are not a number."""
    return tl.where((s - m[:, None] < -reach[:, None]) | (s == float("-inf")), 0, 1)


@triton.jit
def _sweep(
    PLACE, held, count, m, c, alive, worst, tolerance, e, RULE: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """`newton_step` over `count` scores side by side, the first WIDTH of which are in registers, and their sum of r."""
    lanes = tl.arange(0, WIDTH)[None, :]
    x, slopes, log_x = entmax(held, m, c, None, e, 1.0, RULE, False, FAST)
    r = slopes * x
    for first in range(WIDTH, count, WIDTH):
        s = tl.load(PLACE + first + lanes, mask=first + lanes < count, other=float("-inf"))
        x, v, log_x = entmax(s, m, c, None, e, 1.0, RULE, False, FAST)
        r += v * x
        slopes += v
    total = tl.sum(r, 1)
    c, worst, yet = newton_step(c, total, tl.sum(slopes, 1), alive, worst, tolerance, e, RULE)
    return c, worst, yet, total


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def solve(
    S, TOP, LIST, PASSED, STATE, E, sight, dropout, packed, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, groups,
    RULE: tl.constexpr, HAS_E: tl.constexpr, TOLERANCE: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """(m, c, n) of a row."""
    row = tl.program_id(0)
    e = exponent(E, e_value, (row // num_q) % H, HAS_E, FAST)
    TOP += tl.cast(row, tl.int64) * groups
    LIST += tl.cast(row, tl.int64) * groups
    S += tl.cast(row, tl.int64) * groups * GROUP
    PASSED += tl.cast(row, tl.int64) * groups * GROUP
    lanes = tl.arange(0, WIDTH)[None, :]
    held = tl.load(TOP + lanes, mask=lanes < groups, other=float("-inf"))
    best = held
    for first in range(WIDTH, groups, WIDTH):
        best = tl.maximum(best, tl.load(TOP + first + lanes, mask=first + lanes < groups, other=float("-inf")))
    m = tl.max(best, 1)
    alive = m > float("-inf")
    m = tl.where(alive, m, 0.0)
    c = tl.zeros((1,), tl.float32)
    if RULE == "squares" or RULE == "identity":
        c += 1.0
    # The maxima are some of the scores, so their solution bounds that of the row; `best` are some of the maxima.
    c = approach(best, m, c, alive, e, 1.0, RULE, False, FAST)
    worst = tl.full((1,), float("inf"), tl.float32)
    yet = True
    while yet:
        c, worst, yet, total = _sweep(TOP, held, groups, m, c, alive, worst, 0.1, e, RULE, WIDTH, FAST)
    reach = _reach(c, e, RULE)
    count = 0
    for first in range(0, groups, WIDTH):
        top = tl.load(TOP + first + lanes, mask=first + lanes < groups, other=float("-inf"))
        passes = _passes(top, m, reach)
        tl.store(LIST + count + tl.cumsum(passes, 1) - passes, first + lanes, mask=passes > 0)
        count += tl.sum(tl.sum(passes, 1), 0)
    tl.debug_barrier()  # what some threads wrote, others read
    passed = 0
    for first in range(0, count * GROUP, WIDTH):
        index = first + lanes
        there = index < count * GROUP
        group = tl.load(LIST + index // GROUP, mask=there, other=0)
        s = tl.load(S + group.to(tl.int64) * GROUP + index % GROUP, mask=there, other=float("-inf"))
        passes = _passes(s, m, reach)
        tl.store(PASSED + passed + tl.cumsum(passes, 1) - passes, s, mask=passes > 0)
        passed += tl.sum(tl.sum(passes, 1), 0)
    tl.debug_barrier()
    held = tl.load(PASSED + lanes, mask=lanes < passed, other=float("-inf"))
    worst = tl.full((1,), float("inf"), tl.float32)
    yet = True
    while yet:
        c, worst, yet, total = _sweep(PASSED, held, passed, m, c, alive, worst, TOLERANCE, e, RULE, WIDTH, FAST)
    _, worst, yet, total = _sweep(PASSED, held, passed, m, c, alive, worst, TOLERANCE, e, RULE, WIDTH, FAST)
    place = STATE + tl.cast(row, tl.int64) * 3 + tl.arange(0, 1)
    tl.store(place, m)
    tl.store(place + 1, c)
    tl.store(place + 2, reciprocal(total))


@triton.jit
def _rows_weights(s, m, c, e, RULE: tl.constexpr, FAST: tl.constexpr):
    """Those of `entmax`, for rows of several heads, each with its e."""
    if RULE == "power":
        w = (s - m[:, None]) * (e * tl.exp(e * c))[:, None]
        r = tl.exp2(log1p(tl.maximum(w, -0.99999994), FAST) * (1.4426950408889634 / e)[:, None])
        r = tl.where(w <= -1.0, 0.0, tl.where(w == w, r, w))
    else:
        x, v, log_x = entmax(s, m, c, None, e, 1.0, RULE, False, FAST)
        r = v * x
    return r


@triton.jit
def _state(STATE, E, e_value, h, row, RULE: tl.constexpr, HAS_E: tl.constexpr, FAST: tl.constexpr):
    """m, c and e of rows, and how far their weights reach."""
    m = tl.load(STATE + row * 3)
    c = tl.load(STATE + row * 3 + 1)
    e = tl.zeros_like(m) + exponent(E, e_value, h, HAS_E, FAST)
    return m, c, e, _reach(c, e, RULE)


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def values(
    V, S, TOP, LIST, STATE, OUTS, LIVE, TABLE, E, sight, dropout, packed, v_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts, groups,
    DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,
    PIECE: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, PAGED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """One span of keys: weights, up to the rows' n, times values, and whether there are any.

    To find the keys that have weights, only as many rows are looked at as there are, LINES; a product needs BM.
    """
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM, LINES)
    m, c, e, reach = _state(STATE, E, e_value, h, row, RULE, HAS_E, FAST)
    start = part * SPAN
    size = tl.minimum(groups * GROUP - start, SPAN)
    LIST += tl.cast(tl.program_id(0), tl.int64) * SPAN
    count = 0
    for first in range(0, size, PIECE):
        # Scores of keys that nobody read are not there; the maxima of those are -inf.
        place = first // GROUP + tl.arange(0, PIECE // GROUP)[None, :]
        tops = TOP + (row * groups + start // GROUP)[:, None] + place
        top = tl.load(tops, mask=place * GROUP < size, other=float("-inf"))
        within = tl.arange(0, GROUP)[None, None, :]
        places = S + (row * groups * GROUP + start)[:, None, None] + place[:, :, None] * GROUP + within
        holds = tl.broadcast_to(_passes(top, m, reach)[:, :, None], LINES, PIECE // GROUP, GROUP)
        s = tl.reshape(tl.load(places, mask=holds > 0, other=float("-inf")), LINES, PIECE)
        wanted = tl.max(_passes(s, m, reach), 0)
        cols = first + tl.arange(0, PIECE)
        numbers = tl.cumsum(wanted, 0)
        tl.store(LIST + count + numbers - wanted, cols.to(tl.int16), mask=wanted > 0)
        # Not tl.sum(wanted): Triton 3.6 adds up the wrong lanes of what a reshape and a reduction have left.
        count += tl.max(numbers, 0)
    tl.store(LIVE + tl.program_id(0), (count > 0).to(tl.int32))
    if count == 0:
        return
    tl.debug_barrier()  # what some threads wrote, others read
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM, BM)
    m, c, e, reach = _state(STATE, E, e_value, h, row, RULE, HAS_E, FAST)
    key_end = end_of_keys(sight, b, num_k)
    S += (row * groups * GROUP + start)[:, None]
    out = tl.zeros((BM, DVW), tl.float32)
    for first in range(0, count, BN):
        there = first + tl.arange(0, BN) < count
        cols = tl.load(LIST + first + tl.arange(0, BN), mask=there, other=0).to(tl.int32)
        s = tl.load(S + cols[None, :], mask=there[None, :], other=float("-inf"))
        value = _load_keys(
            V, TABLE, b, key_head, start + cols, there, key_end, v_strides, page, num_k, DV, DVW, PAGED, False
        )  # fmt: skip
        r = _rows_weights(s, m, c, e, RULE, FAST)
        out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    _store_span(OUTS, out, row, present, part, parts, DV, DVW)


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def streamed(
    V, S, TOP, STATE, OUTS, LIVE, TABLE, E, sight, dropout, packed, v_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts, groups,
    DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, RULE: tl.constexpr,
    HAS_E: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One span of keys, as `values`, without a list: scores are read side by side, where a list would fetch 32 bytes
    for each of its keys and rows.  Groups below a row's reach are still not read, nor values that no row wants."""
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM, BM)
    m, c, e, reach = _state(STATE, E, e_value, h, row, RULE, HAS_E, FAST)
    start = part * SPAN
    size = tl.minimum(groups * GROUP - start, SPAN)  # whole tiles: both are multiples of BN
    TOP += (row * groups + start // GROUP)[:, None]
    S += (row * groups * GROUP + start)[:, None]
    some = tl.zeros((BM, BN // GROUP), tl.int32)
    for first in range(0, size, BN):
        top = tl.load(TOP + first // GROUP + tl.arange(0, BN // GROUP)[None, :])
        some = tl.maximum(some, _passes(top, m, reach))
    live = tl.max(tl.max(some, 1), 0)
    tl.store(LIVE + tl.program_id(0), live)
    if live == 0:
        return
    key_end = end_of_keys(sight, b, num_k)
    out = tl.zeros((BM, DVW), tl.float32)
    for first in range(0, size, BN):
        place = first + tl.arange(0, BN)
        # Scores of keys that nobody read are not there; the maxima of those are -inf.
        top = tl.load(TOP + (place // GROUP)[None, :])
        s = tl.load(S + place[None, :], mask=_passes(top, m, reach) > 0, other=float("-inf"))
        r = _rows_weights(s, m, c, e, RULE, FAST)
        cols = start + place
        wanted = (tl.max((r != 0.0).to(tl.int32), 0) > 0) & (cols < key_end)
        value = _load_keys(V, TABLE, b, key_head, cols, wanted, key_end, v_strides, page, num_k, DV, DVW, PAGED, WHOLE)
        out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    _store_span(OUTS, out, row, present, part, parts, DV, DVW)


@triton.jit
def _store_span(OUTS, out, row, present, part, parts, DV: tl.constexpr, DVW: tl.constexpr):
    dims = tl.arange(0, DVW)[None, :]
    places = ((row * parts + part) * DV)[:, None] + dims
    tl.store(OUTS + places, out, mask=present[:, None] & (dims < DV))


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def activated(
    Q, K, V, OUTS, LIVE, TABLE, NORMS, E, sight, dropout, packed, q_strides, k_strides, v_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, page, num_k, blocks, parts, groups,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPAN: tl.constexpr, RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, PAGED: tl.constexpr,
    WHOLE: tl.constexpr, NEAR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One span of keys: weights times values, and whether any of it was read.

    No branch but the first: the loop is one that the compiler can load ahead in, and a value whose weights are all 0
    is not fetched because its load is masked.
    """
    part, b, key_head, h, queries, row, present = _rows(H, GROUPS, num_q, blocks, parts, BM, BM)
    key_end = end_of_keys(sight, b, num_k)
    length = key_end if PAGED else num_k
    start = part * SPAN
    end = tl.minimum(start + SPAN, groups * GROUP)
    q = _load_queries(Q, b, h, queries, q_strides, D, DW)
    low, high = _range(
        start, end, q, K, TABLE, NORMS, E, e_value, scale, bias, sight, b, key_head, h, queries, H, GROUPS, num_q,
        length, key_end, k_strides, page, num_k, D, DW, BM, BN, NORMALISED, HAS_E, PAGED, NEAR, FAST, PRECISION
    )  # fmt: skip
    tl.store(LIVE + tl.program_id(0), (low < high).to(tl.int32))
    if low >= high:
        return
    out = tl.zeros((BM, DVW), tl.float32)
    for first in range(low, high, BN):
        s = _tile_scores(
            q, K, TABLE, scale, sight, b, key_head, h, queries, first, num_q, length, key_end, k_strides, page, num_k,
            D, DW, BN, PAGED, WHOLE, PRECISION
        )  # fmt: skip
        r, v = activation(s + bias, RULE)
        cols = first + tl.arange(0, BN)
        wanted = (tl.max((r != 0.0).to(tl.int32), 0) > 0) & (cols < key_end)
        value = _load_keys(V, TABLE, b, key_head, cols, wanted, key_end, v_strides, page, num_k, DV, DVW, PAGED, WHOLE)
        out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    _store_span(OUTS, out, row, present, part, parts, DV, DVW)


@triton.jit(do_not_specialize=(*LENGTHS, *COUNTS))
def gather(
    OUTS, LIVE, STATE, OUT, SCALES, sight, dropout, packed, o_strides, scales_strides,
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
    for first in range(0, parts, 128):
        part = first + tl.arange(0, 128)
        there = tl.load(live + part, mask=part < parts, other=0) > 0
        places = ((tl.cast(row, tl.int64) * parts + part) * DV)[:, None] + dims[None, :]
        out += tl.sum(tl.load(OUTS + places, mask=there[:, None] & (dims < DV)[None, :], other=0.0), 0)
    if NORMALISED:
        out *= tl.load(STATE + tl.cast(row, tl.int64) * 3 + 2)
    elif HAS_SCALES:
        out *= tl.load(SCALES + b * scales_strides[0] + h * scales_strides[1] + query * scales_strides[2])
    place = tl.cast(b, tl.int64) * o_strides[0] + h * o_strides[1] + query * o_strides[2]
    tl.store(OUT + place + dims * o_strides[3], out.to(OUT.dtype.element_ty), mask=dims < DV)
