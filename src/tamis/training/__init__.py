"""Training: one loop for one process and for many, exact to resume."""

from tamis.training.checkpoint import CheckpointError
from tamis.training.distributed import Process, process
from tamis.training.guards import TrainingError
from tamis.training.language import LanguageTask
from tamis.training.protocol import Task, Update
from tamis.training.settings import TrainingConfig
from tamis.training.tasks import GeneratedTask, TaskConfig
from tamis.training.trainer import Trainer
from tamis.training.translation import TranslationTask

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
