"""Parallel text from files, Hugging Face datasets and the embedded grammar, line by line.

Only \\n ends a line (\\r\\n is accepted); U+2028 and its like are ordinary characters.  Each line is decoded by itself
as strict UTF-8, so that one bad line costs one line, and that line is reported.  Nothing is held but the current line.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tamis.files import PACKED, check_file, open_binary

if TYPE_CHECKING:
    from tamis.data.grammar import Example

LONGEST_LINE = 1 << 20  # bytes; whatever is longer is not a sentence, and need not be held in memory

NOT_UTF8 = "invalid UTF-8"


class Pair(NamedTuple):
    """Two sides of one line."""

    line: int
    """Counted from 1."""
    source: str
    target: str


class BadLine(NamedTuple):
    """A line that could not be read, and why."""

    line: int
    reason: str


Spec = str | Path | Sequence[str | Path]


def read_pairs(
    spec: Spec, source_language: str = "source", target_language: str = "target"
) -> Iterator[Pair | BadLine]:
    """Read pairs of text, in order; every line comes out as a Pair or a BadLine.

    `spec` is one of

    - two paths: line n of one belongs to line n of the other, and unequal numbers of lines are an error;
    - one path named ``*.tsv``: the first two columns, neither header nor quoting;
    - one path named ``*.jsonl``: an object per line with a text under each language, or such an object under the key
      "translation";
    - "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT": rows like those of ``*.jsonl``, by the package `datasets`;
    - "grammar:SPLIT:COUNT" or "grammar:SPLIT:COUNT:SEED": the embedded corpus.

    Files may be packed: ``*.gz``, ``*.xz``.

    Args:
        source_language, target_language: keys of the two sides.

    Returns:
        pairs, one at a time.
    """
    languages = (source_language, target_language)
    if not isinstance(spec, str | Path):
        if len(spec) == 2:
            return _two_files(check_file(spec[0]), check_file(spec[1]))
        if len(spec) != 1:
            raise ValueError(f"parallel text is one path or two, got {len(spec)}: {list(map(str, spec))}")
        spec = spec[0]
    if isinstance(spec, str) and spec.startswith("hf:"):
        return _rows(hugging_face(spec), languages)
    if isinstance(spec, str) and spec.startswith("grammar:"):
        examples = enumerate(grammar_examples(spec), 1)
        return (Pair(number, example.source_text, example.target_text) for number, example in examples)
    path = Path(spec)
    suffix = unpacked_suffix(path)
    if suffix == ".tsv":
        return _tsv(check_file(path))
    if suffix == ".jsonl":
        return _rows(json_lines(check_file(path)), languages)
    raise ValueError(
        f"one file of parallel text is named *.tsv or *.jsonl (also .gz, .xz); plain text takes two: {path}"
    )


def unpacked_suffix(path: Path) -> str:
    """How a file's name ends, without that of its packing."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def read_lines(path: str | Path) -> Iterator[str]:
    """Read the lines of one file; a line that cannot be read is an error that says where it stands.

    Args:
        path: plain, ``*.gz`` or ``*.xz``.

    Returns:
        lines, one at a time.
    """
    with open_binary(path) as file:
        yield from decode_lines(file, str(path))


def decode_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a stream of bytes, read as files are; `name` is what an error calls it."""
    for line in _decoded(stream):
        if isinstance(line, BadLine):
            raise ValueError(f"{name}, line {line.line}: {line.reason}")
        yield line


def raw_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[str | BadLine]:
    """The lines of a file without their ends; one of more than `longest` bytes is a bad one."""
    with open_binary(path) as file:
        yield from _decoded(file, longest)


def _decoded(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[str | BadLine]:
    for number in itertools.count(1):
        raw = file.readline(longest)
        if not raw:
            return
        if len(raw) == longest and not raw.endswith(b"\n"):
            while (rest := file.readline(longest)) and not rest.endswith(b"\n"):
                pass
            yield BadLine(number, f"line over {longest} bytes")
            continue
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            yield BadLine(number, NOT_UTF8)


def _two_files(source: Path, target: Path) -> Iterator[Pair | BadLine]:
    counts = [0, 0]
    for number, (left, right) in enumerate(itertools.zip_longest(raw_lines(source), raw_lines(target)), 1):
        counts = [counts[0] if left is None else number, counts[1] if right is None else number]
        if left is None or right is None:
            continue  # to know how many lines the longer one has
        if isinstance(left, BadLine):
            yield BadLine(number, f"source: {left.reason}")
        elif isinstance(right, BadLine):
            yield BadLine(number, f"target: {right.reason}")
        else:
            yield Pair(number, left, right)
    if counts[0] != counts[1]:
        raise ValueError(f"{source} has {counts[0]} lines and {target} has {counts[1]}: they must have the same number")


def _tsv(path: Path) -> Iterator[Pair | BadLine]:
    for number, line in enumerate(raw_lines(path), 1):
        if isinstance(line, BadLine):
            yield line
            continue
        columns = line.split("\t")
        yield Pair(number, columns[0], columns[1]) if len(columns) > 1 else BadLine(number, "fewer than two columns")


def json_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[Any]:
    """A value per line; a BadLine for what is not JSON."""
    for number, line in enumerate(raw_lines(path, longest), 1):
        if isinstance(line, BadLine):
            yield line
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield BadLine(number, "not JSON")


def _rows(rows: Iterable[Any], languages: tuple[str, str]) -> Iterator[Pair | BadLine]:
    for number, row in enumerate(rows, 1):
        yield row if isinstance(row, BadLine) else _row(number, row, languages)


def _row(number: int, row: Any, languages: tuple[str, str]) -> Pair | BadLine:
    if isinstance(row, Mapping) and isinstance(row.get("translation"), Mapping):
        row = row["translation"]
    texts = []
    for language in languages:
        text = text_under(language, row, number)
        if isinstance(text, BadLine):
            return text
        texts.append(text)
    return Pair(number, *texts)


def text_under(key: str, row: Any, number: int) -> str | BadLine:
    """What a row of JSON or of a dataset has under a key, if that is text."""
    text = row.get(key) if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        return BadLine(number, f"no text under {key!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        return BadLine(number, NOT_UTF8)
    return text


def hugging_face(spec: str) -> Iterable[Any]:
    """The rows of a dataset: "hf:NAME:SPLIT"."""
    parts = spec.removeprefix("hf:").split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"a dataset is named hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, got {spec!r}")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(f"{spec} needs the package `datasets`: pip install datasets") from error
    return datasets.load_dataset(*parts[:-1], split=parts[-1], streaming=True)


def grammar_examples(spec: str) -> list[Example]:
    """Sentence pairs of the embedded grammar, with their gold links, by the name that `read_pairs` takes."""
    from tamis.data.grammar import generate

    parts = spec.split(":")[1:]
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts[1:]):
        raise ValueError(f"the embedded corpus is named grammar:SPLIT:COUNT or grammar:SPLIT:COUNT:SEED, got {spec!r}")
    return generate(int(parts[1]), parts[0], *map(int, parts[2:]))
