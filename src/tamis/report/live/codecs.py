"""From text to the numbers that a model reads, and back, with the characters that each number stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tamis.data.vocabulary import Vocabulary
from tamis.report.writing import Span, Writing


class Encoded(NamedTuple):
    """A text as a model reads it, with what its tokenizer adds before and after."""

    ids: list[int]
    spans: list[Span | None]
    """None for tokens that stand for no characters, such as the end."""
    text: str


class Codec(Protocol):
    """What a model's text is encoded by."""

    def encode(self, text: str) -> Encoded: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Sequence[int]) -> list[str]: ...


class Subwords:
    """A vocabulary of ours; `before` and `after` are added to every text."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.vocabulary, self.before, self.after = vocabulary, list(before), list(after)

    def encode(self, text: str) -> Encoded:
        ids, spans = self.vocabulary.spans(text)
        return Encoded(
            [*self.before, *ids, *self.after], [*[None] * len(self.before), *spans, *[None] * len(self.after)], text
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self.vocabulary.pieces(ids)


class Tokenizer:
    """A tokenizer of transformers; a slow one does not say which characters a token is of."""

    def __init__(self, tokenizer: Any, *, target: bool = False) -> None:
        self.tokenizer, self.target = tokenizer, target

    def encode(self, text: str) -> Encoded:
        fast = bool(self.tokenizer.is_fast)
        given = {"text_target": text} if self.target else {"text": text}
        made = self.tokenizer(**given, return_offsets_mapping=fast)
        ids = list(made["input_ids"])
        if not fast:
            return Encoded(ids, [None] * len(ids), "")
        return Encoded(ids, [_trimmed(text, span) for span in made["offset_mapping"]], text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(piece) for piece in self.tokenizer.convert_ids_to_tokens(list(ids))]


class Numbers:
    """For a model without a vocabulary: tokens are typed as their numbers, with spaces between."""

    def __init__(self, size: int, pieces: Callable[[list[int]], Sequence[str]] | None = None) -> None:
        self.size, self._pieces = size, pieces

    def encode(self, text: str) -> Encoded:
        found = list(re.finditer(r"\S+", text))
        for match in found:
            if not re.fullmatch(r"[0-9]{1,9}", match[0]) or int(match[0]) >= self.size:
                raise ValueError(
                    f"this model has no vocabulary: type numbers from 0 to {self.size - 1}, got {match[0]!r:.40}"
                )
        return Encoded([int(match[0]) for match in found], [match.span() for match in found], text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return list(map(str, ids)) if self._pieces is None else list(self._pieces(list(ids)))


def writing(codec: Codec, encoded: Encoded) -> Writing:
    """A text with its tokens as marks on it."""
    pieces = codec.pieces(encoded.ids)
    if not encoded.text:
        return Writing.of_pieces(pieces)
    return Writing.of_spans(encoded.text, pieces, encoded.spans)


def _trimmed(text: str, span: Span) -> Span | None:
    """Without white space around it, which belongs to no token of a page."""
    begin, end = span
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return (begin, end) if begin < end else None
