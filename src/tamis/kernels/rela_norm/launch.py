"""Launching the kernels of `device`: how rows are shared out among programs, and sums of what those leave."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.kernels.rela_norm import device as kernels
from tamis.kernels.runtime.launch import Launch, layouts, planned
from tamis.kernels.runtime.sizes import ceil_div, power_of_two

WARPS = 2112
"""Warps of the backward pass, about: sixteen for each multiprocessor of an H200."""
ROUNDS = 8
"""Rounds of a program of the backward pass, at least: each adds two rows to what is summed up afterwards."""


def forward(z: Tensor, gain: Tensor | None, gate: Tensor | None, epsilon: float, y: Tensor) -> None:
    """Fill y.  z: (..., channels), without gaps."""
    rows, width = z.numel() // z.shape[-1], z.shape[-1]

    def make() -> Launch:
        block = power_of_two(width)
        at_once, warps = max(1, 2048 // block), 4 if block <= 4096 else 8
        constants = (width, block, at_once, gain is not None, gate is not None)
        return Launch(kernels.forward, ceil_div(rows, at_once), constants, {"num_warps": warps})

    launch = planned(("norm", z.device, *layouts(z, gain, gate)), make)
    launch(z.device, (z, gain, gate, y, rows, epsilon))


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
    block = power_of_two(width)
    at_once, warps = max(1, 512 // block), max(1, block // 512)  # 16 numbers a thread, and a row in few warps
    per_program = at_once * max(ROUNDS, ceil_div(rows, at_once * (WARPS // warps)))
    programs = ceil_div(rows, per_program)

    def make() -> Launch:
        constants = (width, block, at_once, gain is not None, gate is not None)
        return Launch(kernels.backward, programs, constants, {"num_warps": warps})

    # Partial sums of each program, so that two runs add up in one order.
    sums = dgain.new_empty(2, programs, width)
    launch = planned(("norm gradient", z.device, *layouts(z, gain, gate, dy)), make)
    launch(z.device, (z, gain, gate, dy, dz, sums, rows, per_program, epsilon))
    for x, gradient, partial in zip((gain, gate), (dgain, dgate), sums, strict=True):
        if x is not None:
            torch.sum(partial, 0, out=gradient)
