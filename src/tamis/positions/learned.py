"""Learned absolute positions: one vector per position, up to a largest length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tamis.positions.base import Position, position_rows
from tamis.transforms.parameters import values_known


class LearnedPositions(Position):
    """Added to the embeddings.  Lengths beyond `max_length` are an error: there is nothing learned to add."""

    def __init__(self, embed_dim: int, max_length: int) -> None:
        super().__init__()
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
            raise ValueError(f"max_length must be an int of at least 1, got {max_length!r}")
        self.weight = nn.Parameter(torch.empty(max_length, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = position_rows(positions, *x.shape[:2])
        if values_known(positions) and positions.numel() and positions.max().item() >= self.weight.shape[0]:
            last, count = positions.max().item(), self.weight.shape[0]
            raise ValueError(f"position {last} is beyond the {count} learned ones (0 to {count - 1})")
        return x + self.weight[positions].to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, max_length={self.weight.shape[0]}"
