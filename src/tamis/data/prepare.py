"""From text files to vocabularies and an indexed corpus, once."""

from __future__ import annotations

import fcntl
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tamis.data.alphabet import COVERED, LARGE, SAMPLED, alphabet_size, count_characters, scripts_differ
from tamis.data.corpus import Limits, ParallelCorpus, build_corpus
from tamis.data.documents import (
    ELSEWHERE,
    Document,
    DocumentCorpus,
    build_documents,
    check_division,
    read_documents,
    text_files,
)
from tamis.data.indexed import IndexedCorpus
from tamis.data.text import BadLine, Pair, read_pairs
from tamis.data.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from tamis.files import check_file, write_json
from tamis.settings import (
    Config,
    at_least,
    choose,
    numbers,
    optional_booleans,
    optional_shares,
    optional_strings,
    shares,
    strings,
)

PREPARED = "prepared.json"
LOCK = ".prepare.lock"
"""Not the lock of a run: a run may keep its data in its own folder, and prepares them while it holds that."""
Say = Callable[[str], None]
Track = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows how far some work is: what it is, how much there is if that is known, and then how much is done."""
P = TypeVar("P", bound="_Prepared")
T = TypeVar("T")
SMALL = 500
"""A vocabulary below this is one to try something out: nobody is warned of its pieces."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Where the text is.

    A text is two plain files (also .gz and .xz), one .tsv or .jsonl, "hf:NAME:SPLIT", or "grammar:SPLIT:COUNT".
    """

    train: str | list[str]
    """What is learned from."""
    valid: str | list[str]
    """By which the best checkpoint is chosen."""
    test: str | list[str] | None = None
    """For `tamis evaluate`; every line of it must be whole."""
    gold: str | None = None
    """Gold word alignments for `tamis evaluate`: a TSV of source words, target words and links, or
    "grammar:SPLIT:COUNT"."""
    source_language: str = "source"
    """A key of JSONL and of datasets; of the languages."""
    target_language: str = "target"
    """The same of the target."""
    folder: str | None = None
    """Where the indexed form is kept; by default data/NAME."""
    max_length: int = 256
    """Subwords of a sentence, with its end; longer pairs are left out and reported."""
    max_ratio: float = 4.0
    """The largest ratio of the two lengths; pairs beyond are left out and reported."""

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
class TextConfig(Config):
    """Where the documents of a language model are, and what it reads at a time.

    A text is a file, a folder, a pattern such as "novels/*.txt" or a list of these: plain text or .jsonl, also .gz and
    .xz; or "hf:NAME:SPLIT", or "grammar:SPLIT:COUNT".
    """

    train: str | list[str]
    """What is learned from."""
    valid: str | list[str]
    """By which the best checkpoint is chosen."""
    test: str | list[str] | None = None
    """For `tamis evaluate`."""
    documents: str = "file"
    """How plain text is divided: "file" (each file is a document), "blank" (blank lines stand between documents),
    "line" (each line is one), or "start:REGEX" (a line in which that is found begins one)."""
    key: str = "text"
    """Key of the text, in JSONL and in datasets."""
    folder: str | None = None
    """Where the indexed form is kept; by default data/NAME."""
    length: int = 512
    """Tokens of a row: documents are put end to end and cut into rows, and see only themselves."""
    passkey_share: float = 0.0
    """Share of rows that hold, instead of text, a number to remember; see `tamis.data.passkey`."""
    passkey_digits: int = 5
    """Digits of that number."""

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test"):
            text = getattr(self, name)
            listed = isinstance(text, list) and text and all(isinstance(path, str) for path in text)
            if not isinstance(text, str) and not listed and not (text is None and name == "test"):
                raise ValueError(f"{name} must be a string or a list of some, got {text!r}")
        strings(self, "key")
        optional_strings(self, "folder")
        check_division(self.documents)
        at_least(self, 2, "length")
        at_least(self, 1, "passkey_digits")
        shares(self, "passkey_share")
        if self.passkey_share > 0.9:
            raise ValueError(f"passkey_share must leave room for text, at most 0.9, got {self.passkey_share}")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(Config):
    """SentencePiece, trained on the training text or brought along."""

    size: int = 8000
    """Pieces, special ones included; of each language where they have vocabularies of their own."""
    kind: str = "unigram"
    """Or "bpe"."""
    shared: bool | None = None
    """One vocabulary for both languages.  None: one, unless they are written in different scripts."""
    character_coverage: float | None = None
    """Share of the characters of the training text that get pieces of their own.  None: all, or 0.9995 where the
    alphabet is as large as the Chinese or Japanese one."""
    byte_fallback: bool | None = None
    """Spell unknown characters as bytes.  None: where the alphabet is that large."""
    model: str | None = None
    """A SentencePiece model for both languages, instead of training one."""
    source_model: str | None = None
    """A SentencePiece model for each language: this,"""
    target_model: str | None = None
    """and this."""

    def __post_init__(self) -> None:
        at_least(self, 8, "size", largest=1 << 24)  # no text fills more, and SentencePiece takes minutes to say so
        choose("kind", self.kind, ("unigram", "bpe"))
        optional_shares(self, "character_coverage")
        optional_booleans(self, "shared", "byte_fallback")
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

    def contents(self) -> list[tuple[str, str]]:
        """How much there is, in a few lines."""
        source, target = self.source_vocabulary, self.target_vocabulary
        one = f"{len(source):,} subwords of both languages"
        rows = [
            ("vocabulary", one if source is target else f"{len(source):,} source and {len(target):,} target subwords")
        ]
        for split in ("train", "valid"):
            corpus = self.corpus(split)
            tokens = f"{corpus.source_lengths.sum():,} source and {corpus.target_lengths.sum():,} target subwords"
            rows.append((split, f"{len(corpus):,} pairs, {tokens}"))
        return rows


@dataclass(frozen=True)
class PreparedText:
    """What `prepare_text` left in a folder."""

    folder: Path
    vocabulary: Vocabulary

    def corpus(self, split: str) -> DocumentCorpus:
        """A split, if it was encoded with this vocabulary."""
        corpus = DocumentCorpus.open(self.folder, split)
        corpus.check_fingerprints(self.vocabulary.fingerprint)
        return corpus

    def contents(self) -> list[tuple[str, str]]:
        """How much there is, in a few lines."""
        rows = [("vocabulary", f"{len(self.vocabulary):,} subwords")]
        for split in ("train", "valid"):
            corpus = self.corpus(split)
            rows.append((split, f"{len(corpus):,} documents, {corpus.lengths.sum():,} subwords"))
        return rows


class _Prepared(Protocol):
    def corpus(self, split: str) -> IndexedCorpus: ...


@contextmanager
def untracked(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda done: None


def prepare(
    data: DataConfig, vocabulary: VocabularyConfig, folder: Path, say: Say = print, track: Track = untracked
) -> Prepared:
    """Build vocabularies and corpora, or use what an earlier call built from the same files and settings.

    What was damaged since is built again.  Of many calls at the same time one builds, and the others wait for it.
    """
    texts = [data.train, data.valid]
    files = [path for text in texts for path in ([text] if isinstance(text, str) else text)]

    def build() -> None:
        texts = {"train": _pairs(data.train, data), "valid": _pairs(data.valid, data)}
        vocabularies = _vocabularies(texts["train"], vocabulary, say)
        save_vocabularies(folder, *vocabularies)
        limits = Limits(max_length=data.max_length, max_ratio=data.max_ratio)
        for split, pairs in texts.items():
            with track(f"encoding {split}", pairs.total) as advance:
                report = build_corpus(pairs.read(), folder, split, *vocabularies, limits, progress=advance)
            say(f"{split}: {report.describe()}")

    return _built_once(
        folder,
        _description(data, vocabulary, files, unused=("test", "gold", "folder")),
        lambda: Prepared(folder, *load_vocabularies(folder)),
        lambda: _check_files(data, vocabulary),
        build,
        say,
    )


def prepare_text(
    text: TextConfig, vocabulary: VocabularyConfig, folder: Path, say: Say = print, track: Track = untracked
) -> PreparedText:
    """The same for the documents of a language model."""
    if vocabulary.shared is False or vocabulary.source_model is not None:
        raise ValueError("a language model has one vocabulary: set neither shared = false nor a source_model")

    def build() -> None:
        texts = {"train": _documents(text.train, text), "valid": _documents(text.valid, text)}
        found = _text_vocabulary(texts["train"], vocabulary, say)
        save_vocabularies(folder, found, found)
        for split, documents in texts.items():
            with track(f"encoding {split}", documents.total) as advance:
                report = build_documents(documents.read(), folder, split, found, progress=advance)
            say(f"{split}: {report.describe()}")

    files = [*text_files(text.train), *text_files(text.valid)]
    return _built_once(
        folder,
        _description(text, vocabulary, files, unused=("test", "folder", "length", "passkey_share", "passkey_digits")),
        lambda: PreparedText(folder, load_vocabularies(folder)[0]),
        lambda: _check_models(vocabulary),
        build,
        say,
    )


def _built_once(
    folder: Path,
    wanted: dict[str, Any],
    opened: Callable[[], P],
    check: Callable[[], None],
    build: Callable[[], None],
    say: Say,
) -> P:
    found = _find(folder, wanted, opened, say)
    if found is not None:
        return found
    check()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / LOCK):
        if _find(folder, wanted, opened, say=lambda text: None) is None:  # nobody else has built it meanwhile
            (folder / PREPARED).unlink(missing_ok=True)  # from here on it is not what it says
            build()
            write_json(folder / PREPARED, wanted, indent=1)
        return opened()


def _find(folder: Path, wanted: dict[str, Any], opened: Callable[[], P], say: Say) -> P | None:
    """What an earlier call left, if it is what is wanted and whole."""
    try:
        if json.loads((folder / PREPARED).read_text(encoding="utf-8")) != wanted:
            return None
    except (OSError, ValueError, RecursionError):
        return None
    try:
        prepared = opened()
        for split in ("train", "valid"):
            prepared.corpus(split).verify()
    except (OSError, ValueError) as error:
        say(f"{folder} is damaged and is built again: {error}")
        return None
    return prepared


def _check_files(data: DataConfig, vocabulary: VocabularyConfig) -> None:
    """Raise before anything is thrown away, if there is nothing to build it from."""
    for text in (data.train, data.valid):
        if not isinstance(text, str) or not text.startswith(ELSEWHERE):
            read_pairs(text)  # which looks at the names, and is not read from
    _check_models(vocabulary)


def _check_models(vocabulary: VocabularyConfig) -> None:
    for model in (vocabulary.model, vocabulary.source_model, vocabulary.target_model):
        if model is not None:
            check_file(model)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes and threads; those that come later wait.  The lock ends with its process."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _vocabularies(pairs: _Passes[Pair], config: VocabularyConfig, say: Say) -> tuple[Vocabulary, Vocabulary]:
    if config.source_model is not None and config.target_model is not None:
        return Vocabulary.load(config.source_model), Vocabulary.load(config.target_model)
    if config.model is not None:
        one = Vocabulary.load(config.model)
        return one, one
    pairs.check()
    some = list(itertools.islice(pairs, SAMPLED))
    source, target = count_characters(pair.source for pair in some), count_characters(pair.target for pair in some)
    shared = config.shared
    if shared is None:
        shared = not scripts_differ(source, target)
        if not shared:
            say("the languages are written in different scripts: each has a vocabulary of its own (vocabulary.shared)")
    if shared:
        one = _train(config, (side for pair in pairs for side in pair[1:]), source + target, "", say)
        return one, one
    return (
        _train(config, (pair.source for pair in pairs), source, " of the source language", say),
        _train(config, (pair.target for pair in pairs), target, " of the target language", say),
    )


def _text_vocabulary(documents: _Passes[Document], config: VocabularyConfig, say: Say) -> Vocabulary:
    if config.model is not None:
        return Vocabulary.load(config.model)

    documents.check()

    def lines() -> Iterator[str]:
        return (line for document in documents for line in document.lines)

    return _train(config, lines(), count_characters(lines()), "", say)


def _train(config: VocabularyConfig, texts: Iterator[str], counts: Counter[str], of: str, say: Say) -> Vocabulary:
    """A vocabulary of texts with these characters; settings that nobody made follow from them."""
    coverage, fallback = config.character_coverage, config.byte_fallback
    large = alphabet_size(counts) > LARGE
    if large and (coverage is None or fallback is None):
        say(
            f"the text{of} takes {alphabet_size(counts):,} characters: by default rare ones are spelled in bytes "
            f"(vocabulary.character_coverage = {COVERED}, byte_fallback = true)"
        )
    coverage = (COVERED if large else 1.0) if coverage is None else coverage
    fallback = large if fallback is None else fallback
    say(f"learning a vocabulary of {config.size} subwords{of}")
    found = Vocabulary.train(texts, config.size, kind=config.kind, character_coverage=coverage, byte_fallback=fallback)
    single, learned = found.single_characters()
    if 2 * single > learned and config.size >= SMALL:
        say(
            f"warning: {single:,} of the {learned:,} pieces{of} are single characters, so sentences become long: "
            f"raise vocabulary.size = {config.size}, or lower vocabulary.character_coverage = {coverage:g}"
            + ("" if fallback else " with byte_fallback = true")
        )
    return found


class _Passes(Generic[T]):
    """What can be used of a text, as often as one goes through it; `total` is all of it, once somebody did."""

    def __init__(self, named: str | list[str], read: Callable[[], Iterator[T | BadLine]]) -> None:
        self.named, self.read = named, read
        self.total: int | None = None

    def __iter__(self) -> Iterator[T]:
        count = 0
        for count, item in enumerate(self.read(), 1):  # noqa: B007
            if not isinstance(item, BadLine):
                yield item
        self.total = count

    def check(self) -> None:
        """Raise if nothing in it can be read, with the reasons."""
        counts: Counter[str] = Counter()
        lines: dict[str, int] = {}
        for item in self.read():
            if not isinstance(item, BadLine):
                return
            counts[item.reason] += 1
            lines.setdefault(item.reason, item.line)
        reasons = "; ".join(f"{count:,} times {why}, in line {lines[why]} first" for why, count in counts.items())
        raise ValueError(f"no line of {self.named} can be read: {reasons or 'it is empty'}")


def _pairs(text: str | list[str], data: DataConfig) -> _Passes[Pair]:
    return _Passes(text, lambda: read_pairs(text, data.source_language, data.target_language))


def _documents(named: str | list[str], text: TextConfig) -> _Passes[Document]:
    return _Passes(named, lambda: read_documents(named, text.documents, text.key))


def _description(
    data: Config, vocabulary: VocabularyConfig, names: Sequence[str | Path], unused: Sequence[str]
) -> dict[str, Any]:
    """What the prepared folder depends on: settings, and the files by size and date."""
    models = (vocabulary.model, vocabulary.source_model, vocabulary.target_model)
    paths = [str(name) for name in (*names, *models) if name is not None]
    files = {path: [Path(path).stat().st_size, Path(path).stat().st_mtime_ns] for path in paths if Path(path).is_file()}
    settings = {name: value for name, value in data.to_dict().items() if name not in unused}
    return {"version": 1, "data": settings, "vocabulary": vocabulary.to_dict(), "files": files}
