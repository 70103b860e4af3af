"""What surrounds a run so that nothing is lost or unclear when something goes wrong."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch


class TrainingError(RuntimeError):
    """A run that cannot go on, and what to do about it."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two processes must not train into one folder.  The lock goes with the process, however that ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(f"another process is training in {folder}") from None
        yield


class Interruption:
    """Set by the first ctrl-C or SIGTERM, so that the step can be finished and saved; the second one kills."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        # A signal that is ignored, as under nohup, stays so.
        kinds = [kind for kind in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(kind) is not signal.SIG_IGN]
        try:
            before = [signal.signal(kind, self._ask) for kind in kinds]
        except ValueError:  # not the main thread: somebody else handles signals
            yield
            return
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def memory_explained(what: str, setting: str) -> Iterator[None]:
    """Running out of memory names what it was for and the setting to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = (
            "can't allocate memory",
            "Storage size calculation overflowed",
            "numel: integer multiplication overflow",
        )
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(t in str(error) for t in known):
            raise
        raise TrainingError(f"out of memory on {what}: lower {setting}") from error


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only operations that give the same bits each time; an error names one that cannot."""
    if not wanted:
        yield
        return
    # cuBLAS reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
