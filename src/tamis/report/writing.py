"""Text as it was written, with the pieces that a model reads as marks on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tamis.report.drawing import SPACES

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True)
class Writing:
    """One side of a sentence."""

    pieces: list[str]
    """Each token as its vocabulary spells it."""
    segments: list[tuple[str, int | None]]
    """The text, cut where tokens begin and end: each part with the token that it is the text of, None between them."""

    @property
    def text(self) -> str:
        """As one reads it, whatever pieces it was cut into."""
        return "".join(part for part, _ in self.segments)

    def labels(self) -> list[str]:
        """What each token is called: its characters, or how its vocabulary spells it where it has none of its own."""
        own: dict[int, str] = {}
        for part, token in self.segments:
            if token is not None:
                own[token] = own.get(token, "") + part
        return [own.get(token) or bare_piece(piece) for token, piece in enumerate(self.pieces)]

    def to_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def of_spans(cls, text: str, pieces: Sequence[str], spans: Sequence[Span | None]) -> Writing:
        """Write tokens that stand for characters of a text; None, or an empty span, for what has none of its own.

        A character that several tokens spell belongs to the first of them.
        """
        segments: list[tuple[str, int | None]] = []
        done = 0
        for token, span in enumerate(spans):
            if span is None or span[1] <= max(done, span[0]):
                continue
            begin, end = max(done, span[0]), span[1]
            if begin > done:
                segments.append((text[done:begin], None))
            segments.append((text[begin:end], token))
            done = end
        if done < len(text):
            segments.append((text[done:], None))
        return cls(list(pieces), segments)

    @classmethod
    def of_pieces(cls, pieces: Sequence[str]) -> Writing:
        """Where nobody kept the text: as the pieces spell it.  What a vocabulary changed or did not know is lost."""
        words = [piece for piece in pieces if piece not in SPECIAL]
        mark = next((mark for mark in SPACES if any(word.startswith(mark) for word in words)), None)
        segments: list[tuple[str, int | None]] = []
        for token, piece in enumerate(pieces):
            if piece in SPECIAL:
                continue
            bare = piece if mark is None else piece.replace(mark, " ")
            inner = bare.lstrip(" ")
            space = " " if segments and (mark is None or bare != inner) else ""
            if space:
                segments.append((space, None))
            if inner:
                segments.append((inner, token))
        return cls(list(pieces), segments)

    @classmethod
    def of_analysis(cls, named: Mapping[str, Any], side: str) -> Writing:
        """What an analysis kept of a side: its pieces, and its text with the characters of each where it was there."""
        if spans := named.get(f"{side}_spans"):
            return cls.of_spans(
                named[f"{side}_text"], named[side], [None if one is None else tuple(one) for one in spans]
            )
        return cls.of_pieces(named[side])


SPECIAL = ("<s>", "</s>", "<pad>", "<bos>", "<eos>")


def bare_piece(piece: str) -> str:
    """A piece that stands for no characters of its own; a space alone shows as one."""
    return piece.strip("".join(SPACES)) or "\u2423"
