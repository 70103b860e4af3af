"""NAPE: half of the heads with ALiBi, half without positions, Vasylenko et al. 2025, https://arxiv.org/abs/2506.16640

    heads 1 .. H/2: bias -|distance| / k with k = 1 .. H/2;   heads H/2 + 1 .. H: no bias

The first look near, the others anywhere; only the others are scaled with the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.functional.sharding import Heads
from tamis.positions.alibi import harmonic_slopes
from tamis.positions.base import Position
from tamis.precision import KeepsPrecision


class NAPE(KeepsPrecision, Position):
    table: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        if num_heads < 2 or num_heads % 2:
            raise ValueError(f"NAPE splits the heads in two halves, num_heads must be even, got {num_heads}")
        half = num_heads // 2
        self.register_buffer(
            "table", torch.tensor(harmonic_slopes(half) + [0.0] * half, dtype=torch.float32), persistent=False
        )

    def slopes(self) -> Tensor | None:
        return self.table

    def scaled_heads(self) -> Tensor | None:
        return self.table == 0.0

    def split_heads(self, heads: Heads) -> None:
        heads.split(self, "table")

    def extra_repr(self) -> str:
        return f"{self.table.numel()}"
