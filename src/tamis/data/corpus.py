"""Parallel text as subword ids, in files that are mapped into memory.

A split is four files: `{split}.tokens` (the ids of source, target, source, target, ...: a pair lies together),
`{split}.offsets` (where each side begins, and the end), `{split}.lines` (the line of the text that each pair was) and,
written last, `{split}.json`, without which nothing opens.  `{split}.skipped.tsv` lists every line that was left out,
and why.  All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tamis.data.files import flush, flush_folder, replacing
from tamis.data.text import BadLine, Pair
from tamis.data.vocabulary import Vocabulary

FORMAT = "tamis parallel corpus"
VERSION = 1
PARTS = ("tokens", "offsets", "lines")
CHUNK = 8192  # lines encoded at a time
LISTED = 20  # line numbers that a report shows for each reason
EMPTY_SOURCE, EMPTY_TARGET = "empty source", "empty target"
LONG_SOURCE, LONG_TARGET = "source too long", "target too long"
RATIO = "length ratio"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which pairs are worth training on, in subwords."""

    max_length: int = 256
    """Of either side, with its eos."""
    max_ratio: float = 4.0
    """Of the longer side to the shorter."""
    ratio_from: int = 10
    """Pairs whose longer side is no longer than this may have any ratio: "Yes." is often a long word."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, a subword and eos, got {self.max_length}")
        if not self.max_ratio >= 1.0:
            raise ValueError(f"max_ratio must be at least 1, got {self.max_ratio}")


@dataclass(frozen=True)
class Report:
    """What became of every line."""

    read: int
    kept: int
    skipped: dict[str, int]
    """How many lines were left out for each reason."""
    lines: dict[str, list[int]]
    """The first of those lines, counted from 1; all of them are in {split}.skipped.tsv."""

    def describe(self) -> str:
        text = f"{self.kept:,} of {self.read:,} pairs kept"
        for reason, count in self.skipped.items():
            listed = ", ".join(map(str, self.lines[reason]))
            more = ", ..." if count > len(self.lines[reason]) else ""
            text += f"\n  {count:,} left out, {reason}: line{'s' if count > 1 else ''} {listed}{more}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_corpus(
    pairs: Iterable[Pair | BadLine],
    folder: str | Path,
    split: str,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    limits: Limits | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Encode `pairs` into a split of the corpus in `folder`; `progress` is told the number of lines read, now and then.

    A build that fails or is killed leaves what was there before or, in its last moments, nothing that opens.
    """
    folder = Path(folder)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", split):
        raise ValueError(f"a split is named by letters, digits, - and _, got {split!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for left_behind in folder.glob(f".{split}.*.partial"):  # by a build that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{split}.", suffix=".partial", dir=folder) as scratch:
        with _Builder(Path(scratch), source_vocabulary, target_vocabulary, limits or Limits()) as builder:
            iterator = iter(pairs)
            while chunk := list(islice(iterator, CHUNK)):
                builder.add(chunk)
                if progress is not None:
                    progress(builder.read)
            header = builder.finish()
        report: dict[str, Any] = header["report"]
        if not report["kept"]:
            raise ValueError(f"nothing is left for the split {split!r}: {Report(**report).describe()}")
        _put_in_place(Path(scratch), folder, split, header)
    return Report(**report)


def _put_in_place(scratch: Path, folder: Path, split: str, header: dict[str, Any]) -> None:
    """Without its header a split does not open: the old one goes first, the new one comes last."""
    (folder / f"{split}.json").unlink(missing_ok=True)
    flush_folder(folder)
    for name in (*PARTS, "skipped.tsv"):
        os.replace(scratch / name, folder / f"{split}.{name}")
    flush_folder(folder)
    with replacing(folder / f"{split}.json") as file:
        file.write((json.dumps(header, indent=2) + "\n").encode())


