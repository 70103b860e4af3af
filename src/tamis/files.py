"""Opening plain and compressed files, replacing files and folders whole, and noticing what has changed since."""

from __future__ import annotations

import fcntl
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

PACKED = {".gz": "gzip", ".xz": "xz"}
BLOCK = 1 << 23  # bytes that share a checksum: those of a file are computed side by side
SEAL = "checksums.json"
DIGEST = "sha256"
PARTIAL = ".partial"


def check_file(path: str | Path) -> Path:
    """The path, if a file is there, or a pipe; a device, such as /dev/zero, may have no end."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path} is a device, not a file")
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
    """Write a file that takes the place of `path` at the end, whole and on disk, or not at all.

    What a killed process left of it under another name goes.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # such as /dev/null, which root would replace for everybody
        raise ValueError(f"{path} is no file that another one could take the place of")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with _own(partial) as file:
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


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left of files that they were replacing: whatever no process holds."""
    for partial in folder.glob(f".{glob.escape(name) if name != '*' else name}.*{PARTIAL}"):
        try:
            with partial.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink(missing_ok=True)
        except OSError:  # somebody writes it, it is gone or a folder, or nothing can be locked or removed here
            continue


def _own(partial: Path) -> BinaryIO:
    """A new file that `sweep` sees is being written."""
    while True:
        file = partial.open("wb")
        with suppress(OSError):  # where nothing can be locked, `sweep` removes nothing either
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if partial.exists():  # else somebody swept before it was locked
            return file
        file.close()


def write_json(path: str | Path, value: object, indent: int | None = None) -> None:
    """Write a value as JSON into a file that takes the place of `path`, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=indent) + "\n").encode())


def digest(values: object) -> str:
    """SHA-256 of plain values, however they are laid out as JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_signed(path: str | Path, table: dict[str, Any], indent: int | None = None) -> None:
    """`write_json` of a table, with a digest of all else in it for `read_signed`."""
    plain = json.loads(json.dumps(table))  # keys are text then, tuples lists: as it will be read
    write_json(path, {**plain, DIGEST: digest(plain)}, indent)


def read_signed(path: str | Path) -> tuple[dict[str, Any], bool]:
    """The table that `write_signed` wrote, or another; and whether there was a digest, which then is the right one."""
    path = check_file(path)
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} is damaged: it must hold a table, got {type(table).__name__}")
    found = table.pop(DIGEST, None)
    if found not in (None, digest(table)):
        raise ValueError(f"{path} is not as it was written; if you changed it on purpose, remove {DIGEST!r} from it")
    return table, found is not None


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
