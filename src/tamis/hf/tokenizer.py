"""Our vocabularies as a tokenizer of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizer

from tamis.data.vocabulary import SHARED, SOURCE, TARGET, Vocabulary, load_vocabularies, save_vocabularies
from tamis.hf.remote import MODULE, OurCode, write_module


class VocabularyTokenizer(OurCode, PreTrainedTokenizer):
    """The vocabulary of what is read, and of what is written where that is another.

    Args:
        append_eos: end every text with eos, as translation models read and write them.
        prepend_bos: begin it with bos, as language models are prompted.

    Markers of the vocabulary that are spelled out in a text, such as "</s>", are text.
    """

    vocab_files_names = {"shared_file": SHARED, "source_file": SOURCE, "target_file": TARGET}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        shared_file: str | None = None,
        source_file: str | None = None,
        target_file: str | None = None,
        append_eos: bool = False,
        prepend_bos: bool = False,
        **kwargs: Any,
    ) -> None:
        found = [Path(name) for name in (shared_file, source_file, target_file) if name is not None]
        if not found:
            raise FileNotFoundError(f"a tokenizer of tamis needs {SHARED}, or both of {SOURCE} and {TARGET}")
        self._source, self._target = load_vocabularies(found[0].parent)
        self._current = self._source
        self.append_eos, self.prepend_bos = append_eos, prepend_bos
        for name, number in self._target.specials.items():
            if number >= 0:
                kwargs[f"{name}_token"] = self._target.pieces([number])[0]
        kwargs["split_special_tokens"] = True
        kwargs["auto_map"] = {"AutoTokenizer": [f"{MODULE}.{type(self).__name__}", None]}
        kwargs.setdefault("padding_side", "left" if prepend_bos else "right")
        super().__init__(append_eos=append_eos, prepend_bos=prepend_bos, **kwargs)

    @classmethod
    def of(cls, source: Vocabulary, target: Vocabulary, **kwargs: Any) -> Self:
        """A tokenizer of vocabularies that are in memory."""
        with tempfile.TemporaryDirectory() as scratch:
            save_vocabularies(Path(scratch), source, target)
            files: dict[str, Any] = {key: str(Path(scratch, name)) for key, name in cls.vocab_files_names.items()}
            there: dict[str, Any] = {key: file for key, file in files.items() if Path(file).is_file()}
            return cls(**there, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._current)

    def get_vocab(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self._current.pieces(range(len(self._current))))}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self._current.pieces(self._current.encode(text))

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers().get(token, self._current.unk_id)

    def _convert_id_to_token(self, index: int) -> str:
        return self._target.pieces([index])[0]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        numbers = self._numbers(self._target)
        return self._target.decode(numbers.get(token, self._target.unk_id) for token in tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        begin = [self._current.bos_id] if self.prepend_bos else []
        end = [self._current.eos_id] if self.append_eos else []
        return [*begin, *token_ids_0, *(token_ids_1 or ()), *end]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        folder = Path(save_directory)
        write_module(folder)
        save_vocabularies(folder, self._source, self._target)
        return tuple(str(folder / name) for name in self.vocab_files_names.values() if (folder / name).is_file())

    def _switch_to_input_mode(self) -> None:
        self._current = self._source

    def _switch_to_target_mode(self) -> None:
        self._current = self._target

    def _numbers(self, vocabulary: Vocabulary | None = None) -> dict[str, int]:
        """The number of each piece, looked up once for each vocabulary."""
        vocabulary = self._current if vocabulary is None else vocabulary
        known: dict[str, dict[str, int]] = self.__dict__.setdefault("_by_piece", {})
        if vocabulary.fingerprint not in known:
            pieces = vocabulary.pieces(range(len(vocabulary)))
            known[vocabulary.fingerprint] = {piece: number for number, piece in reversed(list(enumerate(pieces)))}
        return known[vocabulary.fingerprint]
