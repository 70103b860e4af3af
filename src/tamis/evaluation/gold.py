"""Gold word alignments: sentence pairs with sure and possible links between their words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tamis.data.text import read_lines

if TYPE_CHECKING:
    from tamis.data.grammar import Example

Link = tuple[int, int]
"""A source word and a target word, counted from 0."""
Span = tuple[int, int]
"""Characters [begin, end) of a text."""
Joiner = Callable[[Sequence[str]], str]
"""Makes a text of words; every word must stand in it as it is, in order."""

_LINK = re.compile(r"(\d{1,9})([-p])(\d{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class GoldPair:
    """Two texts, where their words stand in them, and which words belong together."""

    source: str
    target: str
    source_spans: tuple[Span, ...]
    target_spans: tuple[Span, ...]
    sure: frozenset[Link]
    possible: frozenset[Link]
    """The sure ones are among them."""

    def __post_init__(self) -> None:
        if not self.sure <= self.possible:
            object.__setattr__(self, "possible", self.possible | self.sure)
        for name, text, spans in (
            ("source", self.source, self.source_spans),
            ("target", self.target, self.target_spans),
        ):
            for begin, end in spans:
                if not 0 <= begin <= end <= len(text):
                    raise ValueError(f"{name} span ({begin}, {end}) is outside a text of {len(text)} characters")
        for source, target in self.possible:
            if not (0 <= source < len(self.source_spans) and 0 <= target < len(self.target_spans)):
                sizes = f"{len(self.source_spans)} source and {len(self.target_spans)} target words"
                raise ValueError(f"link {source}-{target} is outside {sizes}, counted from 0")

    @classmethod
    def from_tokens(
        cls,
        source: Sequence[str],
        target: Sequence[str],
        sure: Iterable[Link],
        possible: Iterable[Link] = (),
        *,
        join: Joiner = " ".join,
    ) -> Self:
        """Make a pair from words.  `join` makes the texts: for a model of natural text, pass a detokeniser."""
        texts = join(source), join(target)
        return cls(
            source=texts[0],
            target=texts[1],
            source_spans=locate(source, texts[0]),
            target_spans=locate(target, texts[1]),
            sure=frozenset(sure),
            possible=frozenset(possible),
        )

    @classmethod
    def from_example(cls, example: Example) -> Self:
        """Make a pair from a sentence pair of the embedded corpus."""
        return cls(
            source=example.source_text,
            target=example.target_text,
            source_spans=tuple(example.source_spans),
            target_spans=tuple(example.target_spans),
            sure=example.links,
            possible=example.links,
        )

    def swapped(self) -> Self:
        """Return the pair for the other direction of translation."""
        return type(self)(
            source=self.target,
            target=self.source,
            source_spans=self.target_spans,
            target_spans=self.source_spans,
            sure=swap(self.sure),
            possible=swap(self.possible),
        )


def swap(links: Iterable[Link]) -> frozenset[Link]:
    """Target-source links as source-target links, and back."""
    return frozenset((second, first) for first, second in links)


def locate(words: Sequence[str], text: str) -> tuple[Span, ...]:
    """Where each word stands in a text that has them all, in order, with only white space between."""
    spans = []
    position = 0
    for word in words:
        begin = text.find(word, position)
        if begin < 0 or text[position:begin].strip():
            raise ValueError(f"the text {text!r} should continue with {word!r} at character {position}")
        position = begin + len(word)
        spans.append((begin, position))
    return tuple(spans)


def parse_links(text: str, *, one_based: bool = False) -> tuple[frozenset[Link], frozenset[Link]]:
    """Read sure links and all links from a line such as "0-0 1p1": "-" is sure, "p" possible.

    Args:
        text: the line.
        one_based: count words from 1.

    Returns:
        sure links, and all links.
    """
    sure, possible = set(), set()
    first = 1 if one_based else 0
    for token in text.split():
        match = _LINK.fullmatch(token)
        if match is None:
            raise ValueError(f"a link is written 0-0 if it is sure and 0p0 if it is possible, got {token[:40]!r}")
        link = (int(match[1]) - first, int(match[3]) - first)
        if min(link) < 0:
            raise ValueError(f"links counted from 1 cannot have a 0, got {token!r}")
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return frozenset(sure), frozenset(possible)


def read_links(path: str | Path, *, one_based: bool = False, swapped: bool = False) -> list[frozenset[Link]]:
    """Read the links that an aligner wrote, one sentence per line.

    Args:
        path: a file.
        one_based: count words from 1.
        swapped: the aligner wrote them target-source.

    Returns:
        links of each sentence.
    """
    found = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            links = parse_links(line, one_based=one_based)[1]
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        found.append(swap(links) if swapped else links)
    return found


def read_gold(path: str | Path, *, join: Joiner = " ".join) -> list[GoldPair]:
    """Read gold pairs from lines of source words, target words and links between tabs.

    Args:
        path: a file; words are separated by one space.
        join: makes a text of words.

    Returns:
        the pairs.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 3:
            raise ValueError(f"{path}, line {number}: source, target and links make 3 columns, got {len(columns)}")
        pairs.append(_gold(f"{path}, line {number}", *columns, one_based=False, join=join))
    return pairs


def read_pharaoh(
    links: str | Path,
    source: str | Path,
    target: str | Path,
    *,
    one_based: bool = False,
    join: Joiner = " ".join,
) -> list[GoldPair]:
    """Read gold pairs from a file of links ("0-0 1p1") and two files of tokenised text.

    Args:
        links, source, target: the files.
        one_based: count words from 1.
        join: makes a text of words.

    Returns:
        the pairs.
    """
    paths = (links, source, target)
    columns = [list(read_lines(path)) for path in paths]
    if len({len(lines) for lines in columns}) != 1:
        counts = ", ".join(f"{path} has {len(lines)}" for path, lines in zip(paths, columns, strict=True))
        raise ValueError(f"links, source and target must have the same number of lines: {counts}")
    return [
        _gold(f"{links}, line {number}", left, right, text, one_based=one_based, join=join)
        for number, (text, left, right) in enumerate(zip(*columns, strict=True), 1)
    ]


def _gold(where: str, source: str, target: str, links: str, *, one_based: bool, join: Joiner) -> GoldPair:
    try:
        sure, possible = parse_links(links, one_based=one_based)
        return GoldPair.from_tokens(_words(source), _words(target), sure, possible, join=join)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _words(text: str) -> list[str]:
    """Split at ASCII spaces only: a word may be an ideographic or no-break space."""
    return text.split(" ") if text else []
