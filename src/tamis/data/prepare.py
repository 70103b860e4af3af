"""From text files to vocabularies and an indexed corpus, once."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tamis.data.corpus import Limits, ParallelCorpus, Report, build_corpus
from tamis.data.files import check_file, replacing
from tamis.data.text import BadLine, Pair, read_pairs
from tamis.data.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from tamis.mechanisms.checks import choose
from tamis.models.pretrained import Config, at_least, booleans, numbers, optional_strings, shares, strings

PREPARED = "prepared.json"
LOCK = ".prepare.lock"
"""Not the lock of a run: a run may keep its data in its own folder, and prepares them while it holds that."""
CHUNK = 1 << 16  # pairs whose ids are looked at together
ELSEWHERE = ("hf:", "grammar:")
"""Texts that are no files."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Where the text is.

    A text is two plain files (also .gz and .xz), one .tsv or .jsonl, "hf:NAME:SPLIT", or "grammar:SPLIT:COUNT".
    """

    train: str | list[str]
    valid: str | list[str]
    test: str | list[str] | None = None
    gold: str | None = None
    """Gold word alignments for `tamis evaluate`: a TSV of source words, target words and links, or
    "grammar:SPLIT:COUNT"."""
    source_language: str = "source"
    """A key of JSONL and of datasets; of the languages."""
    target_language: str = "target"
    folder: str | None = None
    """Where the indexed form is kept; by default data/NAME."""
    max_length: int = 256
    """Subwords of a sentence, with its end; longer pairs are left out and reported."""
    max_ratio: float = 4.0
    """Of the two lengths; pairs beyond are left out and reported."""

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test"):
            _check_text(name, getattr(self, name), optional=name == "test")
        strings(self, "source_language", "target_language")
        optional_strings(self, "gold", "folder")
        at_least(self, 2, "max_length")
        numbers(self, "max_ratio", above=1.0)


def _check_text(name: str, text: object, optional: bool) -> None:
    if isinstance(text, str) or (optional and text is None):
        return
    if not isinstance(text, list) or len(text) != 2 or not all(isinstance(path, str) for path in text):
        raise ValueError(f"{name} must be a string or a list of two, got {text!r}")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(Config):
    """SentencePiece, trained on the training text or brought along."""

    size: int = 8000
    kind: str = "unigram"
    """Or "bpe"."""
    shared: bool = True
    """One vocabulary for both languages."""
    character_coverage: float = 1.0
    byte_fallback: bool = False
    """Spell unknown characters as bytes."""
    model: str | None = None
    """A SentencePiece model for both languages, instead of training one."""
    source_model: str | None = None
    target_model: str | None = None

    def __post_init__(self) -> None:
        at_least(self, 8, "size")
        choose("kind", self.kind, ("unigram", "bpe"))
        shares(self, "character_coverage")
        booleans(self, "shared", "byte_fallback")
        optional_strings(self, "model", "source_model", "target_model")
        if (self.source_model is None) != (self.target_model is None):
            raise ValueError("source_model and target_model come together")


@dataclass(frozen=True)
class Prepared:
    """What `prepare` left in a folder."""

    folder: Path
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    """The same object as the source's where they share one."""

    def corpus(self, split: str) -> ParallelCorpus:
        """A split, if it was encoded with these vocabularies."""
        corpus = ParallelCorpus.open(self.folder, split)
        corpus.check_vocabularies(self.source_vocabulary, self.target_vocabulary)
        return corpus


def prepare(data: DataConfig, vocabulary: VocabularyConfig, folder: Path, say: Say = print) -> Prepared:
    """Build vocabularies and corpora, or use what an earlier call built from the same files and settings.

    What was damaged since is built again.  Of many calls at the same time one builds, and the others wait for it.
    """
    wanted = _description(data, vocabulary)
    found = _find(folder, wanted, say)
    if found is not None:
        return found
    _check_files(data, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / LOCK):
        if _find(folder, wanted, say=lambda text: None) is None:  # nobody else has built it meanwhile
            _prepare(data, vocabulary, folder, wanted, say)
        return Prepared(folder, *load_vocabularies(folder))


