"""What a run says while it runs: metrics.jsonl always, a live line on a terminal, TensorBoard when asked."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tamis.files import flush, replacing

Record = dict[str, Any]


class Journal:
    """metrics.jsonl: one object a line, on the disk as soon as it is written.

    A run that goes on from an earlier step first forgets what was noted after it.  What is left has the
    `digest` that the checkpoint of that step took down.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        before = path.read_bytes() if path.exists() else b""
        kept = b"".join(line + b"\n" for line in before.split(b"\n") if _step_of(line) <= step)
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
    """Progress for people: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False) if console is None else console
        self._progress: Progress | None = None

    def start(self, name: str, step: int, steps: int) -> None:
        self.steps = steps
        if self.console.is_terminal and not self.console.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[shown]}"), console=self.console)
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
            self.say(f"step {record['step']:>6}/{self.steps}  {summary(record)}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def summary(record: Record) -> str:
    """A record in one line."""
    parts = []
    for key, text in (
        ("loss", "loss {:.3f}"),
        ("valid_loss", "valid loss {:.4f}"),
        ("valid_perplexity", "perplexity {:.2f}"),
        ("valid_accuracy", "accuracy {:.1%}"),
        ("valid_bleu", "BLEU {:.2f}"),
        ("density", "density {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("skipped", "{} steps skipped"),
    ):
        if record.get(key):
            parts.append(text.format(record[key]))
    values = [alpha for alphas in record.get("alphas", {}).values() for alpha in alphas]
    if values:
        parts.append(f"alpha {min(values):.2f}..{max(values):.2f}")
    return "  ".join(parts)


class Board:
    """The numbers of the records in TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise SystemExit("tensorboard = true needs the package: pip install 'tamis[train]'") from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Record) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, record["step"])
        for site, alphas in record.get("alphas", {}).items():
            self._writer.add_scalars(f"alpha/{site}", {str(n): a for n, a in enumerate(alphas)}, record["step"])

    def close(self) -> None:
        self._writer.close()
