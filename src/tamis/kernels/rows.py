"""Row transforms: entmax and its loss over the rows of a matrix, forward and backward.

A row is solved relative to its largest score m, d = z - m, as in `tamis.transforms.solver`:

    squares    alpha = 1.5            x = [d + c]_+ / 2       weights r = x^2
    identity   alpha = 2              x = [d + c]_+           r = x
    power      1.125 <= alpha <= 2    x = e [d + c]_+         r = x^b, b = 1 / e
    near one   alpha < 1.125          x = [1 + e d exp(e c)]_+    r = x^b, c = theta
    any        alpha from memory: one of the last two, by its value

The weights are r / sum r.  c is kept as a pair hi + lo: one fp32 number would blur the mass of thousands of scores just
above the threshold.  (m, hi, lo, sum r) is the state of a row, from which its weights can be computed again.

    resident   rows that fit the registers: read once, solved there, written once
    streamed   wider rows: one pass finds the largest score of every line of 128.  These are a subset of the row, and
               the threshold of a subset is a lower bound of that of the row, so that lines below it have no weight.
               The others are listed, and only they are read again.  Where that is all lines nothing else changes.
    gradient   of the weights: resident, or in two passes that read the incoming gradient only where there is support
    loss_gradient   of the loss, from the scores and the rows' states: no weights are ever stored

The loss adds (slope in alpha, weight of the sample, total weight of its target) to the state.  Its losses and the
factors of its gradient are made here too: each as an operation of torch would cost more than the kernel.

Rows of alpha > 2 are left to `tamis.kernels.rows_edge`.  No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tamis.kernels.rules import _advance, _curvature, _entmax, _expm1, _log1p, _log2, _rectify
from tamis.transforms.entmax import HIGHEST, LOWEST

NEAR_ONE = tl.constexpr(0.125)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)


class Classes(NamedTuple):
    """What a loss is of: pointers (None where absent), numbers, and what of it is there."""

    target: Any
    weight: Any
    ignored: Any
    """The target of rows that do not count."""
    hard: Any
    """Share of the target; the rest is that of all classes, `soft` for each."""
    soft: Any
    has_target: tl.constexpr
    """Or the loss is the conjugate."""
    has_weight: tl.constexpr
    smoothed: tl.constexpr


@triton.jit
def exponent(E, e_value, row, group, alphas, HAS_E: tl.constexpr):
    """e = alpha - 1 of a row: never 0, between its limits, and NaN where alpha is below 0."""
    e = e_value
    if HAS_E:
        e = tl.load(E + (row // group) % alphas)
    limited = tl.minimum(tl.maximum(e, _LOWEST), _HIGHEST)
    limited = tl.where(tl.abs(limited) < 1e-20, 1e-20, limited)
    return tl.where(e >= -1.0, limited, float("nan"))


@triton.jit
def free_slope(de, E, row, group, alphas):
    """The slope in alpha of a row, and 0 where alpha is not between its limits."""
    e = tl.load(E + (row // group) % alphas)
    return tl.where((e >= _LOWEST) & (e <= _HIGHEST), de, 0.0)


@triton.jit
def relative(z, m):
    """d = z - m, which for m = +inf leaves the infinities at 0."""
    return tl.where(z == m[:, None], 0.0, z - m[:, None])


@triton.jit
def _near_one(d, c, e):
    w = d * (e * tl.exp(e * c))[:, None]
    near = tl.maximum(w, -0.99999994, propagate_nan=tl.PropagateNan.ALL)
    near = tl.minimum(near, 1e30, propagate_nan=tl.PropagateNan.ALL)
    log_x = _log1p(near, False) * _LOG2_E
    v = tl.exp2(log_x * (1.0 / e - 1.0))
    return 1.0 + near, tl.where((w > -1.0) & (w < float("inf")), v, 0.0), log_x


@triton.jit
def _power(d, hi, lo, e):
    x = _rectify((d + hi[:, None]) + lo[:, None]) * e
    log_x = _log2(x, False)
    return x, tl.where(x > 0.0, tl.exp2(log_x * (1.0 / e - 1.0)), 0.0), log_x


@triton.jit
def weigh(d, hi, lo, e, RULE: tl.constexpr):
    """x, v and log2 x of scores relative to the largest; weights are r = v x, unnormalised."""
    if RULE == "near one":
        x, v, log_x = _near_one(d, hi, e)
    elif RULE == "power":
        x, v, log_x = _power(d, hi, lo, e)
    elif RULE == "any":
        if e < NEAR_ONE:
            x, v, log_x = _near_one(d, hi, e)
        else:
            x, v, log_x = _power(d, hi, lo, e)
    else:
        x, v, log_x = _entmax(d, -hi, lo * e, None, e, 1.0, RULE, False, False)
    return x, v, log_x


@triton.jit
def _start(m, e, RULE: tl.constexpr):
    """hi where nothing is known yet: the largest weight is 1."""
    hi = tl.zeros_like(m)
    if RULE == "any":
        hi += tl.where(e < NEAR_ONE, 0.0, 1.0 / e)
    elif RULE != "near one":
        hi += 1.0 / e
    return hi


@triton.jit
def _shift(total, slope, e, RULE: tl.constexpr):
    """The step of c: Newton's on a norm of x, which never passes the root."""
    if RULE == "squares" or RULE == "identity":
        return _advance(tl.zeros_like(total), total, slope, e, RULE) / e
    log_mass = tl.log(total)
    return -_expm1(e * log_mass) * tl.exp((1.0 - e) * log_mass) / (e * slope)