def _find(folder: Path, wanted: dict[str, Any], say: Say) -> Prepared | None:
    """What an earlier call left, if it is what is wanted and whole."""
    try:
        if json.loads((folder / PREPARED).read_text(encoding="utf-8")) != wanted:
            return None
    except (OSError, ValueError, RecursionError):
        return None
    try:
        prepared = Prepared(folder, *load_vocabularies(folder))
        for split in ("train", "valid"):
            _check_ids(prepared.corpus(split), prepared)
    except (OSError, ValueError) as error:
        say(f"{folder} is damaged and is built again: {error}")
        return None
    return prepared


def _check_ids(corpus: ParallelCorpus, prepared: Prepared) -> None:
    """Raise unless every id has a row in the embedding: an index beyond it ends a CUDA process."""
    for start in range(0, len(corpus), CHUNK):
        indices = np.arange(start, min(start + CHUNK, len(corpus)))
        sides = (
            (corpus.sources(indices), prepared.source_vocabulary),
            (corpus.targets(indices), prepared.target_vocabulary),
        )
        for ids, vocabulary in sides:
            if ids.max() >= len(vocabulary):
                raise ValueError(f"{corpus.split} holds the id {ids.max()}, of a vocabulary of {len(vocabulary)}")


def _check_files(data: DataConfig, vocabulary: VocabularyConfig) -> None:
    """Raise before anything is thrown away, if there is nothing to build it from."""
    for text in (data.train, data.valid):
        if not isinstance(text, str) or not text.startswith(ELSEWHERE):
            read_pairs(text)  # which looks at the names, and is not read from
    for model in (vocabulary.model, vocabulary.source_model, vocabulary.target_model):
        if model is not None:
            check_file(model)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes and threads; those that come later wait.  The lock ends with its process."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(data: DataConfig, vocabulary: VocabularyConfig, folder: Path, wanted: dict[str, Any], say: Say) -> None:
    (folder / PREPARED).unlink(missing_ok=True)  # from here on it is not what it says
    vocabularies = _vocabularies(data, vocabulary, say)
    save_vocabularies(folder, *vocabularies)
    for split, text in (("train", data.train), ("valid", data.valid)):
        report = _build(text, data, folder, split, *vocabularies)
        say(f"{split}: {report.describe()}")
    with replacing(folder / PREPARED) as file:
        file.write((json.dumps(wanted, indent=1) + "\n").encode())


def _vocabularies(data: DataConfig, config: VocabularyConfig, say: Say) -> tuple[Vocabulary, Vocabulary]:
    if config.source_model is not None and config.target_model is not None:
        return Vocabulary.load(config.source_model), Vocabulary.load(config.target_model)
    if config.model is not None:
        brought = Vocabulary.load(config.model)
        return brought, brought
    say(f"learning a vocabulary of {config.size} subwords" + ("" if config.shared else " for each language"))
    if config.shared:
        shared = _train(config, (side for pair in _pairs(data) for side in pair[1:]))
        return shared, shared
    return (
        _train(config, (pair.source for pair in _pairs(data))),
        _train(config, (pair.target for pair in _pairs(data))),
    )


def _train(config: VocabularyConfig, texts: Iterator[str]) -> Vocabulary:
    return Vocabulary.train(
        texts,
        config.size,
        kind=config.kind,
        character_coverage=config.character_coverage,
        byte_fallback=config.byte_fallback,
    )


def _pairs(data: DataConfig) -> Iterator[Pair]:
    for pair in read_pairs(data.train, data.source_language, data.target_language):
        if not isinstance(pair, BadLine):
            yield pair


def _build(
    text: str | list[str], data: DataConfig, folder: Path, split: str, source: Vocabulary, target: Vocabulary
) -> Report:
    limits = Limits(max_length=data.max_length, max_ratio=data.max_ratio)
    pairs = read_pairs(text, data.source_language, data.target_language)
    return build_corpus(pairs, folder, split, source, target, limits)


def _description(data: DataConfig, vocabulary: VocabularyConfig) -> dict[str, Any]:
    """What the prepared folder depends on: settings, and the files by size and date."""
    names = [data.train, data.valid, vocabulary.model, vocabulary.source_model, vocabulary.target_model]
    paths = [name for item in names if item is not None for name in ([item] if isinstance(item, str) else item)]
    files = {path: [Path(path).stat().st_size, Path(path).stat().st_mtime_ns] for path in paths if Path(path).is_file()}
    settings = data.to_dict()
    for unused in ("test", "gold", "folder"):
        del settings[unused]
    return {"version": 1, "data": settings, "vocabulary": vocabulary.to_dict(), "files": files}
