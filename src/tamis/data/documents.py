"""Documents, for language models: reading them, and their indexed form.

A document is some lines of text.  They are encoded one by one and put end to end: a line break is a space to the model,
as SentencePiece has it for all white space.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tamis.data.indexed import Ids, IndexedCorpus, Report, Writer, build_split
from tamis.data.text import (
    BadLine,
    grammar_examples,
    hugging_face,
    json_lines,
    raw_lines,
    text_under,
    unpacked_suffix,
)
from tamis.data.vocabulary import Vocabulary
from tamis.files import check_file

DIVISIONS = ("file", "blank", "line")
START = "start:"
GRAMMAR_SENTENCES = 8
"""Sentences of the embedded grammar in a document."""
LONGEST_ROW = 1 << 28  # bytes of a line of JSON: a long novel has two million
CHUNK = 8192  # lines encoded at a time
EMPTY = "empty document"
ELSEWHERE = ("hf:", "grammar:")
"""Texts that are no files."""

TextSpec = str | Sequence[str]


class Document(NamedTuple):
    """Some lines."""

    number: int
    """Counted from 1, over all files."""
    lines: list[str]


def check_division(division: object) -> str:
    """How plain text is divided: a name, or "start:REGEX"."""
    if isinstance(division, str) and division.startswith(START):
        try:
            re.compile(division.removeprefix(START))
        except re.error as error:
            raise ValueError(f"documents = {division!r} holds no regular expression: {error}") from error
    elif division not in DIVISIONS:
        names = ", ".join(f'"{name}"' for name in DIVISIONS)
        raise ValueError(f'documents must be one of {names} or "{START}REGEX", got {division!r}')
    return str(division)


def text_files(spec: TextSpec) -> list[str | Path]:
    """What a specification names, patterns and folders replaced by their files in order; an error where nothing is."""
    found: list[str | Path] = []
    for name in [spec] if isinstance(spec, str) else spec:
        if name.startswith(ELSEWHERE):
            found.append(name)
        elif Path(name).is_dir():
            inside = sorted(path for path in Path(name).iterdir() if path.is_file() and not path.name.startswith("."))
            found += _some(inside, f"the folder {name} holds no files")
        elif glob.has_magic(name) and not Path(name).exists():
            matching = sorted(path for path in map(Path, glob.glob(name, recursive=True)) if path.is_file())
            found += _some(matching, f"no file matches {name}")
        else:
            found.append(check_file(name))
    return _some(found, "a text is a path or some, got none")


def _some(found: list[Any], otherwise: str) -> list[Any]:
    if not found:
        raise FileNotFoundError(otherwise)
    return found


def read_documents(spec: TextSpec, division: str = "file", key: str = "text") -> Iterator[Document | BadLine]:
    """Documents in order.  A line that cannot be read is left out of its document and comes as a BadLine.

    `spec` is one of these, or a list of them:
      * a path, a folder or a pattern such as "novels/*.txt": plain text, divided into documents as `division` says:
        "file" (each file is one), "blank" (blank lines stand between them), "line" (each line is one) or
        "start:REGEX" (a line in which the expression is found begins one);
      * a path named *.jsonl: an object per line with a text under `key`;
      * "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT": rows like those of *.jsonl, by the package `datasets`;
      * "grammar:SPLIT:COUNT" or "grammar:SPLIT:COUNT:SEED": English sentences of the embedded corpus, some to each.
    Files may be packed: *.gz, *.xz.
    """
    files = text_files(spec)
    return _numbered(files, check_division(division), key)


def _numbered(files: Iterable[str | Path], division: str, key: str) -> Iterator[Document | BadLine]:
    number = 0
    for item in itertools.chain.from_iterable(_of_file(file, division, key) for file in files):
        if isinstance(item, BadLine):
            yield item
        else:
            number += 1
            yield Document(number, item)


def _of_file(file: str | Path, division: str, key: str) -> Iterator[list[str] | BadLine]:
    if isinstance(file, str) and file.startswith("grammar:"):
        sentences = [example.source_text for example in grammar_examples(file)]
        for start in range(0, len(sentences), GRAMMAR_SENTENCES):
            yield sentences[start : start + GRAMMAR_SENTENCES]
    elif isinstance(file, str) and file.startswith("hf:"):
        yield from _rows(hugging_face(file), key, file)
    elif unpacked_suffix(Path(file)) == ".jsonl":
        yield from _rows(json_lines(Path(file), LONGEST_ROW), key, str(file))
    else:
        yield from _divided(Path(file), division)


def _rows(rows: Iterable[Any], key: str, name: str) -> Iterator[list[str] | BadLine]:
    for number, row in enumerate(rows, 1):
        text = row if isinstance(row, BadLine) else text_under(key, row, number)
        yield text._replace(reason=f"{name}: {text.reason}") if isinstance(text, BadLine) else text.split("\n")


def _divided(path: Path, division: str) -> Iterator[list[str] | BadLine]:
    """The documents of a plain file."""
    begins = re.compile(division.removeprefix(START)).search if division.startswith(START) else None
    lines: list[str] = []
    for line in raw_lines(path):
        if isinstance(line, BadLine):
            yield line._replace(reason=f"{path}: {line.reason}")
            continue
        between = division == "line" or (division == "blank" and not line.strip())
        if lines and (between or (begins is not None and begins(line))):
            yield lines
            lines = []
        if line.strip() or (lines and division != "blank"):  # no document begins with a blank line
            lines.append(line)
    if lines:
        yield lines


def build_documents(
    documents: Iterable[Document | BadLine],
    folder: str | Path,
    split: str,
    vocabulary: Vocabulary,
    *,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Encode documents into a split of the corpus in `folder`; as `tamis.data.build_corpus` does with pairs."""

    def fill(writer: Writer) -> dict[str, Any]:
        chunk: list[Document] = []
        size = 0
        for item in documents:
            if isinstance(item, BadLine):
                writer.skip(item.line, item.reason)
                continue
            chunk.append(item)
            size += len(item.lines)
            if size >= CHUNK:
                _encode(chunk, vocabulary, writer)
                chunk, size = [], 0
                if progress is not None:
                    progress(writer.read)
        _encode(chunk, vocabulary, writer)
        return {"format": DocumentCorpus.FORMAT, "vocabulary": vocabulary.fingerprint}

    return build_split(folder, split, len(vocabulary), DocumentCorpus.ITEMS, fill)


def _encode(chunk: list[Document], vocabulary: Vocabulary, writer: Writer) -> None:
    encoded = iter(vocabulary.encode_batch([line for document in chunk for line in document.lines]))
    pieces: list[Ids] = []
    numbers: list[int] = []
    for document in chunk:
        writer.read += 1
        ids = list(itertools.islice(encoded, len(document.lines)))
        if any(len(line) for line in ids):
            pieces.append(np.concatenate(ids))
            numbers.append(document.number)
        else:
            writer.skip(document.number, EMPTY)
    if numbers:
        writer.write(pieces, numbers)


class DocumentCorpus(IndexedCorpus):
    """The subword ids of documents, mapped into memory.  `lines` are their numbers."""

    FORMAT: ClassVar[str] = "tamis document corpus"
    ITEMS: ClassVar[str] = "documents"
    PIECES: ClassVar[int] = 1
    VOCABULARIES: ClassVar[tuple[str, ...]] = ("vocabulary",)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the documents, in subwords."""
        return np.diff(self._offsets)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        start = self._first_piece(index)
        begin, end = self._offsets[start : start + 2]
        return self._tokens[begin:end]
