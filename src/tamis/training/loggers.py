"""Further places for the records of a run, besides its journal: TensorBoard, Weights & Biases, MLflow, or one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tamis.plugins import Registry
from tamis.settings import Spec, read_spec
from tamis.training.journal import Record


class Logger(Protocol):
    """Takes the records of a run as they come, each with its `step`."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told when it is made."""

    folder: Path
    step: int
    """After which records begin: those of later steps that an interrupted run left are not those of this one."""
    settings: Mapping[str, Any]
    """All settings of the run, as section.key."""


def build_logger(spec: Spec, run: LoggedRun) -> Logger:
    """The logger that a specification names: its name, or a table with that and further settings."""
    name, own = read_spec("logger", spec, LOGGERS, "tensorboard")
    try:
        return LOGGERS[name](run, **own)
    except TypeError as error:
        raise ValueError(f"logger {name!r} does not take {own}: {error}") from error


def numbers_of(record: Record) -> dict[str, float]:
    """The plain numbers of a record by name, every head's alpha and density among them."""
    return dict(_numbers(record, ""))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key != "step":
                yield from _numbers(item, f"{name}/{key}" if name else key)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _numbers(item, f"{name}/{place}")
    elif isinstance(value, int | float):
        yield name, float(value)


class TensorBoard:
    """Into the folder tensorboard/ of the run."""

    def __init__(self, run: LoggedRun) -> None:
        _need("tensorboard", "tensorboard", "pip install 'tamis[train]'")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def write(self, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """To Weights & Biases, as the environment says: WANDB_MODE=offline keeps it in the folder of the run.

    A run that goes on is the same run there too.  Further settings are those of `wandb.init`.
    """

    def __init__(self, run: LoggedRun, **own: Any) -> None:
        wandb = _need("wandb", "wandb", "pip install wandb")
        name = run.folder.name
        given = {"project": "tamis", "name": name, "id": _identity(run.folder), "resume": "allow", **own}
        self._run = wandb.init(dir=str(run.folder), config=dict(run.settings), **given)

    def write(self, record: Record) -> None:
        self._run.log(numbers_of(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """To MLflow; `tracking` names the server or the folder, by default what MLFLOW_TRACKING_URI does."""

    def __init__(self, run: LoggedRun, experiment: str = "tamis", tracking: str | None = None) -> None:
        mlflow = _need("mlflow", "mlflow", "pip install mlflow")
        if tracking is not None:
            mlflow.set_tracking_uri(tracking)
        mlflow.set_experiment(experiment)
        noted = run.folder / "mlflow.txt"
        before = noted.read_text(encoding="utf-8").strip() if run.step and noted.is_file() else None
        self._mlflow = mlflow
        started = mlflow.start_run(run_id=before, run_name=None if before else run.folder.name)
        noted.write_text(started.info.run_id + "\n", encoding="utf-8")
        if before is None:
            mlflow.log_params({name: str(value) for name, value in run.settings.items()})

    def write(self, record: Record) -> None:
        self._mlflow.log_metrics(numbers_of(record), step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


def _need(module: str, logger: str, how: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ImportError(f"the logger {logger!r} needs a package: {how}") from None


def _identity(folder: Path) -> str:
    """Return a name of the run in this folder, the same whenever it goes on."""
    import hashlib

    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


LOGGERS: Registry[Callable[..., Logger]] = Registry(
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
)
"""By name; each takes a `LoggedRun` and the settings of its table."""
