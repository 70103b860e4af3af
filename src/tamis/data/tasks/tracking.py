"""One state to follow through a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tamis.data.tasks.base import SequenceTask
from tamis.settings import at_least, shares

WRITE, IGNORE, READ = 2, 3, 4


@dataclass(frozen=True)
class FlipFlop(SequenceTask):
    """The bit that was written last: w 1 i 0 w 0 r 0 i 1 r -> 0.

    Flip-flop language modelling, Liu et al. 2023, https://arxiv.org/abs/2306.00946: `length` commands, the first a
    write and the last a read, each with a bit; the one of the last read is the target.  Bits of writes and ignores are
    random, those of reads right.  Taken here: their shares of commands, and that lengths count commands.
    """

    shortest: ClassVar[int] = 2

    ignored: float = 0.8
    """Share of ignores; writes and reads have the rest in equal parts."""

    def __post_init__(self) -> None:
        shares(self, "ignored")

    @property
    def num_symbols(self) -> int:
        return 5

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        chance = torch.rand(count, length, generator=generator, device=device)
        other = torch.where(chance < (1.0 + self.ignored) / 2.0, WRITE, READ)
        commands = torch.where(chance < self.ignored, IGNORE, other)
        commands[:, -1] = READ
        commands[:, 0] = WRITE
        bits = torch.randint(2, (count, length), generator=generator, device=device)
        places = torch.arange(length, device=device)
        written = torch.where(commands == WRITE, places, 0).cummax(1).values
        bits = torch.where(commands == READ, bits.gather(1, written), bits)
        steps = torch.stack([commands, bits], 2).flatten(1)
        return steps[:, :-1], steps[:, -1:]


@dataclass(frozen=True)
class LocalCount(SequenceTask):
    """The place of each symbol in its run: a a a b b -> 1 2 3 1 2.

    Runs of `shortest_run` to `longest_run` of one symbol, the next of another; the last is cut where the source ends.
    Taken here: 32 symbols, and counts have symbols of their own behind these, from 1 on.
    """

    symbols: int = 32
    shortest_run: int = 2
    longest_run: int = 48

    def __post_init__(self) -> None:
        at_least(self, 2, "symbols")
        at_least(self, 1, "shortest_run")
        at_least(self, self.shortest_run, "longest_run")

    @property
    def num_symbols(self) -> int:
        return self.symbols + self.longest_run

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        shape = (count, -(-length // self.shortest_run))  # as many runs as there can be
        runs = torch.randint(self.shortest_run, self.longest_run + 1, shape, generator=generator, device=device)
        steps = torch.randint(1, self.symbols, shape, generator=generator, device=device)
        steps[:, 0] = torch.randint(self.symbols, (count,), generator=generator, device=device)
        places = torch.arange(length, device=device).expand(count, length).contiguous()
        ends = runs.cumsum(1)
        run = torch.searchsorted(ends, places, right=True)
        source = (steps.cumsum(1) % self.symbols).gather(1, run)
        return source, self.symbols + places - (ends - runs).gather(1, run)
