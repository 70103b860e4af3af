"""Something to find in a long context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tamis.data.tasks.base import SequenceTask, distinct
from tamis.settings import at_least

FILLER, IS, ASK = 0, 1, 2


@dataclass(frozen=True)
class MQMTAR(SequenceTask):
    """Multi-query multi-token associative recall: ... k k 1 v v 0 ... 2 k k -> 2 v v, four times.

    floor(0.8 n / 6) pairs `k k 1 v v 0` in n places, the rest of them 0, then four queries `2 k k`; the target is
    `2 v v` for each.  Keys and values are two symbols of 3 to 258.  Taken here: keys are different, so are the four
    that are asked for, every arrangement of pairs is equally likely, and where there are fewer than four pairs (below
    30 places, which the paper does not have) there are as many queries as pairs.
    """

    symbols: int = 256
    queries: int = 4

    shortest: ClassVar[int] = 8  # for one pair

    def __post_init__(self) -> None:
        at_least(self, 1, "symbols", "queries")

    @property
    def num_symbols(self) -> int:
        return 3 + self.symbols

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        number = 8 * length // 60
        queries = min(self.queries, number)
        keys = self._words(distinct(count, number, self.symbols**2, generator))  # (count, number, 2)
        drawn = torch.randint(self.symbols**2, (count, number), generator=generator, device=generator.device)
        values = self._words(drawn)
        mark = torch.ones_like(keys[:, :, :1])
        blocks = torch.cat([keys, IS * mark, values, FILLER * mark], 2)
        # A pair is one thing among the fillers and takes five places more than they do.
        starts = distinct(count, number, length - 5 * number, generator).sort(1).values
        starts = starts + 5 * torch.arange(number, device=starts.device)
        places = starts.unsqueeze(2) + torch.arange(6, device=starts.device)
        context = torch.full((count, length), FILLER, device=starts.device)
        context.scatter_(1, places.flatten(1), blocks.flatten(1))
        asked = distinct(count, queries, number, generator).unsqueeze(2).expand(-1, -1, 2)
        ask = ASK * mark[:, :queries]
        questions, answers = (torch.cat([ask, side.gather(1, asked)], 2).flatten(1) for side in (keys, values))
        return torch.cat([context, questions], 1), answers

    def _words(self, numbers: Tensor) -> Tensor:
        """Two symbols for each number."""
        return 3 + torch.stack([numbers // self.symbols, numbers % self.symbols], -1)


@dataclass(frozen=True)
class MaxRetrieval(SequenceTask):
    """The value of the largest key: 2 7 v, 5 0 w, 4 9 v -> w.

    `length` items of a key and a value.  Taken here, in symbols: a key is a number of two digits, the larger one first;
    keys are different; values have symbols of their own behind the digits; lengths count items.
    """

    base: int = 128
    """Digits: keys are below base squared, which should be far more than there are items."""
    values: int = 10

    def __post_init__(self) -> None:
        at_least(self, 1, "base", "values")

    @property
    def num_symbols(self) -> int:
        return self.base + self.values

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        keys = distinct(count, length, self.base**2, generator)
        values = torch.randint(self.values, keys.shape, generator=generator, device=keys.device) + self.base
        source = torch.stack([keys // self.base, keys % self.base, values], 2).flatten(1)
        return source, values.gather(1, keys.argmax(1, keepdim=True))


@dataclass(frozen=True)
class Passkey(SequenceTask):
    """A number hidden in a text that says nothing: KEY 4 0 7 1 3 somewhere, KEY at the end -> 4 0 7 1 3.

    After Mohtashami and Jaggi 2023, https://arxiv.org/abs/2305.16300.  Taken here, in symbols: the text is one sentence
    of `sentence` different symbols over and over, as theirs; every depth is equally likely; `length` is of all but
    BOS and SEP.
    """

    digits: int = 5
    sentence: int = 16

    shortest: ClassVar[int] = 16

    def __post_init__(self) -> None:
        at_least(self, 1, "digits", largest=self.shortest - 2)
        at_least(self, 1, "sentence")

    @property
    def key_id(self) -> int:
        return 10

    @property
    def num_symbols(self) -> int:
        return 11 + self.sentence

    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        number = torch.randint(10, (count, self.digits), generator=generator, device=device)
        text = length - self.digits - 2
        depth = torch.randint(text + 1, (count, 1), generator=generator, device=device)
        marked = torch.cat([torch.full_like(depth, self.key_id), number], 1)
        places = torch.arange(length - 1, device=device) - depth  # (count, length - 1), 0 where the key is
        inside = (places >= 0) & (places <= self.digits)
        words = torch.where(places < 0, places + depth, places + depth - self.digits - 1) % self.sentence + 11
        source = torch.where(inside, marked.gather(1, places.clamp(0, self.digits)), words)
        return torch.cat([source, torch.full_like(depth, self.key_id)], 1), number
