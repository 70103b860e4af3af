"""Vocabularies of imported models: what cuts their texts, and their own numbers for the pieces.

One file holds all of it, as JSON: a SentencePiece model with the pieces in the order of the model's embedding, as
Marian has them, or a tokenizer of the library `tokenizers`, as GPT-2 and Llama have them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.data.vocabulary import SPECIAL, Vocabulary, trimmed

VERSION = 1
NONE = -1
"""The number of a special piece that a vocabulary does not have."""


class ImportedVocabulary(Vocabulary):
    """What both kinds share: numbers of special pieces that are the model's own."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._model = json.dumps({"version": VERSION, **content}, ensure_ascii=False, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(self._model).hexdigest()
        specials = content["specials"]
        for name in SPECIAL:
            setattr(self, f"{name}_id", int(specials[name]))
        self._size = int(content["size"])
        if not all(NONE <= number < self._size for number in self.specials.values()):
            raise ValueError(f"special pieces must be among {self._size}, got {self.specials}")
        self._ignored = frozenset((self.pad_id, self.bos_id, self.eos_id))


class PieceVocabulary(ImportedVocabulary):
    """A SentencePiece model, whose pieces have other numbers; what has none is unk.

    A text may begin with the code of a language, ">>fr<<", which is a piece of its own.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        Vocabulary.__init__(self, base64.b64decode(content["model"], validate=True))
        pieces: list[str] = content["pieces"]
        self._names = pieces
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        super().__init__({**content, "size": len(pieces)})
        cut = range(self._processor.vocab_size())
        self._number_of = [self._ids.get(self._processor.id_to_piece(number), self.unk_id) for number in cut]

    def encode(self, text: str) -> list[int]:
        return self._encoded(text)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [self._names[number] for number in self._checked(ids) if number not in self._ignored]
        return self._processor.decode_pieces(kept)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._names[number] for number in self._checked(ids)]

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, skipped = self._encoded(text)
        own, spans = super().spans(text[skipped:])
        moved = [(begin + skipped, end + skipped) for begin, end in spans]
        return ids, [(0, skipped)] * (len(ids) - len(own)) + moved

    def _encoded(self, text: str) -> tuple[list[int], int]:
        """The ids, and how many characters the code of a language takes."""
        skipped = 0
        if isinstance(text, str) and text.startswith(">>") and (end := text.find("<<")) > 0:
            skipped = end + 2
        begin = [self._ids.get(text[:skipped], self.unk_id)] if skipped else []
        rest = text[skipped:] if skipped else text
        return [*begin, *(self._number_of[number] for number in self._encode(rest, int))], skipped


class TokenizersVocabulary(ImportedVocabulary):
    """A tokenizer of the library `tokenizers`.  Special pieces that are spelled out in a text are text."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("this vocabulary needs the library tokenizers: pip install 'tamis[hf]'") from error
        super().__init__(content)
        try:
            self._tokenizer: Any = Tokenizer.from_str(content["tokenizer"])
        except Exception as error:  # the library has no class of its own for what it cannot read
            raise ValueError(f"not a tokenizer: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._read(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        try:
            found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"not texts that can be encoded: {error}") from error
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [number for number in self._checked(ids) if number not in self._ignored]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._tokenizer.id_to_token(number) or f"<unused {number}>" for number in self._checked(ids)]

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._read(text)
        return found.ids, [trimmed(text, begin, end) for begin, end in found.offsets]

    def _read(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"not text that can be encoded: {text!r:.100}") from error


KINDS: dict[str, type[ImportedVocabulary]] = {"sentencepiece": PieceVocabulary, "tokenizers": TokenizersVocabulary}


def read_imported(model: bytes) -> ImportedVocabulary:
    """The vocabulary of a file that begins as JSON does."""
    try:
        content = json.loads(model)
        if content.pop("version") != VERSION:
            raise ValueError(f"its version must be {VERSION}: update tamis")
        return KINDS[content["kind"]](content)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, ValueError) as error:
        raise ValueError(f"not the vocabulary of an imported model: {error!r:.200}") from error
