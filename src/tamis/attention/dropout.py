"""Dropout of weights that can be drawn again: the factors of a block depend on the seed and its number alone.

Those of a `Part` of a larger call depend on the seed and on where each weight stands in that: head, query and key.
However a call is divided, all its parts together drop what it would drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.attention.call import Dropout, Part
from tamis.transforms.dispatch import is_mapped


@dataclass(frozen=True)
class Factors:
    """0 or 1 / (1 - p) for each weight."""

    p: float = 0.0
    seed: int | None = 0
    """None: torch's own dropout, for graphs that cannot hold a generator, and for many calls at once."""
    part: Part | None = None

    @staticmethod
    def draw(dropout: Dropout) -> Factors:
        """Take one number from the generator (torch's own by default), so that repeated calls differ."""
        p, generator, part = dropout
        if p == 0.0:
            return NO_FACTORS
        if part is not None:
            return Factors(p, part.seed, part)
        if torch.compiler.is_compiling():
            if generator is not None:
                raise ValueError("dropout under torch.compile takes no generator")
            return Factors(p, None)
        device = generator.device if generator is not None else "cpu"
        seed = torch.randint(2**62, (), generator=generator, device=device)
        if is_mapped(seed):  # vmap's randomness="different": one for each of many calls
            if generator is not None:
                raise ValueError('dropout under vmap with randomness="different" takes no generator')
            return Factors(p, None)
        return Factors(p, int(seed.item()))

    def of(self, weights: Tensor, block: int, starts: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
        """Those of a block of weights (b, h, q, k) that begins at `starts` of the call."""
        shape: Any = weights.shape
        if self.part is not None:
            kept = _kept(self.part, self.p, shape, starts, weights.device).to(weights.dtype)
            return kept.div_(1.0 - self.p) if self.p < 1.0 else kept
        if self.seed is None:
            return torch.dropout(torch.ones(shape, dtype=weights.dtype, device=weights.device), self.p, True)
        generator = torch.Generator(weights.device).manual_seed((self.seed + block * 0x9E3779B9) % 2**63)
        kept = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        kept.bernoulli_(1.0 - self.p, generator=generator)
        return kept.div_(1.0 - self.p) if self.p < 1.0 else kept


NO_FACTORS = Factors()
NO_PARTS = "its dropout knows no part of a larger call"
"""The obstacle of backends with factors of their own."""

_WORD = (1 << 32) - 1
_STEPS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""What the index of a sequence, head and query is multiplied by."""


def _kept(part: Part, p: float, shape: Sequence[int], starts: Sequence[int], device: torch.device) -> Tensor:
    """Whether each weight of a block stays: a hash of the seed and of its sequence, head, query and key.

    A row has two words of its own; they and the key make a third, which is compared with p.
    """
    firsts = [start + offset for start, offset in zip(starts, (0, part.head, part.query, 0), strict=True)]
    places = [torch.arange(first, first + size, device=device) for first, size in zip(firsts, shape, strict=True)]
    row = _mixed(torch.tensor(part.seed, device=device) + _signed(0x9E3779B97F4A7C15))
    for indices, step in zip(places[:3], _STEPS, strict=True):
        row = _mixed(row.unsqueeze(-1) ^ indices * _signed(step))
    low, high = (row & _WORD).unsqueeze(-1), _shifted(row, 32).unsqueeze(-1)
    x = (places[3] * 0x9E3779B9 + low) & _WORD
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    x = (x ^ x >> 16) + high & _WORD
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD
    x = (x ^ x >> 11) * 0xAC4C1B51 & _WORD
    x = x ^ x >> 15
    return x >= (int(p * (1 << 32)) if p < 1.0 else 1 << 32)


def _mixed(x: Tensor) -> Tensor:
    """The last steps of SplitMix64, in 64 bits that wrap around."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(word: int) -> int:
    """As the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, without copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
