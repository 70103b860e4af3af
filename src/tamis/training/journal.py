"""What a run says while it runs: metrics.jsonl, and progress for people."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tamis.files import flush, replacing

Record = dict[str, Any]
Advance = Callable[[int], None]
"""Is told how much is done."""
EVERY = 10.0
"""Seconds between lines about work that takes long, where there is no terminal."""
VALIDATED = ("valid_loss", "valid_perplexity", "valid_accuracy")
"""What every validation finds; the rest is a kind's own."""


class Journal:
    """metrics.jsonl: one object a line, on the disk as soon as it is written.

    A run that goes on from an earlier step first forgets what was noted after it.  What is left has the
    `digest` that the checkpoint of that step took down.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        before = path.read_bytes() if path.exists() else b""
        kept = _until(before, step)
        if kept != before:
            with replacing(path) as file:
                file.write(kept)
        self._file = path.open("ab")
        self._hash = hashlib.sha256(kept)

    def write(self, record: Record) -> None:
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._file.write(line)
        flush(self._file)
        self._hash.update(line)

    def digest(self) -> str:
        """Of all that is noted so far."""
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def is_as_written(path: Path, step: int, digest: str) -> bool:
    """Whether the lines up to a step are those whose digest the checkpoint of that step took down."""
    return hashlib.sha256(_until(path.read_bytes(), step)).hexdigest() == digest


def _until(lines: bytes, step: int) -> bytes:
    """Those up to a step, without what a killed process left unfinished."""
    return b"".join(line + b"\n" for line in lines.split(b"\n") if _step_of(line) <= step)


def read_journal(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a line that a killed process left unfinished does not count."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if _step_of(line) < math.inf]


def _step_of(line: bytes) -> float:
    """The step of a line; infinity if it is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf


class Display:
    """Progress for people: a live bar on a terminal, a line now and then elsewhere, each with the time still to go."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False) if console is None else console
        self._progress: Progress | None = None

    def start(self, name: str, step: int, steps: int) -> None:
        """Training begins after some step."""
        self.steps, self._pace = steps, Pace(step, steps)
        if self._is_live():
            self._progress = self._bars(TextColumn("{task.fields[shown]}"))
            self._bar = self._progress.add_task(name, total=steps, completed=step, shown="")
            self._progress.start()

    def step(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)

    def show(self, record: Record) -> None:
        """A record of training."""
        if self._progress is not None:
            self._progress.update(self._bar, shown=summary(record))
        else:
            step = record["step"]
            self.say(f"step {step:>6}/{self.steps}  {summary(record)}  {self._pace.left(step)}".rstrip())

    @contextmanager
    def track(self, what: str, total: int | None = None) -> Iterator[Advance]:
        """Some other work, which says now and then how much of it is done."""
        if self._is_live():
            with self._bars() as progress:
                bar = progress.add_task(what, total=total)
                yield lambda done: progress.update(bar, completed=done)
            return
        pace = Pace(0, total)
        said = [time.monotonic()]

        def advance(done: int) -> None:
            if time.monotonic() - said[0] >= EVERY:
                said[0] = time.monotonic()
                of = f" of {total:,}" if total is not None else ""
                self.say(f"{what}: {done:,}{of}  {pace.left(done)}".rstrip())

        yield advance

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values below one another."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _is_live(self) -> bool:
        return self.console.is_terminal and not self.console.quiet

    def _bars(self, *further: TextColumn) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, *further, console=self.console)


class Pace:
    """How long what is left will take, if it goes on as it went so far."""

    def __init__(self, done: int, total: int | None) -> None:
        self.first, self.total, self._began = done, total, time.monotonic()

    def left(self, done: int) -> str:
        """Such as "ETA 0:02:10"; nothing where nobody can know."""
        if self.total is None or done <= self.first:
            return ""
        seconds = (time.monotonic() - self._began) / (done - self.first) * max(0, self.total - done)
        return f"ETA {timedelta(seconds=round(seconds))}"


def summary(record: Record) -> str:
    """A record in one line."""
    parts = []
    for key, text in (
        ("loss", "loss {:.3f}"),
        ("valid_loss", "valid loss {:.4f}"),
        ("valid_perplexity", "perplexity {:.2f}"),
        ("valid_accuracy", "accuracy {:.1%}"),
        ("density", "density {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("skipped", "{} steps skipped"),
    ):
        if record.get(key):
            parts.append(text.format(record[key]))
    scores = [key for key in record if key.startswith("valid_") and key not in VALIDATED]
    parts += [f"{key.removeprefix('valid_')} {record[key]:.2f}" for key in scores]
    values = [alpha for alphas in record.get("alphas", {}).values() for alpha in alphas]
    if values:
        parts.append(f"alpha {min(values):.2f}..{max(values):.2f}")
    return "  ".join(parts)
