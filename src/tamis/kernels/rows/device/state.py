"""Row transforms: the state of a row, and what it says of weights, loss and gradient.

A row is solved relative to its largest score m, d = z - m, as in `tamis.transforms.solver`:

    squares    alpha = 1.5            x = [d + c]_+ / 2       weights r = x^2
    identity   alpha = 2              x = [d + c]_+           r = x
    power      1.125 <= alpha <= 2    x = e [d + c]_+         r = x^b, b = 1 / e
    near one   alpha < 1.125          x = [1 + e d exp(e c)]_+    r = x^b, c = theta
    any        alpha from memory: one of the last two, by its value

The weights are r / sum r.  c is kept as a pair hi + lo: one fp32 number would blur the mass of thousands of scores just
above the threshold.  (m, hi, lo, sum r) is the state of a row, from which its weights can be computed again.

The loss adds (slope in alpha, weight of the sample, total weight of its target) to the state.  Its losses and the
factors of its gradient are made here too: each as an operation of torch would cost more than the kernel.

Rows of alpha > 2 have another form of state, see `edge`.  No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tamis.kernels.device.rules import entmax, expm1, log1p, log2, rectify
from tamis.transforms.entmax import HIGHEST, LOWEST

NEAR_ONE = tl.constexpr(0.125)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
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
    log_x = log1p(near, False) * LOG2_E
    v = tl.exp2(log_x * (1.0 / e - 1.0))
    return 1.0 + near, tl.where((w > -1.0) & (w < float("inf")), v, 0.0), log_x


@triton.jit
def _power(d, hi, lo, e):
    x = rectify((d + hi[:, None]) + lo[:, None]) * e
    log_x = log2(x, False)
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
        x, v, log_x = entmax(d, -hi, lo * e, None, e, 1.0, RULE, False, False)
    return x, v, log_x


@triton.jit
def conjugate_of(mean, largest, e):
    """max over the simplex of <p, d> + H(p) from <p, d> and the largest weight."""
    theta = -tl.log(largest)
    return rectify((e * mean - expm1(-e * theta) / e) / (1.0 + e))


@triton.jit
def alpha_slope(entropy, curved, e):
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


@triton.jit
def store_state(STATE, row, rows, present, m, hi, lo, total):
    tl.store(STATE + row, m, mask=present)
    tl.store(STATE + rows + row, hi, mask=present)
    tl.store(STATE + 2 * rows + row, lo, mask=present)
    tl.store(STATE + 3 * rows + row, total, mask=present)


@triton.jit
def load_state(STATE, row, rows, present):
    m = tl.load(STATE + row, mask=present, other=float("-inf"))
    hi = tl.load(STATE + rows + row, mask=present, other=0.0)
    lo = tl.load(STATE + 2 * rows + row, mask=present, other=0.0)
    return m, hi, lo, tl.load(STATE + 3 * rows + row, mask=present, other=1.0)


@triton.jit
def loss_factors(STATE, G, classes, row, rows, present, g_stride):
    """For the gradient of rows: factors of the weights, the target and the soft part, and the target."""
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
