"""The norm of ReLA and its gate in one pass over memory, forward and backward.

    y = g * z r * sigmoid(w * z),   r = (mean z^2 + epsilon)^(-1/2)

As fifteen operations of torch it takes longer than the attention before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _parameters(GAIN, GATE, columns, inside, HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr):
    """Gain and weight of the gate; 1 and 0 where there is none."""
    gain = tl.load(GAIN + columns, mask=inside, other=0.0) if HAS_GAIN else tl.full(columns.shape, 1.0, tl.float32)
    gate = tl.load(GATE + columns, mask=inside, other=0.0) if HAS_GATE else tl.full(columns.shape, 0.0, tl.float32)
    return gain.to(tl.float32)[None, :], gate.to(tl.float32)[None, :]


@triton.jit
def forward(
    Z, GAIN, GATE, Y, rows, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    there = (row < rows)[:, None] & inside[None, :]
    place = row[:, None] * WIDTH + columns[None, :]
    z = tl.load(Z + place, mask=there, other=0.0).to(tl.float32)
    gain, gate = _parameters(GAIN, GATE, columns, inside, HAS_GAIN, HAS_GATE)
    y = z * tl.rsqrt(tl.sum(z * z, 1) / WIDTH + epsilon)[:, None] * gain
    if HAS_GATE:
        y *= tl.sigmoid(gate * z)
    tl.store(Y + place, y, mask=there)


@triton.jit
def backward(
    Z, GAIN, GATE, DY, DZ, SUMS, rows, per_program, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_GATE: tl.constexpr
):  # fmt: skip
    """dz of some rows, and the parts that they have in the gradients of gain and gate, SUMS (2, programs, WIDTH)."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gain, gate = _parameters(GAIN, GATE, columns, inside, HAS_GAIN, HAS_GATE)
    # Added up over rows after the loop: within it that would need all warps to meet.
    dgain = tl.zeros((ROWS, BLOCK), tl.float32)
    dgate = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(0, per_program, ROWS):
        row = program * per_program + i + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        place = row[:, None] * WIDTH + columns[None, :]
        z = tl.load(Z + place, mask=there, other=0.0).to(tl.float32)
        dy = tl.load(DY + place, mask=there, other=0.0).to(tl.float32)
        # A row of zeros attended to nothing: it would be scaled by 1e4, and has no gradient.
        dy = tl.where((tl.max((z != 0.0).to(tl.int32), 1) > 0)[:, None], dy, 0.0)
        r = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + epsilon)[:, None]
        normed = z * r
        gated = dy
        if HAS_GATE:
            opened = tl.sigmoid(gate * z)
            gated = dy * opened
        du = gated * gain
        dz = r * (du - normed * (tl.sum(du * normed, 1) / WIDTH)[:, None])
        if HAS_GATE:
            through = du * normed * (1.0 - opened)
            dz += through * gate
            dgate += through * z
        if HAS_GAIN:
            dgain += gated * normed
        tl.store(DZ + place, dz, mask=there)
    if HAS_GAIN:
        tl.store(SUMS + program * WIDTH + columns, tl.sum(dgain, 0), mask=inside)
    if HAS_GATE:
        programs = tl.num_programs(0).to(tl.int64)
        tl.store(SUMS + (programs + program) * WIDTH + columns, tl.sum(dgate, 0), mask=inside)
