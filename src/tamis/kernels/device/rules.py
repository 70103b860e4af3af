"""Rules: scores to weights, their slopes and curvature, and the Newton steps that solve a row.

A row of entmax is solved as in `tamis.transforms.solver`, relative to its largest score m, with d = s - m:

    squares   alpha = 1.5   r = y^2, y = [d / 2 + c]_+          c = t
    identity  alpha = 2     r = y,   y = [d + c]_+              c = t
    power     1 <= alpha    r = (1 + w)^b, w = e d exp(e c)     c = theta

and weights are r times n = 1 / sum r, so that a row sums to one whatever is left of the solver's error.  The slope of a
weight in its score is v = r^(1 - e), up to the factor n^(1 - e).  The backward kernels rebuild r and v from (m, c, n).
Elementwise rules (relu, squared_relu, leaky_relu, gelu, sigmoid) have no row state.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---------------------------------------------------------------------------------------------------------------
# Elementary functions that stay accurate near 0


@triton.jit
def log2(x, FAST: tl.constexpr):
    """FAST: one instruction, to 2^-22 absolute near 1 and -inf at 0, where the exact one takes thirty."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(tl.maximum(x, 1e-30))


@triton.jit
def log1p(w, FAST: tl.constexpr):
    z = w / (w + 2.0)
    z2 = z * z
    near = 2.0 * z * (1.0 + z2 * (1.0 / 3.0 + z2 * (0.2 + z2 * (1.0 / 7.0 + z2 * (1.0 / 9.0)))))
    return tl.where(tl.abs(w) < 0.25, near, log2(1.0 + w, FAST) * 0.6931471805599453)


@triton.jit
def expm1(x):
    near = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0))))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x) - 1.0)


# ---------------------------------------------------------------------------------------------------------------
# Entmax, and the steps that solve a row


@triton.jit
def exponent(E, e_value, h, HAS_E: tl.constexpr, FAST: tl.constexpr):
    """e = alpha - 1 of a head; a number too small to tell from 0 stands for that."""
    e = e_value
    if HAS_E:
        e = tl.load(E + h)
    return tl.maximum(e, 1e-6 if FAST else 1e-20)


@triton.jit
def rectify(x):
    """max(x, 0), and NaN stays: a row that goes wrong must not look like one that sees nothing."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(x):
    """1 / x, and 0 for the rows that see nothing."""
    return tl.where(x > 0.0, 1.0 / x, 0.0)


@triton.jit
def _wide(x):
    """What rows have, one each, to be broadcast over their tile: a column, unless it has been given another shape, as
    for a tile that is transposed."""
    return x[:, None] if len(x.shape) == 1 else x


@triton.jit
def _line(s, slope, origin, height, RAW: tl.constexpr):
    """(s - origin) slope + height.  RAW: s slope + origin, with the height in it: one operation, and as accurate where
    scores are products, so rounded."""
    if RAW:
        return s * _wide(slope) + _wide(origin)
    return (s - _wide(origin)) * _wide(slope) + _wide(height)


@triton.jit
def _near_one(e, FAST: tl.constexpr):
    """Whether the rounding of 1 + w is amplified enough to matter."""
    return e < (0.004 if FAST else 0.125)


@triton.jit
def row_lines(m, c, n, e, unit, RULE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr):
    """What `entmax_on` needs to know of each row, in three numbers: slope, origin and height of the `_line` that x is
    the positive part of.  Near alpha = 1 the line is w times n^e, and instead of the height, n^e, there is its log2.

    Without n weights are not normalised.  With it x is that times n^e, so that weights are, and v is their slope.
    """
    slope = tl.zeros_like(c) + 1.0
    offset = c
    times = slope
    log_times = slope * 0.0
    if n is not None:
        n = tl.where(n > 0.0, n, 1.0)  # where a row sees nothing, x is 0 whatever it is multiplied by
    if RULE == "power":
        offset = slope
        slope = e * tl.exp(e * c)
        if n is not None:
            log_times = e * tl.log2(n)
            times = tl.exp2(log_times)
    elif RULE == "squares":
        slope *= 0.5
        if n is not None:
            times = tl.sqrt(n)
    elif n is not None:
        times = n
    origin = m
    height = offset * times
    if RULE == "power":
        near_one = _near_one(e, FAST)
        offset = tl.where(near_one, 0.0, offset)
        height = tl.where(near_one, log_times, height)
    if RAW:
        origin = (offset - m * slope) * times
        slope *= unit
    return slope * times, origin, height


@triton.jit
def entmax_on(s, slope, origin, height, e, RULE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr):
    """x, v and log2 x of scores, given the rows' `row_lines`; weights are v x."""
    if RULE == "power":
        near_one = _near_one(e, FAST)
        line = _line(s, slope, origin, tl.where(near_one, 0.0, height), RAW)
        if near_one:
            times = tl.exp2(height)
            x = rectify(line + _wide(times))
            w = tl.maximum(line * _wide(1.0 / times), -0.99999994)
            log_x = log1p(w, FAST) * 1.4426950408889634 + _wide(height)
        else:
            x = rectify(line)
            log_x = log2(x, FAST)
        # At FAST the logarithm of 0 is -inf, and its power 0 by itself.
        v = tl.exp2(log_x * tl.maximum(1.0 / e - 1.0, 1e-6 if FAST else 0.0))
        if not FAST:
            v = tl.where(x > 0.0, v, 0.0)
    else:
        x = rectify(_line(s, slope, origin, height, RAW))
        v = x
        if RULE == "identity":
            v = tl.where(x > 0.0, 1.0, 0.0)
        log_x = x
    return x, v, log_x