@triton.jit
def _step(hi, lo, total, slope, e, RULE: tl.constexpr):
    if RULE == "near one":
        return _advance(hi, total, slope, e, "power"), lo
    shift = _shift(total, slope, e, RULE)
    new = lo + shift
    sum_ = hi + new
    low = new - (sum_ - hi)
    if RULE == "any":
        near = e < NEAR_ONE
        sum_ = tl.where(near, _advance(hi, total, slope, e, "power"), sum_)
        low = tl.where(near, 0.0, low)
    return sum_, low


@triton.jit
def _mass(hi, total, e, RULE: tl.constexpr):
    """The sum of the weights that c stands for, from the sum of r."""
    if RULE == "near one":
        return total * tl.exp(-hi)
    if RULE == "any":
        return tl.where(e < NEAR_ONE, total * tl.exp(-hi), total)
    return total


@triton.jit
def _solve_start(top, hi, lo, alive, e, RULE: tl.constexpr):
    """Three steps over a subset of the scores, relative to the largest: c comes down, but not below its solution."""
    for _ in range(3):
        x, v, log_x = weigh(top, hi, lo, e, RULE)
        total = tl.where(alive, tl.sum(v * x, 1), 1.0)
        slope = tl.where(alive, tl.sum(v, 1), 1.0)
        hi, lo = _step(hi, lo, total, slope, e, RULE)
    return hi, lo


@triton.jit
def _unfinished(hi, total, alive, worst, e, RULE: tl.constexpr):
    """Whether the worst row of a tile still improves and has to, and its error.  NaN waits for nobody."""
    mass = _mass(hi, total, e, RULE)
    error = tl.max(tl.where(alive & (mass == mass), tl.abs(mass - 1.0), 0.0), 0)
    return (error > 1e-6) & (error < worst), error


