"""Sentences as an analysis takes them: tokens, which of them are real, and which belong to what word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tamis.analysis.words import NO_WORD

if TYPE_CHECKING:  # the analyses of a model need no vocabulary, nor what reads one
    from tamis.data.batching import Batch
    from tamis.data.vocabulary import Vocabulary

SPACE = "\u2581"
QUESTION_MARKS = frozenset(("?", "\uff1f", "\u061f"))  # also full-width and Arabic
INTERROGATIVES = {
    "de": frozenset(
        (
            "wer", "wen", "wem", "wessen", "was", "wann", "wo", "wohin", "woher", "warum", "weshalb", "wieso", "wie",
            "wieviel", "womit", "wofür", "welche", "welcher", "welches", "welchen", "welchem",
        )
    ),
    "en": frozenset(("who", "whom", "whose", "what", "when", "where", "why", "how", "which")),
    "fr": frozenset(
        (
            "qui", "que", "quoi", "quand", "où", "pourquoi", "comment", "combien", "quel", "quelle", "quels", "quelles",
        )
    ),
}  # fmt: skip
"""Interrogative words by language, in lower case."""

Run = Callable[[nn.Module, "Sentences"], Any]
"""Calls a model on some sentences."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One side of some sentences; all of shape (B, L)."""

    ids: Tensor
    mask: Tensor | None = None
    """False for padding; None: there is none."""
    words: Tensor | None = None
    """The number of each token's word within its sentence, -1 for tokens of no word."""
    interrogative: Tensor | None = None
    """True for tokens of words such as "who" and "why"."""
    question: Tensor | None = None
    """True for question marks."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 2:
            raise ValueError(f"ids must be (B, L), got shape {tuple(self.ids.shape)}")
        for name, value in self._others():
            if value.shape != self.ids.shape:
                raise ValueError(f"{name} must be {tuple(self.ids.shape)} as ids are, got {tuple(value.shape)}")
            if name != "words" and value.dtype != torch.bool:
                raise ValueError(f"{name} must be boolean, got {value.dtype}")

    @property
    def real(self) -> Tensor:
        """The mask, made if there is none."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """With every tensor changed."""
        changed = {name: function(value) for name, value in self._others()}
        return replace(self, ids=function(self.ids), **changed)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "ids" and value is not None:
                yield field.name, value


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """A batch to analyse: pairs for an encoder-decoder, targets alone for a language model."""

    target: Tokens
    """What a decoder reads, or a language model."""
    source: Tokens | None = None
    numbers: tuple[int, ...] | None = None
    """By which sentences can be asked for; None: counted from 0 over all batches."""

    def __post_init__(self) -> None:
        rows = len(self)
        if self.source is not None and self.source.ids.shape[0] != rows:
            raise ValueError(f"there are {rows} targets but {self.source.ids.shape[0]} sources")
        if self.numbers is not None and len(self.numbers) != rows:
            raise ValueError(f"there are {rows} sentences but {len(self.numbers)} numbers")

    def __len__(self) -> int:
        return self.target.ids.shape[0]

    @classmethod
    def of_batch(
        cls,
        batch: Batch,
        source_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        languages: tuple[str | None, str | None] = (None, None),
    ) -> Sentences:
        """Make sentences from a batch of translation; numbers are the indices of its pairs."""
        return cls(
            # Positions that are no label are no queries, the last padding of the decoder's input included.
            target=describe_tokens(
                batch.target, target_vocabulary, languages[1], mask=batch.labels != target_vocabulary.pad_id
            ),
            source=describe_tokens(batch.source, source_vocabulary, languages[0]),
            numbers=tuple(batch.indices),
        )

    def to(self, device: torch.device | str) -> Sentences:
        return replace(
            self,
            target=self.target.map(lambda tensor: tensor.to(device)),
            source=None if self.source is None else self.source.map(lambda tensor: tensor.to(device)),
        )

    def with_shuffled_sources(self) -> Sentences:
        """Each target with the source of the sentence before it, the first with that of the last."""
        assert self.source is not None
        return replace(self, source=self.source.map(lambda tensor: tensor.roll(1, 0)))

    def sides(self, kind: str) -> tuple[Tokens, Tokens]:
        """Queries and keys of a kind of attention."""
        source = self.target if self.source is None else self.source
        return (source if kind == "encoder" else self.target, self.target if kind == "decoder" else source)


def run_model(model: nn.Module, batch: Sentences) -> Any:
    """Call a model as `Seq2Seq` is called if there is a source, as `CausalLM` if there is none.

    Args:
        model, batch: the model, and what to call it on.

    Returns:
        what the model returns.
    """
    if batch.source is None:
        return model(batch.target.ids, batch.target.mask)
    return model(batch.source.ids, batch.target.ids, batch.source.real, batch.target.mask)


def describe_tokens(
    ids: Tensor, vocabulary: Vocabulary, language: str | None = None, *, mask: Tensor | None = None
) -> Tokens:
    """Describe tokens (B, L) by their words and, where `INTERROGATIVES` has the language, by who asks what.

    `mask` is False for padding, by default where the vocabulary's stands.

    Args:
        ids: the tokens.
        vocabulary: which they are of.
        language: such as "en".
        mask: False for padding, by default where the vocabulary's stands.

    Returns:
        the tokens with what is known of them.
    """
    asking = None if language is None else INTERROGATIVES.get(language)
    mask = ids != vocabulary.pad_id if mask is None else mask
    special = {vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id}
    words, interrogative, question = [], [], []
    for row in ids.tolist():
        named = zip(row, vocabulary.pieces(row), strict=True)
        pieces = [None if number in special else piece for number, piece in named]
        numbers = word_numbers(pieces)
        texts = word_texts(pieces, numbers)
        words.append(numbers)
        interrogative.append([asking is not None and texts.get(number, "") in asking for number in numbers])
        question.append([texts.get(number) in QUESTION_MARKS for number in numbers])

    def table(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=ids.device).reshape(ids.shape)

    return Tokens(
        ids=ids,
        mask=mask,
        words=table(words, torch.long),
        interrogative=None if asking is None else table(interrogative, torch.bool),
        question=table(question, torch.bool),
    )


def named_tokens(vocabulary: Vocabulary, side: str, ids: Tensor | None, text: str) -> dict[str, Any]:
    """What one side of a sentence is to be shown as: its pieces, and its text with the characters of each of them."""
    if ids is None:
        return {side: []}
    listed = ids.tolist()
    found: dict[str, Any] = {side: vocabulary.pieces(listed)}
    inner, spans = vocabulary.spans(text)
    for before in range(len(listed) - len(inner) + 1):
        if listed[before : before + len(inner)] == inner:
            after = len(listed) - len(inner) - before
            found[f"{side}_text"] = text
            found[f"{side}_spans"] = [*[None] * before, *map(list, spans), *[None] * after]
            break
    return found


def word_numbers(pieces: Sequence[str | None]) -> list[int]:
    """The number of each SentencePiece piece's word; None is a piece of no word, and gets -1.

    A word begins with a space, after None, and where letters and punctuation meet.  A space alone belongs to the word
    after it.
    """
    numbers = []
    number = NO_WORD
    open_as: bool | None = None  # whether the word that goes on is punctuation; None: what comes is a new one
    waiting = False  # a space alone has opened a word of a kind still unknown
    for piece in pieces:
        if piece is None:
            numbers.append(NO_WORD)
            open_as, waiting = None, False
            continue
        text = piece.removeprefix(SPACE)
        punctuation = bool(text) and not any(character.isalnum() for character in text)
        if not waiting and (text != piece or open_as is None or open_as != punctuation):
            number += 1
        waiting = not text
        open_as = punctuation
        numbers.append(number)
    return numbers


def word_texts(pieces: Sequence[str | None], numbers: Sequence[int]) -> dict[int, str]:
    """The text of each word, in lower case."""
    texts: dict[int, str] = {}
    for piece, number in zip(pieces, numbers, strict=True):
        if piece is not None:
            texts[number] = texts.get(number, "") + piece.replace(SPACE, "").lower()
    return texts