class _Part:
    """A file that knows its size and hash."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.size = 0
        self.hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)


class _Builder:
    """Encodes chunks of lines and sorts out those that the limits forbid."""

    def __init__(self, scratch: Path, source: Vocabulary, target: Vocabulary, limits: Limits) -> None:
        self.vocabularies = (source, target)
        self.limits = limits
        self.dtype = np.dtype("<u2" if max(len(source), len(target)) <= 1 << 16 else "<u4")
        self.parts = {name: _Part(scratch / name) for name in (*PARTS, "skipped.tsv")}
        self.read = self.kept = self.end = 0
        self.skipped: dict[str, int] = {}
        self.listed: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        self.parts["offsets"].write(np.zeros(1, "<i8").tobytes())
        self.parts["skipped.tsv"].write(b"line\treason\n")
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.file.close()

    def add(self, chunk: Sequence[Pair | BadLine]) -> None:
        self.read += len(chunk)
        pairs = [item for item in chunk if isinstance(item, Pair)]
        sources = self.vocabularies[0].encode_batch([pair.source for pair in pairs])
        targets = self.vocabularies[1].encode_batch([pair.target for pair in pairs])
        reasons = iter([self._reason(*item) for item in zip(pairs, sources, targets, strict=True)])
        sides: list[npt.NDArray[np.int32]] = []
        lines: list[int] = []
        encoded = zip(sources, targets, strict=True)
        for item in chunk:
            if isinstance(item, BadLine):
                self._skip(item.line, item.reason)
                continue
            both, reason = next(encoded), next(reasons)
            if reason is None:
                sides.extend(both)
                lines.append(item.line)
            else:
                self._skip(item.line, reason)
        if lines:
            self._write(sides, lines)

    def _reason(self, pair: Pair, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> str | None:
        """Why a pair is left out, or None."""
        short, long = sorted((len(source), len(target)))
        if not len(source) or not pair.source.strip():
            return EMPTY_SOURCE
        if not len(target) or not pair.target.strip():
            return EMPTY_TARGET
        if long + 1 > self.limits.max_length:
            return LONG_SOURCE if len(source) + 1 > self.limits.max_length else LONG_TARGET
        if long > self.limits.ratio_from and long > self.limits.max_ratio * short:
            return RATIO
        return None

    def _skip(self, line: int, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        listed = self.listed.setdefault(reason, [])
        if len(listed) < LISTED:
            listed.append(line)
        self.parts["skipped.tsv"].write(f"{line}\t{reason}\n".encode())

    def _write(self, sides: list[npt.NDArray[np.int32]], lines: list[int]) -> None:
        ends = self.end + np.cumsum([len(side) for side in sides], dtype="<i8")
        self.parts["tokens"].write(np.concatenate(sides).astype(self.dtype).tobytes())
        self.parts["offsets"].write(ends.tobytes())
        self.parts["lines"].write(np.asarray(lines, "<i8").tobytes())
        self.end = int(ends[-1])
        self.kept += len(lines)

    def finish(self) -> dict[str, Any]:
        """Bring the files to the disk; the header that describes them."""
        for part in self.parts.values():
            flush(part.file)
        source, target = self.vocabularies
        return {
            "format": FORMAT,
            "version": VERSION,
            "pairs": self.kept,
            "dtype": self.dtype.str,
            "source_vocabulary": source.fingerprint,
            "target_vocabulary": target.fingerprint,
            "limits": asdict(self.limits),
            "files": {
                name: {"bytes": self.parts[name].size, "sha256": self.parts[name].hash.hexdigest()} for name in PARTS
            },
            "report": Report(self.read, self.kept, self.skipped, self.listed).to_dict(),
        }


class ParallelCorpus:
    """Pairs of subword ids, mapped into memory.  Neither bos nor eos is stored."""

    def __init__(self, folder: Path, split: str, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Use `open`."""
        self.folder, self.split = folder, split
        self.source_fingerprint: str = header["source_vocabulary"]
        self.target_fingerprint: str = header["target_vocabulary"]
        self.report = Report(**header["report"])
        self.lines: npt.NDArray[np.int64] = arrays["lines"]
        """The line of the text, counted from 1, that each pair was."""
        self._files: dict[str, dict[str, Any]] = header["files"]
        self._tokens = arrays["tokens"]
        self._offsets = arrays["offsets"]
        lengths = np.diff(self._offsets)
        self.source_lengths: npt.NDArray[np.int32] = lengths[0::2].astype(np.int32)
        self.target_lengths: npt.NDArray[np.int32] = lengths[1::2].astype(np.int32)

    @classmethod
    def open(cls, folder: str | Path, split: str) -> Self:
        """Open what build_corpus wrote.  The sizes of its files are checked; `verify` checks every byte."""
        folder = Path(folder)
        path = folder / f"{split}.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no corpus {split!r}: {path.name} is missing")
        try:
            header = json.loads(path.read_bytes())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ValueError("not the header of a corpus")
            if header["version"] != VERSION:
                raise ValueError(
                    f"version {header['version']}, and this reads version {VERSION}: build the corpus again"
                )
            return cls(folder, split, header, _map_files(folder, split, header))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be opened: {error}") from error

    @property
    def fingerprint(self) -> str:
        """Of all that is in it: the text, and how it was cut into subwords."""
        parts = (self._files[name]["sha256"] for name in sorted(self._files))
        return hashlib.sha256("".join((self.source_fingerprint, self.target_fingerprint, *parts)).encode()).hexdigest()

    def verify(self) -> None:
        """Read every file whole and compare it with the hash that was taken when it was written."""
        for name, described in self._files.items():
            path = self.folder / f"{self.split}.{name}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != described["sha256"]:
                    raise ValueError(f"{path} is not as it was written: build the corpus again")

    def check_vocabularies(self, source: Vocabulary, target: Vocabulary) -> None:
        """Raise unless the corpus was encoded with these."""
        if (source.fingerprint, target.fingerprint) != (self.source_fingerprint, self.target_fingerprint):
            raise ValueError(
                f"the corpus {self.folder / self.split} was encoded with other vocabularies: build it again"
            )

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"a corpus of {len(self)} pairs has no pair {index}")
        start = 2 * (index % len(self))
        begin, middle, end = self._offsets[start : start + 3]
        return self._tokens[begin:middle], self._tokens[middle:end]

    def __iter__(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        return (self[index] for index in range(len(self)))

    def sources(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The ids of the sources of some pairs, one after another."""
        return self._gather(2 * indices, self.source_lengths[indices])

    def targets(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The ids of the targets of some pairs, one after another."""
        return self._gather(2 * indices + 1, self.target_lengths[indices])

    def _gather(self, sides: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        ends = np.cumsum(lengths, dtype=np.int64)
        shifts = self._offsets[sides] - (ends - lengths)  # from a place in the result to the place in the file
        return self._tokens[np.arange(ends[-1] if len(ends) else 0) + np.repeat(shifts, lengths)]


def _map_files(folder: Path, split: str, header: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a split, if they are what its header says."""
    if header["dtype"] not in ("<u2", "<u4"):
        raise ValueError(f"tokens of type {header['dtype']!r}")
    dtypes = {"tokens": header["dtype"], "offsets": "<i8", "lines": "<i8"}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in dtypes.items():
        path, expected = folder / f"{split}.{name}", header["files"][name]["bytes"]
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != expected or not size or size % np.dtype(dtype).itemsize:
            raise ValueError(f"{path.name} must have {expected} bytes, " + (f"has {size}" if size else "is missing"))
        arrays[name] = np.asarray(np.memmap(path, dtype, "r"))
    offsets, pairs = arrays["offsets"], header["pairs"]
    if (len(arrays["lines"]), len(offsets)) != (pairs, 2 * pairs + 1):
        raise ValueError(f"{pairs} pairs, and files for {len(arrays['lines'])}")
    if offsets[0] != 0 or offsets[-1] != len(arrays["tokens"]) or not (offsets[1:] > offsets[:-1]).all():
        raise ValueError(f"{split}.offsets does not cut the tokens into pairs")
    return arrays
