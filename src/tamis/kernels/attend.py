"""Fused attention: scores, thresholds, weights and output of a block of queries without leaving the chip.

One source of truth for each step:

    forward            one block of queries: solve each row, multiply by the values
    backward_whole     one key head whose keys fit one tile: all gradients in one program
    backward_queries   one block of queries, keys in a loop: d query, d alpha
    backward_keys      one block of keys, queries in a loop: d key, d value

and for long rows, before them:

    scan               one block of queries after the other: which tiles of scores may hold weights
    list_tiles         of those, a list for each block of queries, or of keys

A row of entmax is solved as in `tamis.transforms.solver`, relative to its largest score m, with d = s - m:

    squares   alpha = 1.5   r = y^2, y = [d / 2 + c]_+          c = t
    identity  alpha = 2     r = y,   y = [d + c]_+              c = t
    power     1 <= alpha    r = (1 + w)^b, w = e d exp(e c)     c = theta

and weights are r times n = 1 / sum r, so that a row sums to one whatever is left of the solver's error.  The slope of a
weight in its score is v = r^(1 - e), up to the factor n^(1 - e).  The backward kernels rebuild r and v from (m, c, n).
Elementwise rules (relu, squared_relu, leaky_relu, gelu, sigmoid) have no row state.  The rectified ones need no scan:
whether a tile of a long row holds weights shows as soon as its scores are there, and `forward` notes it.

Where the keys are few (TILES > 0) all scores of a block of queries are computed once and stay in registers, as that
many tiles; otherwise each sweep over the keys computes them anew, which costs less than moving them.  Nothing is added
up by atomics: two runs agree to the bit.
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
# Elementary functions that stay accurate near 0


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: one instruction, to 2^-22 absolute near 1 and -inf at 0, where the exact one takes thirty."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(tl.maximum(x, 1e-30))


@triton.jit
def _log1p(w, FAST: tl.constexpr):
    z = w / (w + 2.0)
    z2 = z * z
    near = 2.0 * z * (1.0 + z2 * (1.0 / 3.0 + z2 * (0.2 + z2 * (1.0 / 7.0 + z2 * (1.0 / 9.0)))))
    return tl.where(tl.abs(w) < 0.25, near, _log2(1.0 + w, FAST) * 0.6931471805599453)


@triton.jit
def _expm1(x):
    near = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0))))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x) - 1.0)


# ---------------------------------------------------------------------------------------------------------------
# Tiles


@triton.jit
def _pointers(base, first, stride, stride_d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None] * stride
    return base + tl.cast(first, tl.int64) * stride + rows + tl.arange(0, WIDTH)[None, :] * stride_d


@triton.jit
def _inside(first, end, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    inside = (first + tl.arange(0, ROWS) < end)[:, None]
    if D != WIDTH:
        inside = inside & (tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def _load(base, first, end, strides, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first, first + 1, ... of a (length, D) matrix, zero beyond its end."""
    pointers = _pointers(base, first, strides[2], strides[3], ROWS, WIDTH)
    return tl.load(pointers, mask=_inside(first, end, D, ROWS, WIDTH), other=0.0)


@triton.jit
def _store(base, x, first, end, strides, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    pointers = _pointers(base, first, strides[2], strides[3], ROWS, WIDTH)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=_inside(first, end, D, ROWS, WIDTH))


