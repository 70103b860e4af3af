"""Training: one loop for one process and for many, exact to resume."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tamis.training.checkpoint import CheckpointError
    from tamis.training.distributed import Process, process
    from tamis.training.guards import TrainingError
    from tamis.training.language import LanguageTask
    from tamis.training.protocol import Task, Update
    from tamis.training.settings import TrainingConfig
    from tamis.training.tasks import GeneratedTask, TaskConfig
    from tamis.training.trainer import Trainer
    from tamis.training.translation import TranslationTask

_MODULES = {
    "CheckpointError": "checkpoint",
    "GeneratedTask": "tasks",
    "LanguageTask": "language",
    "Process": "distributed",
    "Task": "protocol",
    "TaskConfig": "tasks",
    "Trainer": "trainer",
    "TrainingConfig": "settings",
    "TrainingError": "guards",
    "TranslationTask": "translation",
    "Update": "protocol",
    "process": "distributed",
}
"""Where each name is, to be imported when it is asked for: recipes need the settings, not torch's way to shard, which
takes half a second."""

__all__ = [
    "CheckpointError",
    "GeneratedTask",
    "LanguageTask",
    "Process",
    "Task",
    "TaskConfig",
    "Trainer",
    "TrainingConfig",
    "TrainingError",
    "TranslationTask",
    "Update",
    "process",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
