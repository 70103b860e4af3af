"""What all tasks share: `BOS source SEP target EOS`, seeds, and splits that never overlap."""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.settings import check_memory, choose

SPLITS = {"train": (0, 1), "valid": (2,), "test": (3,)}
"""Which quarters of all sources, told apart by a hash, from the first to the last belong to which split."""
Rows = TypeVar("Rows", Tensor, np.ndarray[Any, Any])
ROUNDS = 1000
"""Draws after which a split is taken to be empty."""


@dataclass(frozen=True)
class Sequences:
    """Rows of one length."""

    tokens: Tensor
    """(B, L): BOS source SEP target EOS."""
    answer: Tensor
    """(B, L), True for target and EOS: what a model has to say."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the answer."""
        return int((~self.answer[0]).sum())


@dataclass(frozen=True)
class SequenceTask(ABC):
    """A source and the target that follows from it.  A new task is `num_symbols` and `pairs`."""

    shortest: ClassVar[int] = 1
    """The least length that there is."""

    @property
    @abstractmethod
    def num_symbols(self) -> int:
        """Sources and targets hold symbols 0 to num_symbols - 1."""

    @abstractmethod
    def pairs(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` sources (count, n) and their targets (count, m), on the generator's device; n and m follow from
        `length` alone."""

    @property
    def bos_id(self) -> int:
        return self.num_symbols

    @property
    def sep_id(self) -> int:
        return self.num_symbols + 1

    @property
    def eos_id(self) -> int:
        return self.num_symbols + 2

    @property
    def vocab_size(self) -> int:
        return self.num_symbols + 3

    def generate(self, count: int, length: int, generator: torch.Generator, split: str = "train") -> Sequences:
        """Rows of a split, drawn on the generator's device.

        No source of one split is ever in another: a hash of the source says to which it belongs, and what belongs
        elsewhere is drawn again.  Within a split a source may come twice.
        """
        if count < 1 or length < self.shortest:
            least = f"count of at least 1 and a length of at least {self.shortest}"
            raise ValueError(f"{type(self).__name__} needs a {least}, got {count} and {length}")
        wanted = SPLITS[choose("split", split, SPLITS)]
        found: list[tuple[Tensor, Tensor]] = []
        total = 0
        check_memory(16 * count * length, generator.device, f"{count:,} rows of length {length:,}", "either of them")
        enough = 4 * count // len(wanted) + 4 * math.isqrt(count)  # as a rule, so that there is one draw
        for _ in range(ROUNDS):
            source, target = self.pairs(enough, length, generator)
            quarter = quarters(source)
            kept = ((quarter >= wanted[0]) & (quarter <= wanted[-1])).nonzero().squeeze(1)
            found.append((source[kept], target[kept]))
            total += len(kept)
            if total >= count:
                return self._framed(*(torch.cat(side)[:count] for side in zip(*found, strict=True)))
        raise ValueError(f"{type(self).__name__} has too few {split} sources of length {length}: take a longer one")

    def answer_length(self, length: int) -> int:
        """Tokens of an answer, its EOS included."""
        return _answer_length(self, length)

    def _framed(self, source: Tensor, target: Tensor) -> Sequences:
        bos, sep, eos = (source.new_full((len(source), 1), token) for token in (self.bos_id, self.sep_id, self.eos_id))
        tokens = torch.cat([bos, source, sep, target, eos], 1)
        answer = torch.arange(tokens.shape[1], device=tokens.device) >= source.shape[1] + 2
        return Sequences(tokens, answer.expand_as(tokens))


@functools.cache
def _answer_length(task: SequenceTask, length: int) -> int:
    return task.pairs(1, length, stream(0))[1].shape[1] + 1


def stream(*names: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of their own for every list of names: batch n needs no batch before it."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def quarters(sources: Tensor) -> Tensor:
    """A hash of each row (B, n), in 0 to 3 (B,): the same on every device."""
    if sources.device.type == "cpu":  # numpy, which takes a third of torch's time for so few numbers
        return torch.from_numpy(_hashed(sources.numpy(), np.arange(1, sources.shape[1] + 1)))
    return _hashed(sources, torch.arange(1, sources.shape[1] + 1, device=sources.device))


def _hashed(sources: Rows, places: Rows) -> Rows:
    return (_mixed((_mixed(sources + 1) * (_mixed(places) | 1)).sum(1)) >> 40) & 3


def _mixed(x: Rows) -> Rows:
    """Every bit of int64 numbers depends on every other; products wrap around, as they should."""
    for factor in (-7046029254386353131, -4658895280553007687):  # odd, from splitmix64
        x = x * factor
        x ^= x >> 31
    return x


def distinct(count: int, number: int, size: int, generator: torch.Generator) -> Tensor:
    """(count, number) integers below `size`, different within a row, each such row equally likely."""
    device = generator.device
    if number > size:
        raise ValueError(f"there are no {number} different integers below {size}")
    if 4 * number > size:
        return torch.rand(count, size, generator=generator, device=device, dtype=torch.float64).argsort(1)[:, :number]
    drawn = torch.randint(size, (count, number), generator=generator, device=device)
    while True:
        # What came before in its row is drawn again; nothing here looks at values but for equality, so no row is
        # likelier than another.
        ordered, order = drawn.sort(dim=1, stable=True)
        repeated = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        if not repeated.any():
            return drawn
        again = torch.zeros_like(repeated).scatter(1, order, repeated)
        drawn = torch.where(again, torch.randint(size, drawn.shape, generator=generator, device=device), drawn)
