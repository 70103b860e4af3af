"""The folder of a run: the names of its files, and reading and writing them whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tamis.files import digest_of, read_signed, standing, write_signed
from tamis.training.checkpoint import CheckpointError, Checkpoints
from tamis.training.journal import Record, is_as_written, read_journal


class RunFolder:
    """The files of one run.

    config.toml metrics.jsonl checkpoints/ model/    tamis train
    evaluation.json test.hypotheses.txt              tamis evaluate
    analysis.json analysis.npz                       tamis analyze
    dispersion.json heads.json                       tamis dispersion, tamis tasks heads
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.evaluation = self.path / "evaluation.json"
        self.hypotheses = self.path / "test.hypotheses.txt"
        self.analysis = self.path / "analysis.json"
        self.arrays = self.path / "analysis.npz"
        self.dispersion = self.path / "dispersion.json"
        self.heads = self.path / "heads.json"

    def __str__(self) -> str:
        return str(self.path)

    def standing_model(self) -> Path:
        """Find the folder of the model, or what stands for it since a process that replaced it was killed."""
        return standing(self.model)

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*"))

    def records(self) -> list[Record]:
        """Return the records of training; none where they are not there."""
        if not self.metrics.is_file():
            return []
        checkpoints = Checkpoints(self.checkpoints)
        for step in reversed(checkpoints.steps()):
            try:
                noted = checkpoints.state(step).get("journal")
            except CheckpointError:
                continue
            if noted is not None and not is_as_written(self.metrics, step, noted):
                raise ValueError(
                    f"{self.metrics} is not as it was written up to step {step}: remove it to go on without the curves"
                )
            break
        return list(read_journal(self.metrics))

    def read_evaluation(self) -> dict[str, Any] | None:
        """Read what `tamis evaluate` wrote; tasks once had a file of another name."""
        for path in (self.evaluation, self.path / "lengths.json"):
            if path.is_file():
                return read_signed(path)[0]
        return None

    def evaluated(self) -> dict[str, Any]:
        """Return what `tamis evaluate` wrote, or an error that says what to do."""
        found = self.read_evaluation()
        if found is None:
            raise FileNotFoundError(f"{self} has not been evaluated: run `tamis evaluate {self}` first")
        return found

    def analysed(self) -> dict[str, Any]:
        """Read what `tamis analyze` wrote, or an error that says what to do."""
        for path in (self.analysis, self.arrays):
            if not path.is_file():
                raise FileNotFoundError(f"{self} has not been analysed: run `tamis analyze {self}` first")
        found, _ = read_signed(self.analysis)
        if "arrays" in found and found["arrays"] != digest_of(self.arrays):
            raise ValueError(
                f"{self.arrays} is not what {self.analysis.name} was written with: run `tamis analyze {self}` again"
            )
        return found

    def write(self, path: Path, value: dict[str, Any], indent: int | None = 1) -> dict[str, Any]:
        """Write a result as one of the files; returns it."""
        write_signed(path, value, indent=indent)
        return value

    def unsigned(self) -> list[Path]:
        """Results that do not tell whether they are whole, as those of before do not."""
        every = (self.evaluation, self.analysis, self.dispersion)
        return [path for path in every if path.is_file() and not read_signed(path)[1]]


@contextmanager
def reading(folders: Iterable[Path]) -> Iterator[None]:
    """What goes wrong with results of these runs that do not tell whether they are whole is put down to them."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if doubtful := [path for folder in folders for path in RunFolder(folder).unsigned()]:
            named = " or ".join(map(str, doubtful))
            raise ValueError(f"{named} is damaged, or of another version of tamis: {error!r}") from error
        raise
