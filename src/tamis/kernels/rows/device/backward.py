"""Row transforms, backward, from the state of each row (see `state`).

gradient_resident, gradient_streamed   of the weights: in registers, or in two passes that read the incoming gradient
                                       only where there is support
loss_gradient   of the loss, from the scores and the rows' states: no weights are ever stored
"""

from __future__ import annotations

import triton
import triton.language as tl

from tamis.kernels.device.rules import curvature
from tamis.kernels.rows.device.state import (
    exponent,
    free_slope,
    load_state,
    loss_factors,
    relative,
    spread_weight,
    store_loss_slope,
    weigh,
)


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
        de = -curvature(x, log_x, e, False) * dz
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
    m, hi, lo, total = load_state(STATE, row, rows, present)
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
    m, hi, lo, total = load_state(STATE, row, rows, row < rows)
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
    m, hi, lo, total = load_state(STATE, row, rows, present)
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
