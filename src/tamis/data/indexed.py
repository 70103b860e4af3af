"""Text as subword ids, in files that are mapped into memory: what every kind of corpus shares.

A split is four files: `{split}.tokens` (the ids of all items, one after another), `{split}.offsets` (where each piece
of an item begins, and the end), `{split}.lines` (the line of the text that each item was) and, written last,
`{split}.json`, without which nothing opens.  `{split}.skipped.tsv` lists every line that was left out, and why.  All
numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tamis.files import BLOCK, DIGEST, checksums, digest, digest_of, flush, flush_folder, write_signed

VERSION = 1
PARTS = ("tokens", "offsets", "lines")
LISTED = 20  # line numbers that a report shows for each reason

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Report:
    """What became of every line."""

    read: int
    kept: int
    skipped: dict[str, int]
    """How many lines were left out for each reason."""
    lines: dict[str, list[int]]
    """The first of those lines, counted from 1; all of them are in {split}.skipped.tsv."""
    items: str = "pairs"
    told: dict[str, str] = field(default_factory=dict)
    """For a reason the setting behind it and one of its lines, where there is such a thing."""

    def describe(self) -> str:
        text = f"{self.kept:,} of {self.read:,} {self.items} kept"
        for reason, count in self.skipped.items():
            listed = ", ".join(map(str, self.lines[reason]))
            more = ", ..." if count > len(self.lines[reason]) else ""
            text += f"\n  {count:,} left out, {reason}: line{'s' if count > 1 else ''} {listed}{more}"
            text += f"\n    {self.told[reason]}" if reason in self.told else ""
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Writer:
    """The files of a split while it is built: what is kept and what is left out."""

    def __init__(self, scratch: Path, largest: int, items: str) -> None:
        """`largest`: ids lie below it."""
        self.dtype = np.dtype("<u2" if largest <= 1 << 16 else "<u4")
        self.parts = {name: _Part(scratch / name) for name in (*PARTS, "skipped.tsv")}
        self.items = items
        self.read = self.kept = self.end = 0
        self.skipped: dict[str, int] = {}
        self.listed: dict[str, list[int]] = {}
        self.told: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.parts["offsets"].write(np.zeros(1, "<i8").tobytes())
        self.parts["skipped.tsv"].write(b"line\treason\n")
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.file.close()

    def skip(self, line: int, reason: str, told: str | None = None) -> None:
        """Leave a line out; `told` says more about the first of a reason."""
        if told is not None:
            self.told.setdefault(reason, told)
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        listed = self.listed.setdefault(reason, [])
        if len(listed) < LISTED:
            listed.append(line)
        self.parts["skipped.tsv"].write(f"{line}\t{reason}\n".encode())

    def write(self, pieces: Sequence[Ids], lines: Sequence[int]) -> None:
        """Items, one for each of `lines`, each of as many pieces as the others."""
        ends = self.end + np.cumsum([len(piece) for piece in pieces], dtype="<i8")
        self.parts["tokens"].write(np.concatenate(pieces).astype(self.dtype).tobytes())
        self.parts["offsets"].write(ends.tobytes())
        self.parts["lines"].write(np.asarray(lines, "<i8").tobytes())
        self.end = int(ends[-1])
        self.kept += len(lines)

    def finish(self) -> tuple[Report, dict[str, Any]]:
        """Bring the files to the disk; the report, and what every header says."""
        for part in self.parts.values():
            flush(part.file)
        report = Report(self.read, self.kept, self.skipped, self.listed, self.items, self.told)
        header = {
            "version": VERSION,
            self.items: self.kept,
            "dtype": self.dtype.str,
            "files": {
                name: {
                    "bytes": self.parts[name].size,
                    "sha256": self.parts[name].hash.hexdigest(),
                    "crc32": self.parts[name].checksums(),
                }
                for name in PARTS
            },
            "report": report.to_dict(),
        }
        return report, header


class _Part:
    """A file that knows its size, its hash and the checksums of its blocks."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.size = 0
        self.hash = hashlib.sha256()
        self._full: list[int] = []
        self._last = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        view = memoryview(data)
        while view:
            part = view[: BLOCK - self.size % BLOCK]
            self._last = zlib.crc32(part, self._last)
            self.size += len(part)
            if self.size % BLOCK == 0:
                self._full.append(self._last)
                self._last = 0
            view = view[len(part) :]

    def checksums(self) -> list[int]:
        return [*self._full, self._last] if self.size % BLOCK else self._full


def build_split(
    folder: str | Path,
    split: str,
    largest: int,
    items: str,
    fill: Callable[[Writer], dict[str, Any]],
) -> Report:
    """Write a split of `folder`: `fill` hands its items to the writer and returns what else the header says.

    A build that fails or is killed leaves what was there before or, in its last moments, nothing that opens.
    """
    folder = Path(folder)
    with _scratch(folder, split) as scratch:
        with Writer(scratch, largest, items) as writer:
            further = fill(writer)
            report, header = writer.finish()
        if not report.kept:
            raise ValueError(f"nothing is left for the split {split!r}: {report.describe()}")
        _put_in_place(scratch, folder, split, {**further, **header})
    return report