@triton.jit
def entmax(s, m, c, n, e, unit, RULE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr):
    """x, v and log2 x of scores, given the rows' m and solution c, and n if weights are to be normalised."""
    slope, origin, height = row_lines(m, c, n, e, unit, RULE, RAW, FAST)
    return entmax_on(s, slope, origin, height, e, RULE, RAW, FAST)


@triton.jit
def _mass(c, total, RULE: tl.constexpr):
    """The sum of the weights that c stands for, from the sum of r."""
    if RULE == "power":
        total *= tl.exp(-c)
    return total


@triton.jit
def advance(c, total, slope, e, RULE: tl.constexpr):
    """The next c from the sums of r and v: a Newton step on a norm of x, which never passes the root."""
    if RULE == "squares":
        return c - (total - tl.sqrt(total)) / slope
    if RULE == "identity":
        return c - (total - 1.0) / slope
    return c - log1p((total / slope) * expm1(-e * (tl.log(total) - c)), False) / e


@triton.jit
def approach(top, m, c, alive, e, unit, RULE: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr):
    """c after a few steps over a subset of the scores, in registers: its solution bounds that of the row from the side
    where Newton steps start, and closely, so that fewer sweeps over the row are left."""
    for _ in range(3):
        x, v, log_x = entmax(top, m, c, None, e, unit, RULE, RAW, FAST)
        c = advance(c, tl.where(alive, tl.sum(v * x, 1), 1.0), tl.where(alive, tl.sum(v, 1), 1.0), e, RULE)
    return c


@triton.jit
def newton_step(c, total, slope, alive, worst, tolerance, e, RULE: tl.constexpr):
    """The next c, the least error that the mass of each row had, and whether one has too much that still gets less."""
    mass = _mass(c, total, RULE)
    error = tl.where(alive & (mass == mass), tl.abs(mass - 1.0), 0.0)  # NaN waits for nobody
    go = tl.max(((error > tolerance) & (error < worst)).to(tl.int32), 0) > 0
    c = advance(c, tl.where(alive, total, 1.0), tl.where(alive, slope, 1.0), e, RULE)
    return c, tl.minimum(worst, error), go


@triton.jit
def looser(c, e, RULE: tl.constexpr):
    """A bound of c that rounding cannot have carried past the root."""
    if RULE == "power":
        return c - 1e-5 * (1.0 + tl.abs(c))
    return c * (1.0 + 1e-5)


# ---------------------------------------------------------------------------------------------------------------
# All rules


@triton.jit
def activation(s, RULE: tl.constexpr):
    """Weights and slopes of elementwise rules."""
    if RULE == "sigmoid":
        r = 1.0 / (1.0 + tl.exp(-s))
        v = r * (1.0 - r)
    elif RULE == "squared_relu":
        y = rectify(s)
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
        r = rectify(s)
        v = tl.where(s > 0.0, 1.0, 0.0)
    if RULE == "leaky_relu" or RULE == "gelu":  # the others are 0 by themselves where a key is hidden
        hidden = s == float("-inf")
        r = tl.where(hidden, 0.0, r)
        v = tl.where(hidden, 0.0, v)
    return r, v


@triton.jit
def tile_weights(
    s, m, c, n, e, unit, bias, RULE: tl.constexpr, NORMALISED: tl.constexpr, RAW: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Weights, slopes, x and log2 x of a tile from its rows' state; n also scales the rows of elementwise rules."""
    if NORMALISED:
        x, v, log_x = entmax(s, m, c, n, e, unit, RULE, RAW, FAST)
        p = v * x
    else:
        x, v = activation(s * unit + bias, RULE)
        log_x = x
        p = x * _wide(n)
        v *= _wide(n)
    return p, v, x, log_x


@triton.jit
def curvature(x, log_x, e, FAST: tl.constexpr):
    """kappa = (1 - x + x ln x) / e^2 with x = p^e, without its cancellation near x = 1: d alpha is -sum kappa ds.

    FAST: up to `curvature_unit`.  From e = 0.05 on what cancels is lost in the rounding of the logarithm anyway.
    """
    if FAST:
        t = tl.maximum(log_x * 0.6931471805599453, -87.0)
        kappa = x * (t - 1.0) + 1.0
        if e < 0.05:
            kappa = tl.where(tl.abs(t) < 0.1, t * t * (0.5 + t * (1.0 / 3 + t * 0.125)), kappa)
        return kappa
    log_p = tl.maximum(log_x * (0.6931471805599453 / e), -87.0)
    t = log_p * e
    series = 1.0 / 144 + t * (1.0 / 840 + t * (1.0 / 5760))
    series = 0.5 + t * (1.0 / 3 + t * (0.125 + t * (1.0 / 30 + t * series)))
    power = tl.exp(t)
    return tl.where(tl.abs(t) < 0.3, log_p * log_p * series, (1.0 - power + power * t) / (e * e))


@triton.jit
def curvature_unit(e, FAST: tl.constexpr):
    """What sums of `curvature` have to be multiplied by."""
    return 1.0 / (e * e) if FAST else 1.0
