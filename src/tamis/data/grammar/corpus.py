"""The corpus: seeded draws, divided by the combinations of words that they hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache

from tamis.data.grammar.combinations import combinations
from tamis.data.grammar.draws import Draws
from tamis.data.grammar.example import Example
from tamis.data.grammar.sampling import Sampler
from tamis.data.grammar.sentences import realise
from tamis.data.grammar.syntax import Sentence

SPLITS = ("train", "valid", "test")
HELD_OUT = 0.05
"""Share of the combinations that are kept for valid, and for test."""


def generate(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """`count` different sentence pairs of a split, the same ones on every machine.

    Some combinations of words, about one in twenty each, are kept for "valid" and for "test": every sentence there
    holds at least one of its own and none of the other's, and "train" holds none at all.  So no sentence is in two
    splits, whatever the seeds.  A smaller count gives the beginning of the same list.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    for name, value, smallest in (("count", count, 0), ("seed", seed, None)):
        if isinstance(value, bool) or not isinstance(value, int) or (smallest is not None and value < smallest):
            wanted = "an int" if smallest is None else f"an int of at least {smallest}"
            raise ValueError(f"{name} must be {wanted}, got {value!r}")
    examples: dict[tuple[str, ...], Example] = {}
    draws = _examples(split, seed)
    while len(examples) < count:
        example = next(draws)
        examples.setdefault(example.source, example)
    return list(examples.values())


def _examples(split: str, seed: int) -> Iterator[Example]:
    sampler = Sampler(Draws(f"tamis grammar {split} {seed}"))
    while True:
        sentence = sampler.sentence()
        if split_of(sentence) == split:
            yield realise(sentence)


def split_of(sentence: Sentence) -> str | None:
    """Where a sentence belongs; None where valid and test both claim it."""
    claims = {reserved_for(*combination) for combination in combinations(sentence)} - {"train"}
    if not claims:
        return "train"
    return claims.pop() if len(claims) == 1 else None


@cache
def reserved_for(kind: str, first: str, second: str) -> str:
    """The split that a combination is kept for; "train" for those that may come anywhere."""
    share = zlib.crc32(f"{kind}/{first}/{second}".encode()) / 2**32
    if share < HELD_OUT:
        return "valid"
    return "test" if share < 2 * HELD_OUT else "train"
