"""Rotary positions, Su et al. 2021, https://arxiv.org/abs/2104.09864

    The pair (x_i, x_(i + d/2)) is turned by the angle pos / (scaling base^(2i / d)).

The halves are paired (as Llama does), not neighbours (as in the paper): the two differ by a fixed permutation of
channels.  `scaling` > 1 stretches positions linearly, Chen et al. 2023, https://arxiv.org/abs/2306.15595
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.positions.base import Position, position_rows
from tamis.settings import numbers


class RoPE(Position):
    """Turns queries and keys, so that their product depends on the distance between positions."""

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: float = 1.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        numbers(self, "base", "scaling", above=0.0)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        self._check(x.shape[-1])
        positions = position_rows(positions, x.shape[0], x.shape[-2])
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = positions.float().unsqueeze(-1) / self.scaling * self.base**-exponents  # (B or 1, L, half)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).split(half, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def check_layer(self, num_heads: int, head_dim: int) -> None:
        self._check(head_dim)

    def _check(self, head_dim: int) -> None:
        if head_dim != self.head_dim:
            raise ValueError(f"RoPE was built for head_dim={self.head_dim}, got heads of {head_dim}")

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base:g}, scaling={self.scaling:g}"
