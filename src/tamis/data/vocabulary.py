"""Subword vocabularies: SentencePiece models, trained here or brought along."""

from __future__ import annotations

import hashlib
import io
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import sentencepiece

from tamis.data.text import LONGEST_LINE
from tamis.files import check_sealed, open_binary, replacing

_log = logging.getLogger("tamis")

KINDS = ("unigram", "bpe")
SPECIAL = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
SHARED, SOURCE, TARGET = "vocabulary.model", "source.model", "target.model"
LARGEST = 1 << 28  # bytes of a vocabulary: a million pieces take a tenth of it
LONGEST_WORD = (1 << 16) - 1  # characters: SentencePiece counts them in 16 bits, and aborts the process beyond
EXPANSION = 18  # characters that normalisation makes of one at most
THREADS = 8  # the number changes how sums are rounded, hence the model: the same on every machine


class Vocabulary:
    """A SentencePiece model with pad, bos, eos and unk.

    Models trained here have pad 0, bos 1, eos 2, unk 3.  A brought model keeps its own ids; what it lacks of pad, bos
    and eos gets the ids after its last piece, in this order.
    """

    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    fingerprint: str
    """The SHA-256 of the model."""

    def __init__(self, model: bytes) -> None:
        sentencepiece.set_min_log_level(2)  # it reports on stderr what it also raises
        self._model = model
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(model)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model: {error}") from error
        self._pieces = self._processor.vocab_size()
        self._size = self._pieces
        self.unk_id = self._processor.unk_id()
        for name in ("pad", "bos", "eos"):
            number = getattr(self._processor, f"{name}_id")()
            if number < 0:
                number = self._size
                self._size += 1
            setattr(self, f"{name}_id", number)
        self._added = {number: SPECIAL[name] for name, number in self.specials.items() if number >= self._pieces}
        self._ignored = frozenset((self.pad_id, self.bos_id, self.eos_id))
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        size: int,
        *,
        kind: str = "unigram",
        character_coverage: float = 1.0,
        byte_fallback: bool = False,
        max_sentences: int = 5_000_000,
    ) -> Self:
        """Learn exactly `size` pieces, specials included; the same texts in the same order give the same bytes.

        Of more than `max_sentences` texts a uniform sample of that many is used.  A size that the texts cannot fill is
        an error that says what they can: a vocabulary silently smaller than its recipe says would not be comparable.
        Texts with a word of more than 65,535 characters are left out, with a warning.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if size <= len(SPECIAL):
            raise ValueError(f"a vocabulary needs more than its {len(SPECIAL)} special pieces, got a size of {size}")
        if not 0.98 <= character_coverage <= 1.0:
            raise ValueError(f"character_coverage must lie in [0.98, 1], got {character_coverage}")
        sentences = _sample(_trainable(texts), max_sentences)
        if not any(_words(text) for text in sentences):
            blank = f"{len(sentences)} lines, all of them blank"
            none = f"not a line without a word of over {LONGEST_WORD:,} characters"
            raise ValueError(f"a vocabulary cannot be trained on no text: {blank if sentences else none}")
        sentencepiece.set_min_log_level(2)
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type=kind,
                vocab_size=size,
                character_coverage=character_coverage,
                byte_fallback=byte_fallback,
                max_sentence_length=LONGEST_LINE,  # by default lines over 4192 bytes are dropped
                num_threads=THREADS,
                minloglevel=2,
                pad_id=0,
                bos_id=1,
                eos_id=2,
                unk_id=3,
            )
        except RuntimeError as error:
            reason = str(error).rsplit("] ", 1)[-1] or str(error)
            raise ValueError(
                f"no {kind} vocabulary of {size} pieces from {len(sentences)} sentences: {reason}"
            ) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a SentencePiece model, packed or not, or the vocabulary of an imported model."""
        with open_binary(path) as file:
            model = file.read(LARGEST + 1)
        if len(model) > LARGEST:
            raise ValueError(f"{path} is no vocabulary: it holds more than {LARGEST >> 20} MB")
        try:
            if model.startswith(b"{"):
                from tamis.data.imported import read_imported

                return cast(Self, read_imported(model))
            return cls(model)
        except ValueError as error:
            raise ValueError(f"{path} is {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the model; `path` holds it whole or is left as it was."""
        with replacing(path) as file:
            file.write(self._model)

    def __len__(self) -> int:
        return self._size

    @property
    def specials(self) -> dict[str, int]:
        """The ids of pad, bos, eos and unk."""
        return {name: getattr(self, f"{name}_id") for name in SPECIAL}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without bos or eos."""
        return self._encode(text, int)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of many texts, by all cores."""
        return self._encode(list(texts), "numpy")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids; pad, bos and eos are passed over."""
        return self._processor.decode([number for number in self._checked(ids) if number not in self._ignored])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return how each id is written, specials included; a leading space shows as U+2581."""
        return [self._added.get(number) or self._processor.id_to_piece(number) for number in self._checked(ids)]

    def single_characters(self) -> tuple[int, int]:
        """Count how many pieces are a single character, and how many there are; specials and bytes count as neither."""
        ids = [n for n in range(self._pieces) if not self._processor.is_control(n) and not self._processor.is_byte(n)]
        learned = [self._processor.id_to_piece(number) for number in ids if number not in (self.unk_id, self.pad_id)]
        return sum(len(piece.lstrip("\u2581")) <= 1 for piece in learned), len(learned)

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and for each the characters [begin, end) of the text that it stands for.

        White space around a piece is not part of its span: a piece of nothing else has an empty one where the next
        piece begins.  Of a character spelled in bytes each byte has the whole character.
        """
        mapping = self._encode(text, "offset_mapping")
        ids: list[int] = mapping["ids"]
        spans = []
        whole = (0, 0)
        for number, offsets in zip(reversed(ids), reversed(mapping["offsets"]), strict=True):
            begin, end = trimmed(text, *offsets)
            # SentencePiece gives a character spelled in bytes to the last of them, and nothing to those before.
            if begin == end == whole[0] and self._processor.is_byte(number):
                end = whole[1]
            whole = (begin, end) if self._processor.is_byte(number) else (0, 0)
            spans.append((begin, end))
        return ids, spans[::-1]

    def _encode(self, text: str | list[str], kind: Any) -> Any:
        try:
            return self._processor.encode(text, return_type=kind)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"not text that can be encoded, as half a surrogate pair is not: {text!r:.100}") from error

    def _checked(self, ids: Iterable[int]) -> Iterator[int]:
        for number in map(int, ids):
            if not 0 <= number < self._size:
                raise ValueError(f"a vocabulary of {self._size} pieces has no id {number}")
            yield number


def trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """The characters [begin, end) of a text without white space around them."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


def _sample(texts: Iterable[str], most: int) -> list[str]:
    """All of them, or `most` drawn uniformly (reservoir sampling, seeded)."""
    draw = random.Random(0)
    kept: list[str] = []
    for number, text in enumerate(texts):
        if number < most:
            kept.append(text)
        elif (place := draw.randrange(number + 1)) < most:
            kept[place] = text
    return kept


def _trainable(texts: Iterable[str]) -> Iterator[str]:
    """Those that SentencePiece survives."""
    left_out = 0
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a vocabulary is trained on strings, got {type(text).__name__}")
        short = len(text) * EXPANSION <= LONGEST_WORD  # so are nearly all, and need not be normalised here
        if short or max(map(len, _words(text)), default=0) <= LONGEST_WORD:
            yield text
        else:
            left_out += 1
    if left_out:
        _log.warning("%d texts have a word of over %d characters: left out of the vocabulary", left_out, LONGEST_WORD)


def _words(text: str) -> list[str]:
    """What SentencePiece finds between spaces, of which it knows more and others than Python."""
    try:
        normal: str = _normalizer().normalize(text)
    except RuntimeError as error:
        raise ValueError(f"not text that can be encoded, as half a surrogate pair is not: {text!r:.100}") from error
    return [word for word in normal.split(" ") if word]


@cache
def _normalizer() -> Any:
    return sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")


def save_vocabularies(folder: Path, source: Vocabulary, target: Vocabulary) -> None:
    """Beside a corpus or a model: one file if they are the same, else two."""
    shared = source.fingerprint == target.fingerprint
    files = {SHARED: source} if shared else {SOURCE: source, TARGET: target}
    for name in (SHARED, SOURCE, TARGET):
        if name in files:
            files[name].save(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def load_vocabularies(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """What `save_vocabularies` wrote."""
    check_sealed(folder, SHARED, SOURCE, TARGET)
    if (folder / SHARED).is_file():
        shared = Vocabulary.load(folder / SHARED)
        return shared, shared
    for name in (SOURCE, TARGET):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {SHARED}, nor both of {SOURCE} and {TARGET}")
    return Vocabulary.load(folder / SOURCE), Vocabulary.load(folder / TARGET)