@triton.jit
def _matrix(base, b, h, start, strides):
    """The (length, D) matrix of one sequence and head."""
    return (
        base
        + tl.cast(b, tl.int64) * strides[0]
        + tl.cast(h, tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )


@triton.jit
def _place(block, num_q, num_k, packed, BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr):
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


@triton.jit
def _key_end(sight, b, num_k):
    if sight.has_lengths:
        num_k = tl.minimum(num_k, tl.load(sight.lengths + b).to(tl.int32))
    return num_k


@triton.jit
def _ahead(
    sight, b, q_first, k_first, q_start, num_q, k_start, num_k, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Positions of a tile's keys less those of its queries."""
    rows = q_first + tl.arange(0, BM)
    return _ahead_of(sight, b, rows, k_first + tl.arange(0, BN), q_start, num_q, k_start, num_k)


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
    return key_positions[None, :] - query_positions[:, None]


@triton.jit
def _scores(
    q, k, scale, sight, b, h, q_first, k_first, q_start, num_q, k_start, num_k, key_end, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HIDDEN: tl.constexpr = True, RAW: tl.constexpr = False
):  # fmt: skip
    """Scaled and biased scores of a tile, -inf where a key is hidden.

    HIDDEN: some key of the tile may be hidden by its place.  RAW: not scaled, which the caller does with less work;
    only where nothing is added.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not RAW:
        s *= scale
    lines = tl.arange(0, BM)
    return _seen(s, sight, b, h, lines, q_first, k_first, q_start, num_q, k_start, num_k, key_end, BN, HIDDEN)


@triton.jit
def _seen(
    s, sight, b, h, lines, q_first, k_first, q_start, num_q, k_start, num_k, key_end, BN: tl.constexpr,
    HIDDEN: tl.constexpr = True
):  # fmt: skip
    """Scores of the queries q_first + lines, biased, and -inf where a key is hidden.

    h: their head, or (rows, 1) of them.
    """
    rows = q_first + lines
    cols = k_first + tl.arange(0, BN)
    ahead = _ahead_of(sight, b, rows, cols, q_start, num_q, k_start, num_k)
    if sight.has_slopes:
        slope = tl.load(sight.slopes + b * sight.slopes_stride + h)
        s -= slope * tl.abs(ahead).to(tl.float32)
    if sight.mask_kind > 0:
        base = sight.mask + tl.cast(b, tl.int64) * sight.mask_strides[0] + tl.cast(h, tl.int64) * sight.mask_strides[1]
        base += (k_start + k_first) * sight.mask_strides[3]
        along = tl.arange(0, BN)[None, :] * sight.mask_strides[3]
        if sight.mask_by_query:
            base += (q_start + q_first) * sight.mask_strides[2]
            tile = lines[:, None] * sight.mask_strides[2] + along
            mask = tl.load(base + tile, mask=(rows < num_q)[:, None] & (cols < num_k)[None, :], other=0)
        else:
            mask = tl.load(base + along, mask=(cols < num_k)[None, :], other=0)
        if sight.mask_kind == 1:
            s = tl.where(mask != 0, s, float("-inf"))
        else:
            s += mask.to(tl.float32)
    if HIDDEN:
        seen = (cols < key_end)[None, :]
        if sight.has_left:
            seen = seen & (ahead >= -sight.left)
        if sight.has_right:
            seen = seen & (ahead <= sight.right)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _mix(x):
    """Scramble 32 bits so that neighbouring counters give unrelated bits (lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(dropout, head, q_first, k_first, BM: tl.constexpr, BN: tl.constexpr):
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
    bits = by_row[:, None] * by_col[None, :]
    return bits >= dropout.threshold


# ---------------------------------------------------------------------------------------------------------------
# Rules: scores to weights


@triton.jit
def _exponent(E, e_value, h, HAS_E: tl.constexpr, FAST: tl.constexpr):
    """e = alpha - 1 of a head; a number too small to tell from 0 stands for that."""
    e = e_value
    if HAS_E:
        e = tl.load(E + h)
    return tl.maximum(e, 1e-6 if FAST else 1e-20)


@triton.jit
def _rectify(x):
    """max(x, 0), and NaN stays: a row that goes wrong must not look like one that sees nothing."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _line(s, m, slope, offset, times, unit, RAW: tl.constexpr):
    """((s - m) slope + offset) times.  RAW: in one operation, and as accurate where scores are products, so rounded."""
    if RAW:
        return s * (slope * times * unit)[:, None] + ((offset - m * slope) * times)[:, None]
    return (s - m[:, None]) * (slope * times)[:, None] + (offset * times)[:, None]


@triton.jit
def _entmax(s, m, c, n, e, unit, RULE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr):
    """x, v and log2 x of scores, given the rows' m and solution c; weights are v x.

    Without n they are not normalised.  With it x is that times n^e, so that weights are, and v is their slope.
    """
    one = tl.zeros_like(c) + 1.0
    times = one
    log_n = one * 0.0
    if n is not None:
        log_n = tl.log2(tl.where(n > 0.0, n, 1.0))  # where a row sees nothing, x is 0 whatever it is multiplied by
        if RULE == "squares":
            times = tl.sqrt(tl.where(n > 0.0, n, 1.0))
        elif RULE == "identity":
            times = tl.where(n > 0.0, n, 1.0)
        else:
            times = tl.exp2(e * log_n)
    if RULE == "squares":
        x = _rectify(_line(s, m, one * 0.5, c, times, unit, RAW))
        v = x
        log_x = x
    elif RULE == "identity":
        x = _rectify(_line(s, m, one, c, times, unit, RAW))
        v = tl.where(x > 0.0, 1.0, 0.0)
        log_x = x
    else:
        slope = e * tl.exp(e * c)
        x = _rectify(_line(s, m, slope, one, times, unit, RAW))
        if e < (0.004 if FAST else 0.125):  # elsewhere the rounding of 1 + w is not amplified enough to matter
            w = _line(s, m, slope, one * 0.0, one, unit, RAW)
            log_x = _log1p(tl.maximum(w, -0.99999994), FAST) * 1.4426950408889634 + (e * log_n)[:, None]
        else:
            log_x = _log2(x, FAST)
        # At FAST the logarithm of 0 is -inf, and its power 0 by itself.
        v = tl.exp2(log_x * tl.maximum(1.0 / e - 1.0, 1e-6 if FAST else 0.0))
        if not FAST:
            v = tl.where(x > 0.0, v, 0.0)
    return x, v, log_x


@triton.jit
def _mass(c, total, RULE: tl.constexpr):
    """The sum of the weights that c stands for, from the sum of r."""
    if RULE == "power":
        total *= tl.exp(-c)
    return total


@triton.jit
def _advance(c, total, slope, e, RULE: tl.constexpr):
    """The next c from the sums of r and v: a Newton step on a norm of x, which never passes the root."""
    if RULE == "squares":
        return c - (total - tl.sqrt(total)) / slope
    if RULE == "identity":
        return c - (total - 1.0) / slope
    return c - _log1p((total / slope) * _expm1(-e * (tl.log(total) - c)), False) / e


@triton.jit
def _step(c, total, slope, alive, worst, tolerance, e, RULE: tl.constexpr):
    """The next c, the error of the mass that c had, and whether that is too much and still gets less."""
    mass = _mass(c, total, RULE)
    error = tl.max(tl.where(alive & (mass == mass), tl.abs(mass - 1.0), 0.0), 0)  # NaN waits for nobody
    go = (error > tolerance) & (error < worst)
    return _advance(c, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE), error, go


@triton.jit
def _inverse(x):
    """1 / x, and 0 for the rows that see nothing."""
    return tl.where(x > 0.0, 1.0 / x, 0.0)


@triton.jit
def _activation(s, RULE: tl.constexpr):
    """Weights and slopes of elementwise rules."""
    if RULE == "sigmoid":
        r = 1.0 / (1.0 + tl.exp(-s))
        v = r * (1.0 - r)
    elif RULE == "squared_relu":
        y = _rectify(s)
        r = y * y
        v = 2.0 * y
    elif RULE == "leaky_relu":
        v = tl.where(s > 0.0, 1.0, 0.01)
        r = s * v
    elif RULE == "gelu":
        below = 0.5 + 0.5 * tl.erf(s * 0.7071067811865476)
        r = s * below
        v = below + s * tl.exp(-0.5 * s * s) * 0.3989422804014327
    else:
        r = _rectify(s)
        v = tl.where(s > 0.0, 1.0, 0.0)
    if RULE == "leaky_relu" or RULE == "gelu":  # the others are 0 by themselves where a key is hidden
        hidden = s == float("-inf")
        r = tl.where(hidden, 0.0, r)
        v = tl.where(hidden, 0.0, v)
    return r, v


@triton.jit
def _weights(
    s, m, c, n, e, unit, bias, RULE: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Weights, slopes, x and log2 x of a tile from its rows' state; n also scales the rows of elementwise rules."""
    if NORMALISED:
        x, v, log_x = _entmax(s, m, c, n, e, unit, RULE, RAW, FAST)
        p = v * x
    else:
        x, v = _activation(s * unit + bias, RULE)
        log_x = x
        p = x * n[:, None]
        v *= n[:, None]
    return p, v, x, log_x


@triton.jit
def _curvature(x, log_x, e, FAST: tl.constexpr):
    """kappa = (1 - x + x ln x) / e^2 with x = p^e, without its cancellation near x = 1: d alpha is -sum kappa ds."""
    if FAST:
        t = tl.maximum(log_x * 0.6931471805599453, -87.0)
        kappa = tl.where(tl.abs(t) < 0.1, t * t * (0.5 + t * (1.0 / 3 + t * 0.125)), x * (t - 1.0) + 1.0)
        return kappa * (1.0 / (e * e))
    log_p = tl.maximum(log_x * (0.6931471805599453 / e), -87.0)
    t = log_p * e
    series = 1.0 / 144 + t * (1.0 / 840 + t * (1.0 / 5760))
    series = 0.5 + t * (1.0 / 3 + t * (0.125 + t * (1.0 / 30 + t * series)))
    power = tl.exp(t)
    return tl.where(tl.abs(t) < 0.3, log_p * log_p * series, (1.0 - power + power * t) / (e * e))


# ---------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit
def _query_range(sight, k_first, num_q, num_k, BM: tl.constexpr, BN: tl.constexpr):
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
def _key_range(sight, q_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
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
def _inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
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
def _inner_queries(sight, k_first, num_q, num_k, key_end, BM: tl.constexpr, BN: tl.constexpr):
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
def _tile(tile_list, low, i, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Where the i-th tile of a program begins: of those listed, or of all from `low` on."""
    first = low + i * BLOCK
    if LISTED:
        first = tl.load(tile_list + i).to(tl.int32) * BLOCK  # the list may be of 16 bits
    return first


@triton.jit
def _split(
    tile_list, low, count, inner, inner_end, SPLIT: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """First and end of a program's tiles within a range: all but few, so that a list is searched from both ends."""
    start = tl.zeros((), tl.int32)
    end = start
    if LISTED:
        end += tl.where(inner < inner_end, count, 0)
        while (start < end) & (_tile(tile_list, 0, tl.minimum(start, count - 1), True, BLOCK) < inner):
            start += 1
        while (start < end) & (_tile(tile_list, 0, tl.maximum(end - 1, 0), True, BLOCK) >= inner_end):
            end -= 1
    elif SPLIT:
        start += tl.where(inner < inner_end, (inner - low) // BLOCK, 0)
        end += tl.where(inner < inner_end, (inner_end - low) // BLOCK, 0)
    return start, end


@triton.jit
def _entry(j, start, end, INNER: tl.constexpr):
    """The j-th of a program's tiles within [start, end), or of those outside."""
    if INNER:
        return start + j
    return tl.where(j < start, j, j + end - start)


@triton.jit
def _entries(count, start, end, INNER: tl.constexpr):
    return end - start if INNER else count - (end - start)


@triton.jit
def _holds(
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


@triton.jit
def _add_output(
    out, out2, total, slope, s, m, c, e, unit, bias, value, dropout, head, q_first, k_first,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, KEEP_O2: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add a tile's weights times values to the output, and its weights and slopes to the row sums."""
    if NORMALISED:
        x, v, log_x = _entmax(s, m, c, None, e, unit, RULE, RAW, FAST)
        r = v * x
        total += tl.sum(r, 1)
        slope += tl.sum(v, 1)
    else:
        r, v = _activation(s * unit + bias, RULE)
    if dropout.on:
        kept = _kept(dropout, head, q_first, k_first, BM, BN)
        r = tl.where(kept, r, 0.0)
        v = tl.where(kept, v, 0.0)
    out = tl.dot(r.to(value.dtype), value, out, input_precision=PRECISION)
    if KEEP_O2:
        out2 = tl.dot(v.to(value.dtype), value, out2, input_precision=PRECISION)
    return out, out2, total, slope


@triton.jit
def _count(counts, s, m, c, e, unit, bias, ahead, RULE: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr,
           FAST: tl.constexpr):  # fmt: skip
    """Add a tile to the rows' support size and sums of r, r ln r and r times the distance."""
    support, total, logs, distance = counts
    if NORMALISED:
        x, v, log_x = _entmax(s, m, c, None, e, unit, RULE, RAW, FAST)
        r = v * x
    else:
        r, v = _activation(s * unit + bias, RULE)
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
    """The solution over a subset of the scores bounds c from the side where Newton steps start, and closely.

    `top` holds such a subset: the largest of every few scores.
    """
    if TILES > 0 and BN > 32:  # a sweep is cheap then, and so should this be
        top = tl.max(tl.reshape(top, (BM, BN // 32, 32)), 1)
    for _ in range(3):
        x, v, log_x = _entmax(top, m, c, None, e, unit, RULE, RAW, FAST)
        c = _advance(c, tl.where(alive, tl.sum(v * x, 1), 1.0), tl.where(alive, tl.sum(v, 1), 1.0), e, RULE)
    return c


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def forward(
    Q, K, V, OUT, O2, M, C, N, STATISTICS, LISTS, COUNTS, BITS, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, o_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr, TILES: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, SKIPS: tl.constexpr, ROWS: tl.constexpr, KEEP_O2: tl.constexpr,
    COUNTED: tl.constexpr, CLOSE: tl.constexpr, TOLERANCE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    unit = scale if RAW else 1.0  # times which scores are what they are
    program = tl.program_id(0)
    h = (program // num_blocks) % H
    b = program // (num_blocks * H)
    head = b * H + h
    row = tl.cast(head, tl.int64) * num_q + tl.arange(0, BM)
    all_rows = tl.cast(tl.num_programs(0) // num_blocks, tl.int64) * num_q
    block, q_start, num_q, k_start, num_k = _place(program % num_blocks, num_q, num_k, packed, BM, False)
    q_first = block * BM
    if q_first >= num_q:
        return
    row += q_start + q_first
    present = q_first + tl.arange(0, BM) < num_q
    key_end = _key_end(sight, b, num_k)
    low, high = _key_range(sight, q_first, num_q, num_k, key_end, BM, BN)
    count = tl.cdiv(tl.maximum(high - low, 0), BN)
    tile_list = LISTS
    if LISTED:
        count = tl.load(COUNTS + program)
        tile_list += tl.cast(program, tl.int64) * tl.cdiv(num_k, BN)
    inner, inner_end = _inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, BN)
    start, end = _split(tile_list, low, count, inner, inner_end, SPLIT, LISTED, BN)
    q = _load(_matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW)
    keys = _matrix(K, b, h // GROUPS, k_start, k_strides)
    values = _matrix(V, b, h // GROUPS, k_start, v_strides)
    e = _exponent(E, e_value, h, HAS_E, FAST)
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
            k = _load(keys, low + i * BN, key_end, k_strides, D, BN, DW)
            tile = _scores(
                q, k, scale, sight, b, h, q_first, low + i * BN, q_start, num_q, k_start, num_k, key_end, PRECISION,
                BM, BN, True, RAW
            )  # fmt: skip
            tiles = tiles + (tile,)
            top = tl.maximum(top, tile)
    elif NORMALISED and not LISTED:
        for first in range(low, high, BN):
            k = _load(keys, first, key_end, k_strides, D, BN, DW)
            top = tl.maximum(top, _scores(
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
        worst = float("inf")
        go = True
        while go:
            total = tl.zeros((BM,), tl.float32)
            slope = tl.zeros((BM,), tl.float32)
            if TILES > 0:
                for i in tl.static_range(TILES):
                    x, v, log_x = _entmax(tiles[i], m, c, None, e, unit, RULE, RAW, FAST)
                    total += tl.sum(v * x, 1)
                    slope += tl.sum(v, 1)
            else:
                for part in tl.static_range(2 if SPLIT else 1):
                    for j in range(0, _entries(count, start, end, part == 1)):
                        first = _tile(tile_list, low, _entry(j, start, end, part == 1), LISTED, BN)
                        k = _load(keys, first, key_end, k_strides, D, BN, DW)
                        tile = _scores(
                            q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end,
                            PRECISION, BM, BN, part == 0, RAW
                        )  # fmt: skip
                        x, v, log_x = _entmax(tile, m, c, None, e, unit, RULE, RAW, FAST)
                        total += tl.sum(v * x, 1)
                        slope += tl.sum(v, 1)
            c, worst, go = _step(c, total, slope, alive, worst, near, e, RULE)
    nothing = tl.zeros((BM,), tl.float32)
    total = nothing
    slope = nothing
    counts = (tl.zeros((BM,), tl.int32), nothing, nothing, nothing)
    if TILES > 0:
        for i in tl.static_range(TILES):
            if COUNTED:
                ahead = _ahead(sight, b, q_first, low + i * BN, q_start, num_q, k_start, num_k, BM, BN)
                counts = _count(counts, tiles[i], m, c, e, unit, bias, ahead, RULE, NORMALISED, RAW, FAST)
            value = _load(values, low + i * BN, key_end, v_strides, DV, BN, DVW)
            out, out2, total, slope = _add_output(
                out, out2, total, slope, tiles[i], m, c, e, unit, bias, value, dropout, head, q_token, low + i * BN,
                RULE, NORMALISED, KEEP_O2, RAW, FAST, PRECISION, BM, BN
            )  # fmt: skip
    else:
        worst = float("inf")
        yet = True  # Triton 3.6 fails where the condition of a loop is not the last of its variables by name
        while yet:
            for part in tl.static_range(2 if SPLIT else 1):
                for j in range(0, _entries(count, start, end, part == 1)):
                    first = _tile(tile_list, low, _entry(j, start, end, part == 1), LISTED, BN)
                    k = _load(keys, first, key_end, k_strides, D, BN, DW)
                    tile = _scores(
                        q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end, PRECISION,
                        BM, BN, part == 0, RAW
                    )  # fmt: skip
                    holds = True
                    if SKIPS:
                        holds = _holds(tile, unit, bias, BITS, head, q_first, first, num_q, num_k, ROWS, BM, BN)
                    if holds:
                        if COUNTED:
                            ahead = _ahead(sight, b, q_first, first, q_start, num_q, k_start, num_k, BM, BN)
                            counts = _count(counts, tile, m, c, e, unit, bias, ahead, RULE, NORMALISED, RAW, FAST)
                        value = _load(values, first, key_end, v_strides, DV, BN, DVW)
                        out, out2, total, slope = _add_output(
                            out, out2, total, slope, tile, m, c, e, unit, bias, value, dropout, head, q_token, first,
                            RULE, NORMALISED, KEEP_O2, RAW, FAST, PRECISION, BM, BN
                        )  # fmt: skip
            yet = False
            if NORMALISED:
                following, worst, yet = _step(c, total, slope, alive, worst, TOLERANCE, e, RULE)
                c = tl.where(yet, following, c)
                out = tl.where(yet, 0.0, out)
                out2 = tl.where(yet, 0.0, out2)
                total = tl.where(yet, 0.0, total)
                slope = tl.where(yet, 0.0, slope)
                if COUNTED:
                    support, mass, logs, distance = counts
                    sums = (tl.where(yet, 0.0, mass), tl.where(yet, 0.0, logs), tl.where(yet, 0.0, distance))
                    counts = (tl.where(yet, 0, support),) + sums
    if NORMALISED:
        tl.store(M + row, m, mask=present)
        tl.store(C + row, c, mask=present)
    if COUNTED:
        support, mass, logs, distance = counts
        inverse = _inverse(mass)
        tl.store(STATISTICS + row, support.to(tl.float32), mask=present)
        entropy = tl.where(mass > 0.0, tl.log(tl.where(mass > 0.0, mass, 1.0)) - logs * inverse, 0.0)
        tl.store(STATISTICS + all_rows + row, entropy, mask=present)
        tl.store(STATISTICS + 2 * all_rows + row, distance * inverse, mask=present)
    n = tl.full((BM,), 1.0, tl.float32)
    if NORMALISED:
        n = _inverse(total)
        tl.store(N + row, n, mask=present)
    elif HAS_SCALES:
        n = _load_scales(SCALES, scales_strides, b, h, q_start + q_first, present, BM)
    out *= (n * dropout.scale)[:, None]
    _store(_matrix(OUT, b, h, q_start, o_strides), out, q_first, num_q, o_strides, DV, BM, DVW)
    if KEEP_O2:
        out2 *= _inverse(slope)[:, None]
        _store(_matrix(O2, b, h, q_start, o_strides), out2, q_first, num_q, o_strides, DV, BM, DVW)


# ---------------------------------------------------------------------------------------------------------------
# Long rows: which tiles hold weights


@triton.jit
def _larger(a, b):
    """NaN is the largest of all: the tile that holds it must not be left out."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _looser(c, e, RULE: tl.constexpr):
    """A bound of c that rounding cannot have carried past the root."""
    if RULE == "power":
        return c - 1e-5 * (1.0 + tl.abs(c))
    return c * (1.0 + 1e-5)


@triton.jit(do_not_specialize=("num_k", "num_blocks"))
def key_norms(
    K, NORMS, strides, key_heads, num_k, num_blocks, D: tl.constexpr, DW: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The largest norm of a key in each block."""
    program = tl.program_id(0)
    head = program // num_blocks
    base = _matrix(K, head // key_heads, head % key_heads, tl.zeros((), tl.int64), strides)
    k = _load(base, (program % num_blocks) * BN, num_k, strides, D, BN, DW).to(tl.float32)
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
        k = _load(keys, first, key_end, k_strides, D, BN, DW)
        s = _scores(
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
def _scan_tile(
    top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HIDDEN: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Store the largest score of each row of a tile, and let `top` know eight."""
    zero = tl.zeros((), tl.int64)
    k = _load(keys, first, key_end, k_strides, D, BN, DW)
    s = _scores(
        q, k, scale, sight, b, h, q_first, first, zero, num_q, zero, num_k, key_end, PRECISION, BM, BN, HIDDEN, RAW
    )  # fmt: skip
    some = tl.reduce(tl.reshape(s, (BM, BN // 8, 8)), 1, _larger)
    tl.store(maxima + (first // BN) * BM + tl.arange(0, BM), tl.reduce(some, 1, _larger))
    return _larger(top, some)


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks", "tasks"))
def scan(
    Q, K, M, C, BITS, MAXIMA, NORMS, E, sight, dropout, packed, q_strides, k_strides, scales_strides,
    e_value, scale, bias, H, GROUPS, num_q, num_k, num_blocks, tasks,
    D: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, SWEEPS: tl.constexpr, NEAR: tl.constexpr,
    RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One pass over all scores: the largest of each row (M), a bound of its solution (C), and one bit for each tile of
    ROWS x BN scores, 0 where the bound proves that it holds no weight.

    The solution over a subset of a row's scores is such a bound.  The subsets are the largest scores of each tile, kept
    in memory of the program, and before that eight maxima over the whole row.  NEAR: a linear bias keeps far tiles from
    being looked at.  RAW: maxima are taken of scores that are yet to be scaled.
    """
    program = tl.program_id(0)
    zero = tl.zeros((), tl.int64)
    num_tiles = tl.cdiv(num_k, BN)
    words = tl.cdiv(num_tiles, 32)
    row_blocks = tl.cdiv(num_q, ROWS)
    heads = tasks // num_blocks
    lanes = tl.arange(0, 32)
    maxima = MAXIMA + tl.cast(program, tl.int64) * num_tiles * BM
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
        key_end = _key_end(sight, b, num_k)
        low, high = _key_range(sight, q_first, num_q, num_k, key_end, BM, BN)
        q = _load(_matrix(Q, b, h, zero, q_strides), q_first, num_q, q_strides, D, BM, DW)
        keys = _matrix(K, b, h // GROUPS, zero, k_strides)
        e = _exponent(E, e_value, h, HAS_E, FAST)
        if NEAR:
            largest = tl.load(NORMS + b * (H // GROUPS) + h // GROUPS)
            low, high = _near(
                low, high, q, keys, k_strides, largest, scale, e, sight, b, h, q_first, num_q, num_k, key_end,
                D, DW, BM, BN, PRECISION
            )  # fmt: skip
        top = tl.full((BM, 8), float("-inf"), tl.float32)
        inner, inner_end = _inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, BN)
        before = (inner - low) // BN
        for i in range(0, before + tl.cdiv(tl.maximum(high, inner_end) - inner_end, BN)):
            first = tl.where(i < before, low + i * BN, inner_end + (i - before) * BN)
            top = _scan_tile(
                top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
                D, DW, BM, BN, True, RAW, PRECISION
            )  # fmt: skip
        for first in range(inner, inner_end, BN):
            top = _scan_tile(
                top, maxima, q, keys, k_strides, scale, sight, b, h, q_first, first, num_q, num_k, key_end,
                D, DW, BM, BN, False, RAW, PRECISION
            )  # fmt: skip
        m = tl.max(top, 1) * unit
        alive = m > float("-inf")
        m = tl.where(alive, m, 0.0)
        c = tl.zeros((BM,), tl.float32)
        if RULE == "squares" or RULE == "identity":
            c += 1.0
        for _ in range(3):
            x, v, log_x = _entmax(top, m, c, None, e, unit, RULE, RAW, FAST)
            c = _advance(c, tl.where(alive, tl.sum(v * x, 1), 1.0), tl.where(alive, tl.sum(v, 1), 1.0), e, RULE)
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
                x, v, log_x = _entmax(s, m, c, None, e, unit, RULE, RAW, FAST)
                total += tl.sum(v * x, 1)
                slope += tl.sum(v, 1)
            c = _advance(c, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
        loose = _looser(c, e, RULE)
        blocks = q_first // ROWS + tl.arange(0, BM // ROWS)
        out = BITS + (tl.cast(head, tl.int64) * row_blocks + blocks) * words
        for word in range(0, words):
            tile = word * 32
            inside = (tile + lanes >= low_tile) & (tile + lanes < end_tile)
            s = tl.load(places + tile * BM, mask=inside[None, :], other=float("-inf"))
            x, v, log_x = _entmax(s, m, loose, None, e, unit, RULE, RAW, FAST)
            holds = tl.max(tl.reshape(tl.where(x <= 0.0, 0, 1), (BM // ROWS, ROWS, 32)), 1)
            tl.store(out + word, tl.sum(holds << lanes[None, :], 1), mask=blocks < row_blocks)
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


# ---------------------------------------------------------------------------------------------------------------
# Backward


@triton.jit
def _load_scales(SCALES, strides, b, h, first, present, BM: tl.constexpr):
    base = SCALES + b * strides[0] + h * strides[1] + first * strides[2]
    return tl.load(base + tl.arange(0, BM) * strides[2], mask=present, other=0.0)


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
        n = _load_scales(SCALES, scales_strides, b, h, first, present, BM)
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
    e = _exponent(E, e_value, h, HAS_E, FAST)
    row = tl.cast(head, tl.int64) * num_q + q_first + tl.arange(0, BM)
    present = q_first + tl.arange(0, BM) < num_q
    q = _load(_matrix(Q, b, h, zero, q_strides), q_first, num_q, q_strides, D, BM, DW)
    do = _load(_matrix(DO, b, h, zero, do_strides), q_first, num_q, do_strides, DV, BM, DVW)
    m, c, n = _load_rows(M, C, N, SCALES, scales_strides, b, h, row, q_first, present, NORMALISED, HAS_SCALES, BM)
    s = _scores(
        q, k, scale, sight, b, h, q_first, first, zero, num_q, zero, num_k, key_end, PRECISION, BM, BN, True, RAW
    )  # fmt: skip
    p, v, x, log_x = _weights(s, m, c, n, e, unit, bias, RULE, NORMALISED, RAW, FAST)
    # In this order as little as possible is alive at a time: registers are what limits this kernel.
    kappa = v
    if WITH_E:
        kappa = _curvature(x, log_x, e, FAST)
    if dropout.on:
        kept = _kept(dropout, head, q_first, first, BM, BN)
        p = tl.where(kept, p, 0.0)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
    if dropout.on:
        dp = tl.where(kept, dp, 0.0)
    if NORMALISED:
        dp -= (tl.sum(v * dp, 1) * _inverse(tl.sum(v, 1)))[:, None]
    ds = v * dp
    de = 0.0
    if WITH_E:
        de = -tl.sum(tl.sum(kappa * ds, 1), 0) * dropout.scale
    ds = ds.to(q.dtype)
    dq = tl.dot(ds, k, input_precision=PRECISION) * (scale * dropout.scale)
    _store(_matrix(DQ, b, h, zero, dq_strides), dq, q_first, num_q, dq_strides, D, BM, DW)
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
    key_end = _key_end(sight, b, num_k)
    k = _load(_matrix(K, b, key_head, zero, k_strides), first, key_end, k_strides, D, BN, DW)
    value = _load(_matrix(V, b, key_head, zero, v_strides), first, key_end, v_strides, DV, BN, DVW)
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
    _store(_matrix(DK, b, key_head, zero, dk_strides), dk, first, num_k, dk_strides, D, BN, DW)
    _store(_matrix(DV_, b, key_head, zero, dv_strides), dv, first, num_k, dv_strides, DV, BN, DVW)


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def backward_queries(
    Q, K, V, DO, DQ, DE, O2, DELTA, M, C, N, LISTS, COUNTS, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, do_strides, dq_strides, o2_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr, WITH_E: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    unit = scale if RAW else 1.0
    program = tl.program_id(0)
    h = (program // num_blocks) % H
    b = program // (num_blocks * H)
    head = b * H + h
    row = tl.cast(head, tl.int64) * num_q + tl.arange(0, BM)
    block, q_start, num_q, k_start, num_k = _place(program % num_blocks, num_q, num_k, packed, BM, False)
    q_first = block * BM
    if q_first >= num_q:
        if WITH_E:
            tl.store(DE + program, 0.0)
        return
    row += q_start + q_first
    present = q_first + tl.arange(0, BM) < num_q
    key_end = _key_end(sight, b, num_k)
    low, high = _key_range(sight, q_first, num_q, num_k, key_end, BM, BN)
    keys = _matrix(K, b, h // GROUPS, k_start, k_strides)
    values = _matrix(V, b, h // GROUPS, k_start, v_strides)
    e = _exponent(E, e_value, h, HAS_E, FAST)
    q = _load(_matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW)
    do = _load(_matrix(DO, b, h, q_start, do_strides), q_first, num_q, do_strides, DV, BM, DVW)
    m, c, n = _load_rows(M, C, N, SCALES, scales_strides, b, h, row, q_start + q_first, present, NORMALISED, HAS_SCALES,
                         BM)  # fmt: skip
    delta = tl.zeros((BM,), tl.float32)
    if NORMALISED:
        o2 = _load(_matrix(O2, b, h, q_start, o2_strides), q_first, num_q, o2_strides, DV, BM, DVW)
        delta = tl.sum(o2 * do.to(tl.float32), 1)
        tl.store(DELTA + row, delta, mask=present)
    dq = tl.zeros((BM, DW), tl.float32)
    # O2 comes from rounded slopes, which is enough for d query but not for d alpha: it gets its mean from exact sums.
    kappa_v = tl.zeros((BM,), tl.float32)
    kappa_v_dp = tl.zeros((BM,), tl.float32)
    sum_v = tl.zeros((BM,), tl.float32)
    sum_v_dp = tl.zeros((BM,), tl.float32)
    q_token = q_start.to(tl.int32) + q_first
    count = tl.cdiv(tl.maximum(high - low, 0), BN)
    tile_list = LISTS
    if LISTED:
        count = tl.load(COUNTS + program)
        tile_list += tl.cast(program, tl.int64) * tl.cdiv(num_k, BN)
    inner, inner_end = _inner_range(sight, low, high, q_first, num_q, num_k, key_end, BM, BN)
    start, end = _split(tile_list, low, count, inner, inner_end, SPLIT, LISTED, BN)
    for part in tl.static_range(2 if SPLIT else 1):
        for j in range(0, _entries(count, start, end, part == 1)):
            first = _tile(tile_list, low, _entry(j, start, end, part == 1), LISTED, BN)
            k = _load(keys, first, key_end, k_strides, D, BN, DW)
            value = _load(values, first, key_end, v_strides, DV, BN, DVW)
            s = _scores(
                q, k, scale, sight, b, h, q_first, first, q_start, num_q, k_start, num_k, key_end, PRECISION, BM, BN,
                part == 0, RAW
            )  # fmt: skip
            p, v, x, log_x = _weights(s, m, c, n, e, unit, bias, RULE, NORMALISED, RAW, FAST)
            dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
            if dropout.on:
                dp = tl.where(_kept(dropout, head, q_token, first, BM, BN), dp, 0.0)
            ds = v * (dp - delta[:, None])
            if WITH_E:
                kappa = _curvature(x, log_x, e, FAST)
                kappa_v += tl.sum(kappa * v, 1)
                kappa_v_dp += tl.sum(kappa * v * dp, 1)
                sum_v += tl.sum(v, 1)
                sum_v_dp += tl.sum(v * dp, 1)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= scale * dropout.scale
    _store(_matrix(DQ, b, h, q_start, dq_strides), dq, q_first, num_q, dq_strides, D, BM, DW)
    if WITH_E:
        tl.store(DE + program, tl.sum(sum_v_dp * _inverse(sum_v) * kappa_v - kappa_v_dp, 0) * dropout.scale)


@triton.jit(do_not_specialize=(*LENGTHS, "num_blocks"))
def backward_keys(
    Q, K, V, DO, DK, DV_, DELTA, M, C, N, LISTS, COUNTS, SCALES, E, sight, dropout, packed,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scales_strides, e_value, scale, bias,
    H, GROUPS, num_q, num_k, num_blocks,
    D: tl.constexpr, DW: tl.constexpr, DV: tl.constexpr, DVW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, NORMALISED: tl.constexpr, HAS_E: tl.constexpr, HAS_SCALES: tl.constexpr,
    SPLIT: tl.constexpr, LISTED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    unit = scale if RAW else 1.0
    program = tl.program_id(0)
    key_heads = H // GROUPS
    key_head = (program // num_blocks) % key_heads
    b = program // (num_blocks * key_heads)
    rows_per_head = num_q
    block, q_start, num_q, k_start, num_k = _place(program % num_blocks, num_q, num_k, packed, BN, True)
    k_first = block * BN
    if k_first >= num_k:
        return
    key_end = _key_end(sight, b, num_k)
    low, high = _query_range(sight, k_first, num_q, num_k, BM, BN)
    inner, inner_end = _inner_queries(sight, k_first, num_q, num_k, key_end, BM, BN)
    k = _load(_matrix(K, b, key_head, k_start, k_strides), k_first, key_end, k_strides, D, BN, DW)
    value = _load(_matrix(V, b, key_head, k_start, v_strides), k_first, key_end, v_strides, DV, BN, DVW)
    dk = tl.zeros((BN, DW), tl.float32)
    dv = tl.zeros((BN, DVW), tl.float32)
    for h in range(key_head * GROUPS, key_head * GROUPS + GROUPS):
        head = b * H + h
        e = _exponent(E, e_value, h, HAS_E, FAST)
        count = tl.cdiv(tl.maximum(high - low, 0), BM)
        tile_list = LISTS
        if LISTED:
            line = tl.cast(head, tl.int64) * num_blocks + block
            count = tl.load(COUNTS + line)
            tile_list += line * tl.cdiv(num_q, BM)
        start, end = _split(tile_list, low, count, inner, inner_end, SPLIT, LISTED, BM)
        for part in tl.static_range(2 if SPLIT else 1):
            for j in range(0, _entries(count, start, end, part == 1)):
                q_first = _tile(tile_list, low, _entry(j, start, end, part == 1), LISTED, BM)
                row = tl.cast(head, tl.int64) * rows_per_head + q_start + q_first + tl.arange(0, BM)
                present = q_first + tl.arange(0, BM) < num_q
                q = _load(_matrix(Q, b, h, q_start, q_strides), q_first, num_q, q_strides, D, BM, DW)
                do = _load(_matrix(DO, b, h, q_start, do_strides), q_first, num_q, do_strides, DV, BM, DVW)
                m, c, n = _load_rows(M, C, N, SCALES, scales_strides, b, h, row, q_start + q_first, present, NORMALISED,
                                     HAS_SCALES, BM)  # fmt: skip
                s = _scores(
                    q, k, scale, sight, b, h, q_first, k_first, q_start, num_q, k_start, num_k, key_end, PRECISION,
                    BM, BN, part == 0, RAW
                )  # fmt: skip
                p, v, x, log_x = _weights(s, m, c, n, e, unit, bias, RULE, NORMALISED, RAW, FAST)
                dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
                if dropout.on:
                    kept = _kept(dropout, head, q_start.to(tl.int32) + q_first, k_first, BM, BN)
                    p = tl.where(kept, p, 0.0)
                    dp = tl.where(kept, dp, 0.0)
                if NORMALISED:
                    dp -= tl.load(DELTA + row, mask=present, other=0.0)[:, None]
                dk = tl.dot(tl.trans((v * dp).to(q.dtype)), q, dk, input_precision=PRECISION)
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    dk *= scale * dropout.scale
    dv *= dropout.scale
    _store(_matrix(DK, b, key_head, k_start, dk_strides), dk, k_first, num_k, dk_strides, D, BN, DW)
    _store(_matrix(DV_, b, key_head, k_start, dv_strides), dv, k_first, num_k, dv_strides, DV, BN, DVW)
