"""One fault for each part, made on purpose: a harness that has never failed may be one that cannot."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def optimizer_forgotten() -> Iterator[None]:
    """A process that goes on has lost the moments of its optimiser."""
    from tamis.training.trainer import Trainer

    real = Trainer._resume

    def resume(trainer: Trainer) -> None:
        real(trainer)
        for optimizer in trainer.optimizers:
            optimizer.state.clear()

    with mock.patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def window_too_wide() -> Iterator[None]:
    """Attention within a window sees one key more."""
    attention = sys.modules["tamis.functional.attention"]  # in the package its function goes by that name
    real = attention.check_call

    def check_call(*of: Any, window: Any = None, **options: Any) -> Any:
        return real(*of, window=window + 1 if isinstance(window, int) else window, **options)

    with mock.patch.object(attention, "check_call", check_call):
        yield


@contextmanager
def success_claimed() -> Iterator[None]:
    """A file that cannot be replaced is left as it was, without a word."""
    real = os.replace

    def replace(*of: Any) -> None:
        with suppress(OSError):
            real(*of)

    with mock.patch("os.replace", replace):
        yield


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Processes do not notice that another one trains in their folder."""
    from tamis.experiments import stages

    def alone_in(folder: Path) -> AbstractContextManager[None]:
        (folder / ".lock").touch()
        return nullcontext()

    with mock.patch.object(stages, "alone_in", alone_in):
        yield


@contextmanager
def seals_unread() -> Iterator[None]:
    """Nobody looks at the checksums of a model."""
    from tamis.data import vocabulary
    from tamis.decoding import folder
    from tamis.models import pretrained

    with ExitStack() as stack:
        for reader in (vocabulary, folder, pretrained):
            stack.enter_context(mock.patch.object(reader, "check_sealed"))
        yield


@contextmanager
def settings_unchecked() -> Iterator[None]:
    """Settings of training are taken as they are."""
    from tamis.training.settings import TrainingConfig

    with mock.patch.object(TrainingConfig, "__post_init__", return_value=None):
        yield


@contextmanager
def errors_unexplained() -> Iterator[None]:
    """Commands end with a traceback."""
    from tamis.cli import command

    with mock.patch.object(command, "_expected", tuple):
        yield


@contextmanager
def text_unescaped() -> Iterator[None]:
    """Text gets into the page as it is."""
    page = sys.modules["tamis.report.page"]
    with mock.patch.object(page, "embedded", json.dumps):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "kill": optimizer_forgotten,
    "damage": seals_unread,
    "recipes": settings_unchecked,
    "commands": errors_unexplained,
    "calls": window_too_wide,
    "disk": success_claimed,
    "company": nobody_waits,
    "text": text_unescaped,
}
