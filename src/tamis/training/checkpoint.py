"""Checkpoints: safetensors and JSON in a folder that is whole or not there.

    checkpoints/step-00001000/
        config.json model.safetensors     a model folder, as save_pretrained writes it
        optimizer.safetensors             and ema.safetensors where an average is kept
        state.json                        step, position in the data, patience, ...; sizes and sha256 of the others

A checkpoint is written under another name, synced, and renamed; one whose checksums fail is passed over for the one
before it.  Nothing is unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tamis.files import DIGEST, digest, digest_of, flush, flush_folder, seal

STATE = "state.json"
PREFIX = "step-"
UNFINISHED = ".unfinished-"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, step: int, tables: dict[str, dict[str, Tensor]], texts: dict[str, str], state: dict[str, Any]
    ) -> Path:
        """Write one.

        Args:
            tables: tensors, by the name of the file without its suffix.
            texts: further files.
            state: plain values.
        """
        final = self.path(step)
        draft = self.folder / f"{UNFINISHED}{final.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, tensors in tables.items():
            path = draft / f"{name}.safetensors"
            try:
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, str(path))
            except SafetensorError as error:
                raise OSError(f"{path} cannot be written: {error}") from error
        for name, text in texts.items():
            (draft / name).write_text(text)
        seal(draft)  # a checkpoint is a model folder too
        files = {path.name: _fingerprint(path) for path in sorted(draft.iterdir())}
        content = {"format": FORMAT, "step": step, **state, "files": files}
        (draft / STATE).write_text(json.dumps({**content, DIGEST: digest(content)}, indent=1) + "\n")
        for path in draft.iterdir():
            with path.open("rb+") as file:
                flush(file)
        flush_folder(draft)
        if final.exists():  # a torn one that a resumed run has overtaken
            shutil.rmtree(final)
        draft.rename(final)
        flush_folder(self.folder)
        return final

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Of all that are there, whole or not, ascending."""
        names = [path.name for path in self.folder.glob(f"{PREFIX}*")]
        numbers = [int(name.removeprefix(PREFIX)) for name in names if name.removeprefix(PREFIX).isdecimal()]
        return sorted(number for number in numbers if self.path(number).name in names)

    def latest(self) -> Iterator[tuple[int, CheckpointError | dict[str, Any]]]:
        """From the newest on: its step, and its state or why it cannot be used."""
        for step in reversed(self.steps()):
            try:
                yield step, self.verify(step)
            except CheckpointError as error:
                yield step, error

    def verify(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint whose files are all as they were written."""
        content, folder = self.state(step), self.path(step)
        for name, written in content["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if _fingerprint(path) != written:
                raise CheckpointError(f"{path} is not what was written: its size or checksum differs")
        return content

    def state(self, step: int) -> dict[str, Any]:
        """The plain values of a checkpoint, whose other files may be damaged."""
        folder = self.path(step)
        try:
            content = json.loads((folder / STATE).read_text())
            written = content.pop(DIGEST)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / STATE} cannot be read: {error}") from error
        if written != digest(content):
            raise CheckpointError(f"{folder / STATE} is not what was written: its checksum differs")
        if content["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {content['format']}; this version reads {FORMAT}")
        return content

    def load(self, step: int, table: str) -> dict[str, Tensor]:
        return read_tensors(self.path(step) / f"{table}.safetensors")

    def remove(self, steps: Iterable[int]) -> None:
        """Remove these, and drafts that a killed process left."""
        for step in steps:
            # Not half of it: a folder that is going away must not look like a checkpoint.
            doomed = self.folder / f"{UNFINISHED}{self.path(step).name}"
            shutil.rmtree(doomed, ignore_errors=True)
            self.path(step).rename(doomed)
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights in these files, in fp64 inside; what is not floating point comes from the last."""
    if not paths:
        raise ValueError("there is no checkpoint to average")
    sums: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for path in paths:
        last = read_tensors(path)
        if sums and last.keys() != sums.keys():
            raise CheckpointError(f"{path} holds other weights than {paths[0]}: they cannot be averaged")
        for name, tensor in last.items():
            wide = tensor.double()
            sums[name] = wide if name not in sums else sums[name].add_(wide)
    return {
        name: (sums[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in last.items()
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest_of(path)}
