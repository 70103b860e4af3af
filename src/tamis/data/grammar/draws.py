"""Random choices that are the same on every machine and with every version of Python."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

T = TypeVar("T")


class Weighted(Generic[T]):
    """Alternatives and how often each is drawn."""

    def __init__(self, weights: Mapping[T, float]) -> None:
        self.items = list(weights)
        self.sums = list(accumulate(weights.values()))


class Draws:
    """Draws from a seeded `random.Random`.  Only its `random()` is promised to stay as it is; all is built on that."""

    def __init__(self, seed: str) -> None:
        self._uniform = random.Random(seed).random

    def chance(self, share: float) -> bool:
        return self._uniform() < share

    def pick(self, alternatives: Sequence[T]) -> T:
        return alternatives[int(self._uniform() * len(alternatives))]

    def weighted(self, alternatives: Weighted[T]) -> T:
        return alternatives.items[bisect(alternatives.sums, self._uniform() * alternatives.sums[-1])]
