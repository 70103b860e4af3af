"""Random strings, and the same symbols in another order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tamis.data.tasks.base import SequenceTask
from tamis.settings import at_least


@dataclass(frozen=True)
class StringTask(SequenceTask):
    """`length` symbols, each of `symbols` equally likely."""

    symbols: int = 32

    def __post_init__(self) -> None:
        at_least(self, 1, "symbols")

    @property
    def num_symbols(self) -> int:
        return self.symbols

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        source = torch.randint(self.symbols, (count, length), generator=generator, device=generator.device)
        return source, self.target(source)

    @abstractmethod
    def target(self, source: Tensor) -> Tensor:
        """Return the targets of sources (B, n)."""


@dataclass(frozen=True)
class Copy(StringTask):
    """The source again: 3 1 2 -> 3 1 2."""

    def target(self, source: Tensor) -> Tensor:
        return source


@dataclass(frozen=True)
class Reverse(StringTask):
    """The source from its end: 3 1 2 -> 2 1 3."""

    def target(self, source: Tensor) -> Tensor:
        return source.flip(1)


@dataclass(frozen=True)
class Sort(StringTask):
    """Ascending, as often as they come: 3 1 3 2 -> 1 2 3 3."""

    def target(self, source: Tensor) -> Tensor:
        return source.sort(1).values


@dataclass(frozen=True)
class TwoBack(StringTask):
    """The source two places late: 3 1 2 5 -> 3 1.

    Taken here: the first two places, which have nothing two before them, have no answer.
    """

    shortest: ClassVar[int] = 3

    def target(self, source: Tensor) -> Tensor:
        return source[:, :-2]
