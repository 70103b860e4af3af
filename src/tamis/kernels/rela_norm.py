"""The norm of ReLA and its gate in one pass over memory, forward and backward.

    y = g * z r * sigmoid(w * z),   r = (mean z^2 + epsilon)^(-1/2)

As fifteen operations of torch it takes longer than the attention before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.kernels.arguments import ceil_div, next_power_of_two


@triton.jit
def _gated(z, GAIN, GATE, columns, inside, HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr):
    """Gain, weight of the gate and the gate itself; 1, 0 and 1 where there is none."""
    gain = tl.load(GAIN + columns, mask=inside, other=0.0) if HAS_GAIN else tl.full(columns.shape, 1.0, tl.float32)
    gate = tl.load(GATE + columns, mask=inside, other=0.0) if HAS_GATE else tl.full(columns.shape, 0.0, tl.float32)
    opened = tl.sigmoid(gate[None, :] * z) if HAS_GATE else tl.full(z.shape, 1.0, tl.float32)
    return gain, gate, opened


@triton.jit
def _forward(
    Z, GAIN, GATE, Y, rows, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    there = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * WIDTH + columns[None, :]
    z = tl.load(Z + place, mask=there, other=0.0).to(tl.float32)
    gain, gate, opened = _gated(z, GAIN, GATE, columns, inside, HAS_GAIN, HAS_GATE)
    r = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + epsilon)
    tl.store(Y + place, z * r[:, None] * gain[None, :] * opened, mask=there)


@triton.jit
def _backward(
    Z, GAIN, GATE, DY, DZ, DGAIN, DGATE, rows, per_program, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dgain = tl.zeros((BLOCK,), tl.float32)
    dgate = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, per_program, ROWS):
        row = program * per_program + i + tl.arange(0, ROWS)
        there = ((row < rows) & (i + tl.arange(0, ROWS) < per_program))[:, None] & inside[None, :]
        place = row[:, None] * WIDTH + columns[None, :]
        z = tl.load(Z + place, mask=there, other=0.0).to(tl.float32)
        dy = tl.load(DY + place, mask=there, other=0.0).to(tl.float32)
        gain, gate, opened = _gated(z, GAIN, GATE, columns, inside, HAS_GAIN, HAS_GATE)
        r = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + epsilon)[:, None]
        normed = z * r
        du = dy * gain[None, :] * opened
        dz = r * (du - normed * (tl.sum(du * normed, 1) / WIDTH)[:, None])
        if HAS_GATE:
            through = dy * gain[None, :] * normed * opened * (1.0 - opened)
            dz += through * gate[None, :]
            dgate += tl.sum(through * z, 0)
        if HAS_GAIN:
            dgain += tl.sum(dy * normed * opened, 0)
        # A row of zeros attended to nothing: it would be scaled by 1e4, and has no gradient.
        alive = tl.max((z != 0.0).to(tl.int32), 1) > 0
        tl.store(DZ + place, tl.where(alive[:, None], dz, 0.0), mask=there)
    if HAS_GAIN:
        tl.store(DGAIN + program * WIDTH + columns, dgain, mask=inside)
    if HAS_GATE:
        tl.store(DGATE + program * WIDTH + columns, dgate, mask=inside)


PROGRAMS = 528
"""Of the backward pass: four for each multiprocessor of an H200."""


def forward(z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, y: Tensor) -> None:
    """Fill y.  z: (..., channels), without gaps."""
    rows, width = z.numel() // z.shape[-1], z.shape[-1]
    block, at_once, warps = _shape(width)
    _forward[(ceil_div(rows, at_once),)](
        z, gain, gate, y, rows, epsilon, width, block, at_once, gain is not None, gate is not None, num_warps=warps
    )


def backward(
    z: Tensor,
    gain: Tensor | None,
    gate: Tensor | None,
    epsilon: float,
    dy: Tensor,
    dz: Tensor,
    dgain: Tensor,
    dgate: Tensor,
) -> None:
    """Fill dz and, of gain and gate those that are there, their gradients."""
    rows, width = z.numel() // z.shape[-1], z.shape[-1]
    block, at_once, warps = _shape(width)
    per_program = at_once * max(1, ceil_div(rows, at_once * PROGRAMS))
    programs = ceil_div(rows, per_program)
    # Partial sums of each program, so that two runs add up in one order.
    sums = dgain.new_empty(2, programs, width)
    _backward[(programs,)](
        z, gain, gate, dy, dz, *sums, rows, per_program, epsilon, width, block, at_once,
        gain is not None, gate is not None, num_warps=warps,
    )  # fmt: skip
    for x, gradient, partial in zip((gain, gate), (dgain, dgate), sums, strict=True):
        if x is not None:
            torch.sum(partial, 0, out=gradient)


def _shape(width: int) -> tuple[int, int, int]:
    """Columns and rows of a block, and its warps."""
    block = max(16, next_power_of_two(width))
    return block, max(1, 2048 // block), 4 if block <= 4096 else 8
