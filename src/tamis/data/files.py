"""Opening plain and compressed files, and replacing files whole."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

PACKED = {".gz": "gzip", ".xz": "xz"}


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
