"""Opening plain and compressed files, replacing files and folders whole, and noticing what has changed since."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

PACKED = {".gz": "gzip", ".xz": "xz"}
BLOCK = 1 << 23  # bytes that share a checksum: those of a file are computed side by side
SEAL = "checksums.json"


def check_file(path: str | Path) -> Path:
    """The path, if a file is there."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return path


@contextmanager
def open_binary(path: str | Path) -> Iterator[BinaryIO]:
    """Read a file's bytes, unpacked where its name ends in .gz or .xz.

    What goes wrong while reading a packed file is a ValueError that names the file.
    """
    path = check_file(path)
    kind = PACKED.get(path.suffix)
    with path.open("rb") as raw:
        if kind is None:
            yield raw
            return
        if raw.seekable() and os.fstat(raw.fileno()).st_size == 0:
            raise ValueError(f"{path} is empty: even a packed file of no lines holds a header")
        unpack = gzip.open if kind == "gzip" else lzma.open
        try:
            with unpack(raw, "rb") as unpacked, io.BufferedReader(cast(io.RawIOBase, unpacked), 1 << 18) as file:
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            raise ValueError(f"{path} is cut short or not {kind}: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """A table from a file of JSON."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a table, got {type(values).__name__}")
    return values


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of `path` at the end, whole and on disk, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            flush(file)
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk does not say what it was full for
        raise
    finally:
        partial.unlink(missing_ok=True)
    flush_folder(path.parent)


def write_json(path: str | Path, value: object, indent: int | None = None) -> None:
    """Write a value as JSON into a file that takes the place of `path`, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def flush(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Bring renames within a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksums(path: Path) -> list[int]:
    """CRC-32 of the blocks of a file, as many at a time as there are cores."""
    with path.open("rb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        descriptor = file.fileno()
        starts = range(0, path.stat().st_size, BLOCK)
        return list(pool.map(lambda start: zlib.crc32(os.pread(descriptor, BLOCK, start)), starts))


def seal(folder: Path) -> None:
    """Write down the checksums of all files of a folder, for `check_sealed`."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != SEAL]
    content = {path.name: {"bytes": path.stat().st_size, "crc32": checksums(path)} for path in files}
    write_json(folder / SEAL, content)


def check_sealed(folder: Path, *names: str) -> None:
    """Raise if one of these files is not as it was when its folder was sealed; others may hold anything."""
    path = folder / SEAL
    if not path.is_file():
        return
    try:
        sealed = json.loads(path.read_bytes())
        written = {name: (sealed[name]["bytes"], sealed[name]["crc32"]) for name in names if name in sealed}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    for name, (size, expected) in written.items():
        found = folder / name
        if not found.is_file():
            raise FileNotFoundError(f"{found} is missing")
        if found.stat().st_size != size or checksums(found) != expected:
            raise ValueError(f"{found} is not as it was written; if you changed it on purpose, remove {path}")


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder that takes the place of `folder`, whole and on disk, or not at all.

    Two folders cannot change places in one step.  Killed between two steps, the old one stands under the name that
    `standing` knows.
    """
    draft, aside = folder.with_name(f".{folder.name}.draft"), _aside(folder)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        write(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for path in draft.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                flush(file)
    flush_folder(draft)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    draft.rename(folder)
    flush_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def standing(folder: Path) -> Path:
    """The folder, or what stands for it since a process that replaced it was killed."""
    return _aside(folder) if not folder.exists() and _aside(folder).is_dir() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.before")
