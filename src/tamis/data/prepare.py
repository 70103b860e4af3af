"""From text files to vocabularies and an indexed corpus, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.data.corpus import Limits, ParallelCorpus, Report, build_corpus
from tamis.data.files import replacing
from tamis.data.text import BadLine, Pair, read_pairs
from tamis.data.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from tamis.mechanisms.checks import choose
from tamis.models.pretrained import Config, at_least, numbers, shares

PREPARED = "prepared.json"

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
    """Gold word alignments for `tamis evaluate`: a TSV of source words, target words and links, or "grammar"."""
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
        at_least(self, 2, "max_length")
        numbers(self, "max_ratio", above=1.0)


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
        return ParallelCorpus.open(self.folder, split)


def prepare(data: DataConfig, vocabulary: VocabularyConfig, folder: Path, say: Say = print) -> Prepared:
    """Build vocabularies and corpora, or use what an earlier call built from the same files and settings."""
    wanted = _description(data, vocabulary)
    try:
        ready = json.loads((folder / PREPARED).read_text()) == wanted
    except (OSError, ValueError):
        ready = False
    if ready:
        return Prepared(folder, *load_vocabularies(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PREPARED).unlink(missing_ok=True)  # from here on it is not what it says
    vocabularies = _vocabularies(data, vocabulary, say)
    save_vocabularies(folder, *vocabularies)
    for split, text in (("train", data.train), ("valid", data.valid)):
        report = _build(text, data, folder, split, *vocabularies)
        say(f"{split}: {report.describe()}")
        if report.kept == 0:
            raise ValueError(f"no pair of {split} is left to use: {report.describe()}")
    with replacing(folder / PREPARED) as file:
        file.write((json.dumps(wanted, indent=1) + "\n").encode())
    return Prepared(folder, *vocabularies)


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