@contextmanager
def _scratch(folder: Path, split: str) -> Iterator[Path]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", split):
        raise ValueError(f"a split is named by letters, digits, - and _, got {split!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for left_behind in folder.glob(f".{split}.*.partial"):  # by a build that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{split}.", suffix=".partial", dir=folder) as scratch:
        yield Path(scratch)


def _put_in_place(scratch: Path, folder: Path, split: str, header: dict[str, Any]) -> None:
    """Without its header a split does not open: the old one goes first, the new one comes last."""
    (folder / f"{split}.json").unlink(missing_ok=True)
    flush_folder(folder)
    for name in (*PARTS, "skipped.tsv"):
        os.replace(scratch / name, folder / f"{split}.{name}")
    flush_folder(folder)
    write_signed(folder / f"{split}.json", header, indent=2)


class IndexedCorpus:
    """Items of subword ids, mapped into memory.  Neither bos nor eos is stored."""

    FORMAT: ClassVar[str]
    ITEMS: ClassVar[str]
    """What it holds, in the plural."""
    PIECES: ClassVar[int]
    """Of which an item consists."""
    VOCABULARIES: ClassVar[tuple[str, ...]]
    """Keys of the header under which their fingerprints are."""

    def __init__(self, folder: Path, split: str, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Use `open`."""
        self.folder, self.split = folder, split
        self.report = Report(**header["report"])
        self.lines: npt.NDArray[np.int64] = arrays["lines"]
        """The line of the text, counted from 1, that each item was."""
        self._fingerprints: tuple[str, ...] = tuple(header[name] for name in self.VOCABULARIES)
        self._files: dict[str, dict[str, Any]] = header["files"]
        self._tokens = arrays["tokens"]
        self._offsets = arrays["offsets"]

    @classmethod
    def open(cls, folder: str | Path, split: str) -> Self:
        """Open what was built.  Sizes and offsets are checked; `verify` checks every byte, and so does a run first."""
        folder = Path(folder)
        path = folder / f"{split}.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no corpus {split!r}: {path.name} is missing")
        try:
            header = json.loads(path.read_bytes())
            if not isinstance(header, dict) or header.get("format") != cls.FORMAT:
                raise ValueError(f"not the header of a {cls.FORMAT.removeprefix('tamis ')}")
            if header["version"] != VERSION:
                raise ValueError(
                    f"version {header['version']}, and this reads version {VERSION}: build the corpus again"
                )
            if header.pop(DIGEST, None) not in (None, digest(header)):  # headers of before have none
                raise ValueError("it is not as it was written: build the corpus again")
            return cls(folder, split, header, cls._map_files(folder, split, header))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be opened: {error}") from error

    @property
    def fingerprint(self) -> str:
        """Of all that is in it: the text, and how it was cut into subwords."""
        parts = (self._files[name]["sha256"] for name in sorted(self._files))
        return hashlib.sha256("".join((*self._fingerprints, *parts)).encode()).hexdigest()

    def verify(self) -> None:
        """Read every file whole and compare it with the checksums that were taken when it was written."""
        for name, described in self._files.items():
            path = self.folder / f"{self.split}.{name}"
            if "crc32" in described:
                whole = checksums(path) == described["crc32"]
            else:  # before there were checksums of blocks
                whole = digest_of(path) == described["sha256"]
            if not whole:
                raise ValueError(f"{path} is not as it was written: build the corpus again")

    def check_fingerprints(self, *fingerprints: str) -> None:
        """Raise unless the corpus was encoded with the vocabularies that have these."""
        if fingerprints != self._fingerprints:
            raise ValueError(
                f"the corpus {self.folder / self.split} was encoded with other vocabularies: build it again"
            )

    def __len__(self) -> int:
        return len(self.lines)

    def _first_piece(self, index: int) -> int:
        """The number of the first piece of an item, which may be counted from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"a corpus of {len(self)} {self.ITEMS} has no {self.ITEMS.removesuffix('s')} {index}")
        return self.PIECES * (index % len(self))

    @classmethod
    def _map_files(cls, folder: Path, split: str, header: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a split, if they are what its header says."""
        if header["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"tokens of type {header['dtype']!r}")
        dtypes = {"tokens": header["dtype"], "offsets": "<i8", "lines": "<i8"}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in dtypes.items():
            path, expected = folder / f"{split}.{name}", header["files"][name]["bytes"]
            size = path.stat().st_size if path.is_file() else None
            if size is None or size != expected or not size or size % np.dtype(dtype).itemsize:
                raise ValueError(
                    f"{path.name} must have {expected} bytes, " + (f"has {size}" if size else "is missing")
                )
            arrays[name] = np.asarray(np.memmap(path, dtype, "r"))
        offsets, count = arrays["offsets"], header[cls.ITEMS]
        if (len(arrays["lines"]), len(offsets)) != (count, cls.PIECES * count + 1):
            raise ValueError(f"{count} {cls.ITEMS}, and files for {len(arrays['lines'])}")
        if offsets[0] != 0 or offsets[-1] != len(arrays["tokens"]) or not (offsets[1:] > offsets[:-1]).all():
            raise ValueError(f"{split}.offsets does not cut the tokens into {cls.ITEMS}")
        return arrays