@triton.jit
def _next(hi, lo, total, slope, alive, go, e, RULE: tl.constexpr):
    """One more step if it is asked for; otherwise `total` is what this c gives."""
    new_hi, new_lo = _step(hi, lo, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
    return tl.where(go, new_hi, hi), tl.where(go, new_lo, lo)


@triton.jit
def _conjugate(mean, largest, e):
    """max over the simplex of <p, d> + H(p) from <p, d> and the largest weight."""
    theta = -tl.log(largest)
    return _rectify((e * mean - _expm1(-e * theta) / e) / (1.0 + e))


@triton.jit
def _alpha_terms(x, log_x, total, r, e):
    """p expm1(t) / e and p kappa, t = e ln p: what the derivative of the conjugate in alpha is summed from."""
    log_n = -tl.log(total)
    t = tl.maximum(log_x * _LN_2 + (e * log_n)[:, None], -87.0 * tl.maximum(e, 1.0))
    p = r / total[:, None]
    kappa = _curvature(x, log_x + (e * log_n * _LOG2_E)[:, None], e, False)
    return tl.where(p > 0.0, p * (_expm1(t) / e), 0.0), tl.where(p > 0.0, p * kappa, 0.0)


@triton.jit
def _alpha_slope(entropy, curved, e):
    return -(curved - entropy / (1.0 + e)) / (1.0 + e)


@triton.jit
def spread_weight(classes, columns, width):
    """What smoothing adds to the target in these classes."""
    if classes.has_weight:
        weight = tl.load(classes.weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    else:
        weight = tl.where(columns < width, 1.0, 0.0)
    return weight * classes.soft


@triton.jit
def store_loss(LOSSES, STATE, Z, classes, row, rows, present, width, m, conjugate, spread, spread_total):
    """total conjugate - <target, d> of rows at Z, and the rest of their state; spread: <soft part of target, d>."""
    loss = conjugate
    if classes.has_target:
        target = tl.load(classes.target + row, mask=present, other=0)
        ignored = target == classes.ignored
        index = tl.where(ignored, 0, target)
        known = (index >= 0) & (index < width)
        tl.device_assert(known, "a target is out of range: it must lie in [0, classes - 1]", mask=present)
        picked = tl.load(Z + index, mask=present & known, other=float("nan")).to(tl.float32)
        picked = tl.where(picked == m, 0.0, picked - m)
        sample = tl.full(m.shape, 1.0, tl.float32)
        if classes.has_weight:
            sample = tl.load(classes.weight + index, mask=present & known, other=float("nan")).to(tl.float32)
        total = sample * classes.hard
        score = tl.where(total == 0.0, 0.0, total * picked)
        if classes.smoothed:
            total += spread_total
            score += spread
        loss = tl.where(m == float("-inf"), float("inf"), total * conjugate - score)
        loss = tl.where(ignored, 0.0, loss)
        tl.store(STATE + 5 * rows + row, tl.where(ignored, 0.0, sample), mask=present)
        tl.store(STATE + 6 * rows + row, total, mask=present)
    tl.store(LOSSES + row, loss, mask=present)


# ---------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit(do_not_specialize=("rows",))
def resident(
    Z, P, STATE, LOSSES, E, classes, e_value, stride, rows, group, alphas, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUBSET: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr,
    LOSS: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """Weights and state of ROWS rows; or their losses, with derivatives in alpha."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    e = exponent(E, e_value, first, group, alphas, HAS_E)
    if e > 1.0:
        return
    row = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    present = row < rows
    there = present[:, None] & (columns < width)[None, :]
    z = tl.load(Z + row[:, None] * stride + columns[None, :], mask=there, other=float("-inf")).to(tl.float32)
    m = tl.max(z, 1)
    alive = m > float("-inf")
    d = relative(z, m)
    hi = _start(m, e, RULE)
    lo = tl.zeros_like(m)
    if SUBSET < BLOCK:
        top = tl.max(tl.reshape(d, (ROWS, BLOCK // SUBSET, SUBSET)), 1)
        hi, lo = _solve_start(top, hi, lo, alive, e, RULE)
    total = tl.zeros_like(m)
    worst = float("inf")
    go = True
    while go:
        x, v, log_x = weigh(d, hi, lo, e, RULE)
        total = tl.sum(v * x, 1)
        go, worst = _unfinished(hi, total, alive, worst, e, RULE)
        hi, lo = _next(hi, lo, total, tl.sum(v, 1), alive, go, e, RULE)
    x, v, log_x = weigh(d, hi, lo, e, RULE)
    r = v * x
    seen = alive | (total != total)
    m = tl.where(seen & ~alive, float("nan"), m)
    if LOSS:
        mean = tl.sum(tl.where(r == 0.0, 0.0, r * d), 1) / total
        conjugate = _conjugate(mean, tl.max(r, 1) / total, e)
        if WITH_E:
            entropy, curved = _alpha_terms(x, log_x, total, r, e)
            tl.store(STATE + 4 * rows + row, _alpha_slope(tl.sum(entropy, 1), tl.sum(curved, 1), e), mask=present)
        spread = tl.zeros_like(m)
        spread_total = tl.zeros_like(m)
        if classes.smoothed:
            weight = spread_weight(classes, columns[None, :], width)
            spread = tl.sum(tl.where(weight == 0.0, 0.0, weight * d), 1)
            spread_total += tl.sum(weight, 1)
        places = Z + row * stride
        store_loss(LOSSES, STATE, places, classes, row, rows, present, width, m, conjugate, spread, spread_total)
    else:
        p = tl.where(seen[:, None], r / total[:, None], 0.0)
        tl.store(P + row[:, None] * width + columns[None, :], p.to(P.dtype.element_ty), mask=there)
    _store_state(STATE, row, rows, present, m, hi, lo, total)


@triton.jit
def _store_state(STATE, row, rows, present, m, hi, lo, total):
    tl.store(STATE + row, m, mask=present)
    tl.store(STATE + rows + row, hi, mask=present)
    tl.store(STATE + 2 * rows + row, lo, mask=present)
    tl.store(STATE + 3 * rows + row, total, mask=present)


@triton.jit
def _bound(m, hi, lo):
    """A score that no weight lies below, with a margin for rounding; +inf stays above it."""
    bound = m - (hi + lo) - 1e-6 * (tl.abs(m) + hi)
    return tl.where(m < float("inf"), bound, 3e38)


@triton.jit
def _listed(Z, LIST, first, count, width, LINES: tl.constexpr, LINE: tl.constexpr):
    """Scores of the next listed lines of a row, where they are, and whether they are there."""
    number = first + tl.arange(0, LINES)
    line = tl.load(LIST + number, mask=number < count, other=0)
    columns = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
    there = (number < count)[:, None] & (columns < width)
    return tl.load(Z + columns, mask=there, other=float("-inf")).to(tl.float32), columns, there


@triton.jit(do_not_specialize=("rows",))
def streamed(
    Z, P, STATE, LOSSES, E, classes, e_value, stride, rows, group, alphas, width, TOPS, LIST,
    LINES: tl.constexpr, LINE: tl.constexpr, MOST: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr,
    LOSS: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """What `resident` does, for one row of any width, LINES lines of LINE scores at a time.

    TOPS, LIST: room for a number per line of the row, of which there are at most MOST.
    """
    row = tl.program_id(0)
    e = exponent(E, e_value, row, group, alphas, HAS_E)
    if e > 1.0:
        return
    lines = tl.cdiv(width, LINE)
    place = row.to(tl.int64)
    Z += place * stride
    TOPS += place * lines
    LIST += place * lines
    # One pass over the row: the largest score of each line.
    slots = tl.full((LINES, LINE), float("-inf"), tl.float32)
    spread = tl.zeros((LINES, LINE), tl.float32)
    weights = tl.zeros((LINES, LINE), tl.float32)
    anchor = 0.0
    for first in range(0, lines, LINES):
        line = first + tl.arange(0, LINES)
        columns = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
        inside = columns < width
        z = tl.load(Z + columns, mask=inside, other=float("-inf")).to(tl.float32)
        slots = tl.maximum(slots, z, propagate_nan=tl.PropagateNan.ALL)
        tops = tl.max(z, 1)
        tl.store(TOPS + line, tops, mask=line < lines)
        if not LOSS:  # noqa: SIM102, known when compiled
            if e >= NEAR_ONE:  # below, there is weight everywhere
                tl.store(P + place * width + columns, tl.zeros((LINES, LINE), P.dtype.element_ty), mask=inside)
        if classes.smoothed:
            if first == 0:  # a sum of scores far from 0 would lose their differences: relative to one of them
                largest = tl.max(tops, 0)
                anchor = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
            weight = spread_weight(classes, columns, width)
            spread += tl.where(weight == 0.0, 0.0, weight * (z - anchor))
            weights += weight
    bad = tl.max((slots != slots).to(tl.int32)) > 0
    tl.debug_barrier()
    # The solution over the largest scores bounds the threshold; lines below it have no weight.
    index = tl.arange(0, MOST)[None, :]
    tops = tl.load(TOPS + index, mask=index < lines, other=float("-inf"))
    m = tl.where(bad, float("nan"), tl.max(tops, 1))
    alive = m > float("-inf")
    hi, lo = _solve_start(relative(tops, m), _start(m, e, RULE), tl.zeros_like(m), alive, e, RULE)
    bound = tl.where(e < NEAR_ONE, float("-inf"), _bound(m, hi, lo))
    keep = (index < lines) & (tops >= bound[:, None])
    tl.store(LIST + tl.cumsum(keep.to(tl.int32), 1) - 1, index, mask=keep)
    count = tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    total = tl.zeros_like(m)
    worst = float("inf")
    go = tl.max(alive.to(tl.int32)) > 0
    while go:
        sums = tl.zeros((LINES, LINE), tl.float32)
        slopes = tl.zeros((LINES, LINE), tl.float32)
        for first in range(0, count, LINES):
            z, columns, there = _listed(Z, LIST, first, count, width, LINES, LINE)
            x, v, log_x = weigh(relative(z, m), hi, lo, e, RULE)
            sums += v * x
            slopes += v
        total = tl.sum(sums) + tl.zeros_like(m)
        slope = tl.sum(slopes) + tl.zeros_like(m)
        go, worst = _unfinished(hi, total, alive, worst, e, RULE)
        hi, lo = _next(hi, lo, total, slope, alive, go, e, RULE)
    total = tl.where(bad, float("nan"), total) + 0.0 * e  # NaN where e is
    one = tl.arange(0, 1)
    if LOSS:
        mean = tl.zeros((LINES, LINE), tl.float32)
        largest = tl.zeros((LINES, LINE), tl.float32)
        entropy = tl.zeros((LINES, LINE), tl.float32)
        curved = tl.zeros((LINES, LINE), tl.float32)
        for first in range(0, count, LINES):
            z, columns, there = _listed(Z, LIST, first, count, width, LINES, LINE)
            d = relative(z, m)
            x, v, log_x = weigh(d, hi, lo, e, RULE)
            r = v * x
            mean += tl.where(r == 0.0, 0.0, r * d)
            largest = tl.maximum(largest, r)
            if WITH_E:
                entropies, curvatures = _alpha_terms(x, log_x, total, r, e)
                entropy += entropies
                curved += curvatures
        if WITH_E:
            slope = _alpha_slope(tl.sum(entropy), tl.sum(curved), e)
            tl.store(STATE + 4 * rows + row + one, tl.where(total == total, slope, total))
        conjugate = _conjugate(tl.sum(mean) / total, tl.max(largest) / total, e)
        spread_total = tl.sum(weights) + tl.zeros_like(m)
        relative_spread = tl.sum(spread) - (m - anchor) * spread_total
        relative_spread = tl.where(m < float("inf"), relative_spread, float("-inf"))
        store_loss(
            LOSSES, STATE, Z + one, classes, row + one, rows, one == 0, width, m, conjugate, relative_spread,
            spread_total
        )  # fmt: skip
    else:
        P += place * width
        if tl.max((total != total).to(tl.int32)) > 0:
            for first in range(0, lines, LINES):
                columns = (first + tl.arange(0, LINES))[:, None] * LINE + tl.arange(0, LINE)[None, :]
                wrong = tl.full((LINES, LINE), float("nan"), tl.float32).to(P.dtype.element_ty)
                tl.store(P + columns, wrong, mask=columns < width)
        else:
            for first in range(0, count, LINES):
                z, columns, there = _listed(Z, LIST, first, count, width, LINES, LINE)
                x, v, log_x = weigh(relative(z, m), hi, lo, e, RULE)
                p = tl.where(alive[:, None], v * x / total[:, None], 0.0)
                tl.store(P + columns, p.to(P.dtype.element_ty), mask=there)
    _store_state(STATE, row + one, rows, one == 0, m, hi, lo, total)


# ---------------------------------------------------------------------------------------------------------------
# Backward


@triton.jit
def _load_state(STATE, row, rows, present):
    m = tl.load(STATE + row, mask=present, other=float("-inf"))
    hi = tl.load(STATE + rows + row, mask=present, other=0.0)
    lo = tl.load(STATE + 2 * rows + row, mask=present, other=0.0)
    return m, hi, lo, tl.load(STATE + 3 * rows + row, mask=present, other=1.0)


@triton.jit
def _slopes(source, m, hi, lo, total, e, RULE: tl.constexpr, FROM_P: tl.constexpr):
    """The slopes s of weights in their scores, up to a factor common to the row, and x and log2 x for the curvature."""
    if FROM_P:
        if RULE == "squares":
            return tl.sqrt(source), source, source
        if RULE == "identity":
            return tl.where(source > 0.0, 1.0, 0.0), source, source
        log_p = tl.log2(tl.maximum(source, 2e-38))
        return tl.where(source > 0.0, tl.exp2(log_p * (1.0 - e)), 0.0), source, log_p * e
    x, v, log_x = weigh(relative(source, m), hi, lo, e, RULE)
    if RULE == "squares":
        v = v / tl.sqrt(total)[:, None]
    elif RULE != "identity":
        v = v * tl.exp((e - 1.0) * tl.log(total))[:, None]
    return v, x, log_x


@triton.jit
def _moves(m):
    """Whether the weights move with the scores: not where there is nothing, or +inf."""
    return ~((m == float("-inf")) | (m == float("inf")))


@triton.jit
def _passed(source, g, m, hi, lo, mean, total, e, RULE: tl.constexpr, FROM_P: tl.constexpr, WITH_E: tl.constexpr):
    """The gradient of a tile's scores, and its share of that of alpha."""
    v, x, log_x = _slopes(source, m, hi, lo, total, e, RULE, FROM_P)
    dz = tl.where(_moves(m)[:, None], tl.where(v == 0.0, 0.0, v * (g - mean[:, None])), 0.0)
    # NaN in the row of weights, or in its mean, reaches all of it.
    dz += tl.where(mean == mean, 0.0, mean)[:, None]
    de = tl.zeros_like(dz)
    if WITH_E:
        if not FROM_P:  # there it is that of the weights themselves
            log_x -= (e * tl.log2(total))[:, None]
        de = -_curvature(x, log_x, e, False) * dz
    return dz, de


@triton.jit(do_not_specialize=("rows",))
def gradient_resident(
    SOURCE, STATE, G, DZ, DE, E, e_value, stride, g_stride, rows, group, alphas, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, FROM_P: tl.constexpr,
    WITH_E: tl.constexpr
):  # fmt: skip
    """s (g - <s, g> / sum s), and per row -<kappa, that>.  SOURCE: the weights, or the scores."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    e = exponent(E, e_value, first, group, alphas, HAS_E)
    if e > 1.0:
        return
    row = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    present = row < rows
    there = present[:, None] & (columns < width)[None, :]
    empty = 0.0 if FROM_P else float("-inf")
    source = tl.load(SOURCE + row[:, None] * stride + columns[None, :], mask=there, other=empty).to(tl.float32)
    g = tl.load(G + row[:, None] * g_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
    m, hi, lo, total = _load_state(STATE, row, rows, present)
    v, x, log_x = _slopes(source, m, hi, lo, total, e, RULE, FROM_P)
    weighted = tl.sum(tl.where(v == 0.0, 0.0, v * g), 1)
    mean = _mean(weighted, tl.sum(v, 1), m, total)
    dz, de = _passed(source, g, m, hi, lo, mean, total, e, RULE, FROM_P, WITH_E)
    tl.store(DZ + row[:, None] * width + columns[None, :], dz.to(DZ.dtype.element_ty), mask=there)
    if WITH_E:
        tl.store(DE + row, free_slope(tl.sum(de, 1), E, first, group, alphas), mask=present)


@triton.jit
def _mean(weighted, slope, m, total):
    """<s, g> / sum s, 0 where the weights do not move, NaN where they are."""
    mean = tl.where(_moves(m), weighted / tl.where(slope == 0.0, 1.0, slope), 0.0)
    return tl.where(total == total, mean, total)


@triton.jit(do_not_specialize=("rows",))
def gradient_streamed(
    SOURCE, STATE, G, DZ, DE, E, e_value, stride, g_stride, rows, group, alphas, width,
    BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, FROM_P: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """`gradient_resident` for one wide row, in two passes; blocks without support read no gradient."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    e = exponent(E, e_value, tl.program_id(0), group, alphas, HAS_E)
    if e > 1.0:
        return
    lanes = tl.arange(0, BLOCK)[None, :]
    empty = 0.0 if FROM_P else float("-inf")
    m, hi, lo, total = _load_state(STATE, row, rows, row < rows)
    base = tl.program_id(0).to(tl.int64)
    weighted = tl.zeros((1, BLOCK), tl.float32)
    slope = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        source = tl.load(SOURCE + base * stride + start + lanes, mask=inside, other=empty).to(tl.float32)
        v, x, log_x = _slopes(source, m, hi, lo, total, e, RULE, FROM_P)
        if tl.max((v != 0.0).to(tl.int32)) > 0:
            g = tl.load(G + base * g_stride + start + lanes, mask=inside, other=0.0).to(tl.float32)
            weighted += tl.where(v == 0.0, 0.0, v * g)
            slope += v
    mean = _mean(tl.sum(weighted, 1), tl.sum(slope, 1), m, total)
    sums = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        source = tl.load(SOURCE + base * stride + start + lanes, mask=inside, other=empty).to(tl.float32)
        dz = tl.zeros((1, BLOCK), tl.float32) + tl.where(mean == mean, 0.0, mean)[:, None]
        if FROM_P:
            some = tl.max((source != 0.0).to(tl.int32)) > 0
        else:
            v, x, log_x = _slopes(source, m, hi, lo, total, e, RULE, FROM_P)
            some = tl.max((v != 0.0).to(tl.int32)) > 0
        if some:
            g = tl.load(G + base * g_stride + start + lanes, mask=inside, other=0.0).to(tl.float32)
            dz, de = _passed(source, g, m, hi, lo, mean, total, e, RULE, FROM_P, WITH_E)
            sums += de
        tl.store(DZ + base * width + start + lanes, dz.to(DZ.dtype.element_ty), mask=inside)
    if WITH_E:
        tl.store(DE + row, free_slope(tl.sum(sums, 1), E, tl.program_id(0), group, alphas))


@triton.jit
def loss_factors(STATE, G, classes, row, rows, present, g_stride):
    """Of the gradient of rows: factors of the weights, the target and the soft part, and the target."""
    soft = tl.load(G + row * g_stride, mask=present, other=0.0).to(tl.float32)
    factor = soft
    own = soft
    target = row
    if classes.has_target:
        target = tl.load(classes.target + row, mask=present, other=-1)
        soft = tl.where(target == classes.ignored, 0.0, soft)
        factor = soft * tl.load(STATE + 6 * rows + row, mask=present, other=0.0)
        own = soft * (tl.load(STATE + 5 * rows + row, mask=present, other=0.0) * classes.hard)
    return factor, own, soft, target


@triton.jit
def store_loss_slope(DE, STATE, E, first, row, rows, group, alphas, present, m, factor):
    slope = tl.load(STATE + 4 * rows + row, mask=present, other=0.0)
    de = tl.where(m == float("-inf"), 0.0, factor * slope)
    tl.store(DE + row, free_slope(de, E, first, group, alphas), mask=present)


@triton.jit(do_not_specialize=("rows",))
def loss_gradient(
    Z, STATE, G, DZ, DE, E, classes, e_value, g_stride, stride, rows, group, alphas, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_E: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """A tile of a p - b [is the target] - c [soft part of the target], and per row the gradient of alpha."""
    blocks = tl.cdiv(width, BLOCK)
    block = tl.program_id(0) % blocks
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    e = exponent(E, e_value, first, group, alphas, HAS_E)
    if e > 1.0:
        return
    row = first + tl.arange(0, ROWS)
    present = row < rows
    columns = block * BLOCK + tl.arange(0, BLOCK)
    there = present[:, None] & (columns < width)[None, :]
    m, hi, lo, total = _load_state(STATE, row, rows, present)
    z = tl.load(Z + row[:, None] * stride + columns[None, :], mask=there, other=float("-inf")).to(tl.float32)
    factor, own, soft, target = loss_factors(STATE, G, classes, row, rows, present, g_stride)
    x, v, log_x = weigh(relative(z, m), hi, lo, e, RULE)
    dz = v * x * (factor / total)[:, None]
    if classes.has_target:
        dz -= tl.where(columns[None, :] == target[:, None], own[:, None], 0.0)
    if classes.smoothed:
        dz -= spread_weight(classes, columns[None, :], width) * soft[:, None]
    dz = tl.where(_moves(m)[:, None], dz, 0.0)
    tl.store(DZ + row[:, None] * width + columns[None, :], dz.to(DZ.dtype.element_ty), mask=there)
    if WITH_E:  # noqa: SIM102, known when compiled
        if block == 0:
            store_loss_slope(DE, STATE, E, first, row, rows, group, alphas, present, m, factor)
