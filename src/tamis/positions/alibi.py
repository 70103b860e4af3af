"""Attention with linear biases, Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409

    score - slope * |distance|,   slopes 2^(-8/H), 2^(-16/H), ..., 2^-8

For a number of heads that is no power of two, the slopes of the next lower power come first and every second slope of
the next higher one fills up, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.functional.sharding import Heads
from tamis.positions.base import Position
from tamis.precision import KeepsPrecision
from tamis.settings import choose


class ALiBi(KeepsPrecision, Position):
    """A bias against distance, per head.  `kind="harmonic"` takes the slopes 1, 1/2, ..., 1/H of the ASEntmax paper."""

    table: Tensor

    def __init__(self, num_heads: int, kind: str = "geometric") -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        self.kind = choose("kind", kind, SLOPES)
        values = SLOPES[kind](num_heads)
        self.register_buffer("table", torch.tensor(values, dtype=torch.float32), persistent=False)

    def slopes(self) -> Tensor | None:
        return self.table

    def split_heads(self, heads: Heads) -> None:
        heads.split(self, "table")

    def extra_repr(self) -> str:
        return f"{self.table.numel()}, kind={self.kind!r}"


def geometric_slopes(num_heads: int) -> list[float]:
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    finer = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return slopes + finer[: num_heads - power]


def harmonic_slopes(num_heads: int) -> list[float]:
    return [1.0 / (i + 1) for i in range(num_heads)]


SLOPES = {"geometric": geometric_slopes, "harmonic": harmonic_slopes}
