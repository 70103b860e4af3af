"""Row transforms for alpha > 2, relative to the smallest weight v of the support, whose score is the edge.

    p^e = v^e + e (d - edge),   edge = the lowest score for which sum_j [e (d_j - edge)]_+^b < 1

No threshold resolves weights there: see `tamis.transforms.solver`, whose edge form this is, with bisection over the
values of the scores where that sorts.  The state of a row is (m, edge, ln v, sum).  These kernels read a row many
times: they are for the few alphas above 2 that a tensor may hold, and return at once where alpha is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.device.rules import curvature, expm1
from tamis.kernels.rows.device.state import (
    LN_2,
    alpha_slope,
    conjugate_of,
    exponent,
    free_slope,
    load_state,
    loss_factors,
    relative,
    spread_weight,
    store_loss,
    store_loss_slope,
    store_state,
)


@triton.jit
def _row(Z, start, width, m, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)[None, :]
    z = tl.load(Z + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    return relative(z, m), columns


@triton.jit
def _log_weight(d, edge, log_v, e):
    """ln p, and -inf out of the support.  NaN stays."""
    above = e * (d - edge[:, None])
    low = e * log_v[:, None]
    high = tl.log(tl.maximum(above, 2e-38))
    log_p = (tl.maximum(low, high) + tl.log(1.0 + tl.exp(-tl.abs(low - high)))) / e
    log_p = tl.where(above == 0.0, log_v[:, None], log_p)
    return tl.where(above < 0.0, float("-inf"), log_p + 0.0 * above)


@triton.jit
def _exp(log_p):
    return tl.where(log_p == float("-inf"), 0.0, tl.exp(log_p))


@triton.jit
def _kappa(log_p, e):
    log_x = tl.maximum(log_p, -87.0) * (e / LN_2)
    return curvature(log_x, log_x, e, False)


@triton.jit
def _find_edge(Z, m, e, width, BLOCK: tl.constexpr):
    """Bisection: all scores up to `low` are out of the support, and `high` is in it."""
    low = tl.zeros_like(m) - 1.0 / e
    high = tl.zeros_like(m)
    go = True
    while go:
        middle = low + (high - low) * 0.5
        below = tl.full((1, BLOCK), float("-inf"), tl.float32)
        above = tl.zeros((1, BLOCK), tl.float32) + high
        for start in range(0, width, BLOCK):
            d, columns = _row(Z, start, width, m, BLOCK)
            below = tl.where((d > low) & (d <= middle) & (d < high), tl.maximum(below, d), below)
            above = tl.where((d > middle) & (d < high), tl.minimum(above, d), above)
        below_middle = tl.max(below, 1)
        found = below_middle > float("-inf")
        tried = tl.where(found, below_middle, tl.min(above, 1))
        go = tl.max((tried < high).to(tl.int32)) > 0
        mass = tl.zeros((1, BLOCK), tl.float32)
        for start in range(0, width, BLOCK):
            d, columns = _row(Z, start, width, m, BLOCK)
            x = e * (d - tried)
            mass += tl.where(x > 0.0, tl.exp(tl.log(tl.maximum(x, 2e-38)) / e), 0.0)
        inside = tl.sum(mass, 1) < 1.0
        # There are no scores between what was tried and the middle.
        low = tl.where(inside, tl.where(found, low, middle), tl.maximum(tried, middle))
        high = tl.where(inside, tried, high)
    return high


@triton.jit(do_not_specialize=("rows",))
def edge_forward(
    Z, P, STATE, LOSSES, E, classes, e_value, stride, rows, group, alphas, width,
    BLOCK: tl.constexpr, HAS_E: tl.constexpr, LOSS: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """As `rows.resident`, one row."""
    row = tl.program_id(0)
    e = exponent(E, e_value, row, group, alphas, HAS_E)
    if not (e > 1.0):
        return
    Z += row.to(tl.int64) * stride
    largest = tl.full((1, BLOCK), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        z = tl.load(Z + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, z, propagate_nan=tl.PropagateNan.ALL)
    bad = tl.max((largest != largest).to(tl.int32), 1) > 0
    m = tl.where(bad, float("nan"), tl.max(largest, 1))
    alive = m > float("-inf")
    edge = _find_edge(Z, m, e, width, BLOCK)
    support = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        d, columns = _row(Z, start, width, m, BLOCK)
        support += tl.where(d >= edge[:, None], 1.0, 0.0)
    v = 1.0 / tl.sum(support, 1)
    total = tl.zeros_like(m)
    worst = tl.zeros_like(m) + float("inf")
    go = True
    while go:
        log_v = tl.log(v)
        sums = tl.zeros((1, BLOCK), tl.float32)
        slopes = tl.zeros((1, BLOCK), tl.float32)
        for start in range(0, width, BLOCK):
            d, columns = _row(Z, start, width, m, BLOCK)
            log_p = _log_weight(d, edge, log_v, e)
            sums += _exp(log_p)
            slopes += tl.where(log_p == float("-inf"), 0.0, tl.exp((log_v[:, None] - log_p) * (e - 1.0)))
        total = tl.sum(sums, 1)
        error = tl.where(alive & (total == total), tl.abs(total - 1.0), 0.0)
        go = tl.max(((error > 1e-6) & (error < worst)).to(tl.int32), 0) > 0
        worst = tl.minimum(worst, error)
        new = tl.maximum(v - (total - 1.0) / tl.sum(slopes, 1), 2e-38)
        v = tl.where(go, new, v)
    log_v = tl.log(v)
    total = tl.where(bad, float("nan"), total)
    one = tl.arange(0, 1)
    mean = tl.zeros((1, BLOCK), tl.float32)
    top = tl.zeros((1, BLOCK), tl.float32)
    entropy = tl.zeros((1, BLOCK), tl.float32)
    curved = tl.zeros((1, BLOCK), tl.float32)
    spread = tl.zeros((1, BLOCK), tl.float32)
    weights = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        d, columns = _row(Z, start, width, m, BLOCK)
        log_p = _log_weight(d, edge, log_v, e)
        p = _exp(log_p) / total[:, None]
        if LOSS:
            mean += tl.where(p == 0.0, 0.0, p * d)
            top = tl.maximum(top, p)
            if WITH_E:
                curved += tl.where(p == 0.0, 0.0, p * _kappa(log_p, e))
                entropy += tl.where(p == 0.0, 0.0, p * (expm1(e * log_p) / e))
            if classes.smoothed:
                weight = spread_weight(classes, columns, width)
                spread += tl.where(weight == 0.0, 0.0, weight * d)
                weights += weight
        else:
            p = tl.where(alive | bad, p, 0.0)
            tl.store(P + row.to(tl.int64) * width + columns, p.to(P.dtype.element_ty), mask=columns < width)
    if LOSS:
        conjugate = tl.where(bad, total, conjugate_of(tl.sum(mean, 1), tl.max(top, 1), e))
        if WITH_E:
            slope = alpha_slope(tl.sum(entropy, 1), tl.sum(curved, 1), e)
            tl.store(STATE + 4 * rows + row + one, tl.where(bad, total, slope))
        store_loss(
            LOSSES, STATE, Z + one, classes, row + one, rows, one == 0, width, m, conjugate, tl.sum(spread, 1),
            tl.sum(weights, 1)
        )  # fmt: skip
    store_state(STATE, row + one, rows, one == 0, m, edge, log_v, total)


@triton.jit
def _saved(SOURCE, start, width, m, edge, log_v, e, BLOCK: tl.constexpr, FROM_P: tl.constexpr):
    """ln p, from the weights or the scores."""
    if FROM_P:
        columns = start + tl.arange(0, BLOCK)[None, :]
        p = tl.load(SOURCE + columns, mask=columns < width, other=0.0)
        log_p = tl.where(p == 0.0, float("-inf"), tl.log(tl.maximum(p, 2e-38, propagate_nan=tl.PropagateNan.ALL)))
    else:
        d, columns = _row(SOURCE, start, width, m, BLOCK)
        log_p = _log_weight(d, edge, log_v, e)
    return log_p, columns


@triton.jit(do_not_specialize=("rows",))
def edge_gradient(
    SOURCE, STATE, G, DZ, DE, E, e_value, stride, g_stride, rows, group, alphas, width,
    BLOCK: tl.constexpr, HAS_E: tl.constexpr, FROM_P: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """s (g - <s, g> / sum s) where s = p^(1 - e) is largest for the smallest p, and may overflow.

    So g is measured from its value at the largest s, and that entry follows from the zero sum.
    """
    row = tl.program_id(0)
    e = exponent(E, e_value, row, group, alphas, HAS_E)
    if not (e > 1.0):
        return
    base = row.to(tl.int64)
    SOURCE += base * stride
    G += base * g_stride
    DZ += base * width
    one = tl.arange(0, 1)
    m, edge, log_v, total = load_state(STATE, row + one, rows, one == 0)
    moves = ~((m == float("-inf")) | (m == float("inf")))
    lowest = tl.full((1, BLOCK), float("inf"), tl.float32)
    for start in range(0, width, BLOCK):
        log_p, columns = _saved(SOURCE, start, width, m, edge, log_v, e, BLOCK, FROM_P)
        lowest = tl.where(log_p == float("-inf"), lowest, tl.minimum(lowest, log_p))
    low = tl.min(lowest, 1)
    first = tl.full((1, BLOCK), 2147483647, tl.int32)
    for start in range(0, width, BLOCK):
        log_p, columns = _saved(SOURCE, start, width, m, edge, log_v, e, BLOCK, FROM_P)
        first = tl.where(log_p == low[:, None], tl.minimum(first, columns), first)
    anchor = tl.min(first, 1)
    known = anchor < width
    origin = tl.load(G + anchor, mask=known, other=0.0).to(tl.float32)
    weighted = tl.zeros((1, BLOCK), tl.float32)
    shares = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        log_p, columns = _saved(SOURCE, start, width, m, edge, log_v, e, BLOCK, FROM_P)
        g = tl.load(G + columns, mask=columns < width, other=0.0).to(tl.float32) - origin[:, None]
        share = tl.where(log_p == float("-inf"), 0.0, tl.exp((1.0 - e) * (log_p - low[:, None])))
        shares += share
        weighted += tl.where(share == 0.0, 0.0, share * g)
    mean = tl.sum(weighted, 1) / tl.sum(shares, 1)
    sums = tl.zeros((1, BLOCK), tl.float32)
    slopes = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        log_p, columns = _saved(SOURCE, start, width, m, edge, log_v, e, BLOCK, FROM_P)
        g = tl.load(G + columns, mask=columns < width, other=0.0).to(tl.float32) - origin[:, None]
        s = tl.where(log_p == float("-inf"), 0.0, tl.exp(tl.minimum((1.0 - e) * log_p, 87.0)))
        dz = tl.where(s == 0.0, 0.0, s * (g - mean[:, None]))
        dz = tl.where(moves[:, None] & (columns != anchor[:, None]), dz, 0.0)
        dz += tl.where(total == total, 0.0, total)[:, None]
        sums += dz
        if WITH_E:
            slopes += _kappa(log_p, e) * dz
        tl.store(DZ + columns, dz.to(DZ.dtype.element_ty), mask=columns < width)
    tl.debug_barrier()
    rest = -tl.sum(sums, 1)
    tl.store(DZ + anchor, rest.to(DZ.dtype.element_ty), mask=known & moves)
    if WITH_E:
        at_anchor = tl.where(moves & known, _kappa(low[:, None], e) * rest[:, None], 0.0)
        de = -(tl.sum(slopes, 1) + tl.sum(at_anchor, 1))
        tl.store(DE + row + one, free_slope(de, E, row, group, alphas))


@triton.jit(do_not_specialize=("rows",))
def edge_loss_gradient(
    Z, STATE, G, DZ, DE, E, classes, e_value, g_stride, stride, rows, group, alphas, width,
    BLOCK: tl.constexpr, HAS_E: tl.constexpr, WITH_E: tl.constexpr
):  # fmt: skip
    """As `rows.loss_gradient`, one row."""
    row = tl.program_id(0)
    e = exponent(E, e_value, row, group, alphas, HAS_E)
    if not (e > 1.0):
        return
    base = row.to(tl.int64)
    one = tl.arange(0, 1)
    m, edge, log_v, total = load_state(STATE, row + one, rows, one == 0)
    moves = ~((m == float("-inf")) | (m == float("inf")))
    factor, own, soft, target = loss_factors(STATE, G, classes, base + one, rows, one == 0, g_stride)
    for start in range(0, width, BLOCK):
        d, columns = _row(Z + base * stride, start, width, m, BLOCK)
        dz = _exp(_log_weight(d, edge, log_v, e)) * (factor / total)[:, None]
        if classes.has_target:
            dz -= tl.where(columns == target[:, None], own[:, None], 0.0)
        if classes.smoothed:
            dz -= spread_weight(classes, columns, width) * soft[:, None]
        dz = tl.where(moves[:, None], dz, 0.0)
        tl.store(DZ + base * width + columns, dz.to(DZ.dtype.element_ty), mask=columns < width)
    if WITH_E:
        store_loss_slope(DE, STATE, E, row, row + one, rows, group, alphas, one == 0, m, factor)
