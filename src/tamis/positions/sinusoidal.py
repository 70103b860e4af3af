"""Sinusoidal positions, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762

PE(pos, 2i) = sin(pos / 10000^(2i / d)),   PE(pos, 2i + 1) = cos(pos / 10000^(2i / d))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tamis.positions.base import Position, position_rows
from tamis.settings import check_switch, numbers


class Sinusoidal(Position):
    """Added to the embeddings; computed where needed, so no length is too long.

    Args:
        halves: all sines first and then all cosines, as Marian and fairseq have them.
    """

    def __init__(self, embed_dim: int, base: float = 10000.0, halves: bool = False) -> None:
        super().__init__()
        if embed_dim % 2:
            raise ValueError(f"embed_dim must be even for sinusoidal positions, got {embed_dim}")
        self.embed_dim, self.base, self.halves = embed_dim, base, check_switch("halves", halves)
        numbers(self, "base", above=0.0)

    def table(self, positions: Tensor) -> Tensor:
        """(..., L) to (..., L, embed_dim), fp32."""
        powers = torch.arange(0, self.embed_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions.float().unsqueeze(-1) * torch.exp(powers * (-math.log(self.base) / self.embed_dim))
        waves = [angles.sin(), angles.cos()]
        return torch.cat(waves, -1) if self.halves else torch.stack(waves, -1).flatten(-2)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(position_rows(positions, *x.shape[:2])).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, base={self.base:g}"
