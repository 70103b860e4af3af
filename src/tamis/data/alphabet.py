"""Which characters a text is made of: how many there are, and of which scripts."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable

SAMPLED = 100_000
"""Texts that are looked at, the first ones."""
COVERED = 0.9995
"""Share of a text that its alphabet has to cover: the rest are names, signs and errors of any script."""
LARGE = 500
"""Characters from which on an alphabet is large: European ones have about a hundred, Japanese two thousand."""
SHARED = 0.5
"""Scripts differ where two texts have less of their letters in common."""


def count_characters(texts: Iterable[str]) -> Counter[str]:
    """How often each character comes, white space left out."""
    counts: Counter[str] = Counter()
    for text in itertools.islice(texts, SAMPLED):
        counts.update(text)
    return Counter({character: count for character, count in counts.items() if not character.isspace()})


def alphabet_size(counts: Counter[str]) -> int:
    """How many characters it takes to cover `COVERED` of a text."""
    wanted, size = COVERED * counts.total(), 0
    for _, count in counts.most_common():
        if wanted <= 0:
            break
        wanted -= count
        size += 1
    return size


def scripts(counts: Counter[str]) -> dict[str, float]:
    """The share of its letters in each script: LATIN, CYRILLIC, CJK, HIRAGANA, ..."""
    found: Counter[str] = Counter()
    for character, count in counts.items():
        if character.isalpha():
            found[unicodedata.name(character, "UNKNOWN").split(" ")[0].split("-")[0]] += count
    return {script: count / found.total() for script, count in found.items()}


def scripts_differ(one: Counter[str], other: Counter[str]) -> bool:
    """Whether two texts have little of their letters in common scripts."""
    first, second = scripts(one), scripts(other)
    return bool(first and second) and sum(min(share, second.get(s, 0.0)) for s, share in first.items()) < SHARED


def is_unspaced(character: str) -> bool:
    """Whether a character is of a script that writes no spaces between words."""
    return any(first <= ord(character) <= last for first, last in UNSPACED)


UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Chinese characters
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x3FFFF),
)
