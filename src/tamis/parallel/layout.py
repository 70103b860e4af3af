"""Which tokens of a sequence each of P processes holds: of 2P chunks, one from the head and its mirror from the tail.

    P = 2:   0 | 1 | 2 | 3    process 0 holds chunks 0 and 3, process 1 chunks 1 and 2

In a causal sequence the first queries see few keys and the last ones many: so every process has as much to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The place of one process among those that share a sequence."""

    size: int
    rank: int

    @property
    def unit(self) -> int:
        """What lengths must be a multiple of."""
        return 1 if self.size == 1 else 2 * self.size

    def padded(self, length: int) -> int:
        """The least length that can be shared and holds so many tokens."""
        return -(-length // self.unit) * self.unit

    def chunks(self, local: int) -> list[tuple[slice, slice]]:
        """Where each chunk of this process's tokens is among them, and where in the whole sequence."""
        if self.size == 1:
            return [(slice(0, local), slice(0, local))]
        width = local // 2
        first, last = self.rank * width, (2 * self.size - 1 - self.rank) * width
        return [(slice(0, width), slice(first, first + width)), (slice(width, local), slice(last, last + width))]

    def places(self, local: int, device: torch.device) -> Tensor:
        """The place in the whole sequence of each of this process's tokens, (local,)."""
        return torch.cat([torch.arange(whole.start, whole.stop, device=device) for _, whole in self.chunks(local)])

    def take(self, whole: Tensor, dim: int, fill: float = 0) -> Tensor:
        """This process's tokens of a whole sequence, which `fill` brings to a length that can be shared."""
        dim %= whole.ndim
        missing = self.padded(whole.shape[dim]) - whole.shape[dim]
        padding = [0, 0] * (whole.ndim - 1 - dim) + [0, missing]
        padded = F.pad(whole, padding, value=fill) if missing else whole
        chunks = self.chunks(padded.shape[dim] // self.size)
        return torch.cat([padded.narrow(dim, place.start, place.stop - place.start) for _, place in chunks], dim)

    def join(self, parts: Tensor, dim: int) -> Tensor:
        """The whole sequence from the tokens of all processes (P, ...), whose dimension `dim` is that of the tokens."""
        if self.size == 1:
            return parts[0]
        first, last = parts.chunk(2, dim + 1)
        return torch.cat([first, last.flip(0)]).movedim(0, dim).flatten(dim, dim + 1)

    def split(self, whole: Tensor, dim: int) -> Tensor:
        """The reverse: the tokens of all processes, (P, ...)."""
        if self.size == 1:
            return whole.unsqueeze(0)
        first, last = whole.unflatten(dim, (2 * self.size, -1)).movedim(dim, 0).chunk(2)
        return torch.cat([first, last.flip(0)], dim + 1)
