"""The folder of a run: the names of its files, and reading and writing them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tamis.files import standing, write_json
from tamis.training.journal import Record, read_journal


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
        return list(read_journal(self.metrics)) if self.metrics.is_file() else []

    def read_evaluation(self) -> dict[str, Any] | None:
        """Read what `tamis evaluate` wrote; tasks once had a file of another name."""
        for path in (self.evaluation, self.path / "lengths.json"):
            if path.is_file():
                return _read(path)
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
        return _read(self.analysis)

    def write(self, path: Path, value: dict[str, Any], indent: int | None = 1) -> dict[str, Any]:
        """Write a result as one of the files; returns it."""
        write_json(path, value, indent=indent)
        return value


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
