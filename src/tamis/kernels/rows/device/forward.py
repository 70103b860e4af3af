"""Row transforms, forward: entmax or its loss over the rows of a matrix, and the state of each row (see `state`).

resident   rows that fit the registers: read once, solved there, written once
streamed   wider rows: one pass finds the largest score of every line of 128.  These are a subset of the row, and
           the threshold of a subset is a lower bound of that of the row, so that lines below it have no weight.
           The others are listed, and only they are read again.  Where that is all lines nothing else changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.device.rules import advance, curvature, expm1
from tamis.kernels.rows.device.state import (
    LN_2,
    LOG2_E,
    NEAR_ONE,
    alpha_slope,
    conjugate_of,
    exponent,
    relative,
    spread_weight,
    store_loss,
    store_state,
    weigh,
)


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
        return advance(tl.zeros_like(total), total, slope, e, RULE) / e
    log_mass = tl.log(total)
    return -expm1(e * log_mass) * tl.exp((1.0 - e) * log_mass) / (e * slope)


@triton.jit
def _step(hi, lo, total, slope, e, RULE: tl.constexpr):
    if RULE == "near one":
        return advance(hi, total, slope, e, "power"), lo
    shift = _shift(total, slope, e, RULE)
    new = lo + shift
    sum_ = hi + new
    low = new - (sum_ - hi)
    if RULE == "any":
        near = e < NEAR_ONE
        sum_ = tl.where(near, advance(hi, total, slope, e, "power"), sum_)
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
    """Whether a row of a tile still improves and has to, and the least error of each.  NaN waits for nobody."""
    mass = _mass(hi, total, e, RULE)
    error = tl.where(alive & (mass == mass), tl.abs(mass - 1.0), 0.0)
    return tl.max(((error > 1e-6) & (error < worst)).to(tl.int32), 0) > 0, tl.minimum(worst, error)


@triton.jit
def _next(hi, lo, total, slope, alive, go, e, RULE: tl.constexpr):
    """One more step if it is asked for; otherwise `total` is what this c gives."""
    new_hi, new_lo = _step(hi, lo, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
    return tl.where(go, new_hi, hi), tl.where(go, new_lo, lo)


@triton.jit
def _alpha_terms(x, log_x, total, r, e):
    """p expm1(t) / e and p kappa, t = e ln p: what the derivative of the conjugate in alpha is summed from."""
    log_n = -tl.log(total)
    t = tl.maximum(log_x * LN_2 + (e * log_n)[:, None], -87.0 * tl.maximum(e, 1.0))
    p = r / total[:, None]
    kappa = curvature(x, log_x + (e * log_n * LOG2_E)[:, None], e, False)
    return tl.where(p > 0.0, p * (expm1(t) / e), 0.0), tl.where(p > 0.0, p * kappa, 0.0)


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
    worst = tl.zeros_like(m) + float("inf")
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
        conjugate = conjugate_of(mean, tl.max(r, 1) / total, e)
        if WITH_E:
            entropy, curved = _alpha_terms(x, log_x, total, r, e)
            tl.store(STATE + 4 * rows + row, alpha_slope(tl.sum(entropy, 1), tl.sum(curved, 1), e), mask=present)
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
    store_state(STATE, row, rows, present, m, hi, lo, total)


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
    worst = tl.zeros_like(m) + float("inf")
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
            slope = alpha_slope(tl.sum(entropy), tl.sum(curved), e)
            tl.store(STATE + 4 * rows + row + one, tl.where(total == total, slope, total))
        conjugate = conjugate_of(tl.sum(mean) / total, tl.max(largest) / total, e)
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
    store_state(STATE, row + one, rows, one == 0, m, hi, lo, total)
