"""A sentence pair with its gold links."""

from __future__ import annotations

from dataclasses import dataclass

_NO_SPACE_BEFORE = frozenset(",.?!")


@dataclass(frozen=True)
class Example:
    """Words of both sides, punctuation apart, and which of them translate each other."""

    source: tuple[str, ...]
    """English words."""
    target: tuple[str, ...]
    """German words."""
    links: frozenset[tuple[int, int]]
    """Sure links (source word, target word), counted from 0."""

    @property
    def source_text(self) -> str:
        return join_words(self.source)

    @property
    def target_text(self) -> str:
        return join_words(self.target)

    @property
    def source_spans(self) -> list[tuple[int, int]]:
        """Start and end of each source word within `source_text`, in characters."""
        return word_spans(self.source)

    @property
    def target_spans(self) -> list[tuple[int, int]]:
        """Start and end of each target word within `target_text`, in characters."""
        return word_spans(self.target)


def join_words(words: tuple[str, ...]) -> str:
    """Plain text: a space before every word but the first, none before punctuation."""
    text = words[0] if words else ""
    for word in words[1:]:
        text += word if word in _NO_SPACE_BEFORE else " " + word
    return text


def word_spans(words: tuple[str, ...]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    end = 0
    for number, word in enumerate(words):
        start = end if number == 0 or word in _NO_SPACE_BEFORE else end + 1
        end = start + len(word)
        spans.append((start, end))
    return spans
