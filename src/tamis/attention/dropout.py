"""Dropout of weights that can be drawn again: the factors of a block depend on the seed and its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.attention.call import Dropout


@dataclass(frozen=True)
class Factors:
    """0 or 1 / (1 - p) for each weight."""

    p: float = 0.0
    seed: int | None = 0
    """None: torch's own dropout, for graphs that cannot hold a generator."""

    @staticmethod
    def draw(dropout: Dropout) -> Factors:
        """Take one number from the generator (torch's own by default), so that repeated calls differ."""
        p, generator = dropout
        if p == 0.0:
            return NO_FACTORS
        if torch.compiler.is_compiling():
            if generator is not None:
                raise ValueError("dropout under torch.compile takes no generator")
            return Factors(p, None)
        device = generator.device if generator is not None else "cpu"
        seed = torch.randint(2**62, (), generator=generator, device=device)
        return Factors(p, int(seed.item()))

    def of(self, weights: Tensor, block: int) -> Tensor:
        """Those of a block of weights."""
        shape: Any = weights.shape
        if self.seed is None:
            return torch.dropout(torch.ones(shape, dtype=weights.dtype, device=weights.device), self.p, True)
        generator = torch.Generator(weights.device).manual_seed((self.seed + block * 0x9E3779B9) % 2**63)
        kept = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        kept.bernoulli_(1.0 - self.p, generator=generator)
        return kept.div_(1.0 - self.p) if self.p < 1.0 else kept


NO_FACTORS = Factors()
