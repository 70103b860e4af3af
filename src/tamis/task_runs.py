"""The stages of a generated task, from a recipe to a picture.  The run folder is what one hands on to the next.

    name = "reverse"
    [task]        what is generated                   tamis.training.tasks.TaskConfig
    [model]       sizes and the mechanism             tamis.models.CausalLMConfig
    [training]    the loop                            tamis.training.settings.TrainingConfig
    [evaluation]  at which lengths                    tamis.evaluation.lengths.LengthsConfig
    [arms.short]  what an arm has different; arms may be combined

runs/NAME/      config.toml, metrics.jsonl, checkpoints/, model/  train_task
    lengths.json                                                  evaluate_task
    heads.json                                                    task_heads
    dispersion.json                                               task_dispersion
a figure                                                          plot_tasks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.analysis.importance import head_importance
from tamis.analysis.sites import device_of
from tamis.config import as_toml, build_sections, flat_settings, read_tables
from tamis.data.tasks import SequenceTask, stream
from tamis.evaluation.dispersion import DispersionConfig, write_dispersion
from tamis.evaluation.lengths import (
    LengthsConfig,
    LengthScore,
    Scores,
    score_length,
    score_lengths,
)
from tamis.files import standing, write_json
from tamis.mechanisms.registry import read_mechanism
from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.report.lengths import draw_lengths
from tamis.settings import Config, choose_device, strings
from tamis.training.distributed import Process
from tamis.training.journal import Display
from tamis.training.session import MODEL, RECIPE, Save, different_settings, train_in
from tamis.training.settings import TrainingConfig
from tamis.training.tasks import GeneratedTask, TaskConfig
from tamis.training.trainer import Trainer

LENGTHS = "lengths.json"
HEADS = "heads.json"
PAPER_MODEL = {"arrangement": "both"}
PAPER_TRAINING = {"optimizer": "adamw", "betas": (0.9, 0.99), "schedule": "cosine", "label_smoothing": 0.0}
"""What the paper has for all tasks, and recipes need not repeat."""


@dataclass(frozen=True, kw_only=True)
class TaskRecipe(Config):
    """The sections of a recipe, each checked by its own class."""

    name: str
    task: TaskConfig
    description: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of CausalLMConfig but for vocab_size, which the task decides."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: LengthsConfig = field(default_factory=LengthsConfig)

    def __post_init__(self) -> None:
        strings(self, "name", "description")
        if "vocab_size" in self.model:
            raise ValueError("[model] vocab_size follows from the task and cannot be set")
        if self.training.monitor != "loss":
            raise ValueError(f"a task has no {self.training.monitor} to monitor: training.monitor is 'loss'")
        if self.training.batch_tokens != TrainingConfig().batch_tokens:
            raise ValueError("a task counts sequences: set task.batch_size, not training.batch_tokens")
        self.model_config()

    def model_config(self) -> CausalLMConfig:
        return CausalLMConfig.from_dict({**PAPER_MODEL, **self.model, "vocab_size": self.task.build().vocab_size})

    def to_toml(self) -> str:
        """As a file that `read_task_recipe` reads back."""
        return as_toml(self)

    def settings(self) -> dict[str, Any]:
        return flat_settings(self, self.model_config(), "evaluation")


def read_task_recipe(path: str | Path, overrides: Sequence[str] = (), arms: Sequence[str] = ()) -> TaskRecipe:
    """Read a TOML file, with some of its arms taken one after the other and then the overrides."""
    tables = read_tables(path, overrides, arms)
    kinds: dict[str, type[Config]] = {"task": TaskConfig, "training": TrainingConfig, "evaluation": LengthsConfig}
    try:
        return TaskRecipe.from_dict(build_sections(tables, kinds, {"training": PAPER_TRAINING}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def train_task(recipe: TaskRecipe, folder: Path, device: str | None = None, display: Display | None = None) -> Path:
    """Train, from where an earlier call was interrupted if one was; returns the folder of the model."""

    def build(own: Process, display: Display) -> tuple[Trainer, Save]:
        torch.manual_seed(recipe.training.seed)
        model = CausalLM(recipe.model_config())
        display.say(f"{folder}: {recipe.task.name}, {model.num_parameters():,} parameters, on {own.device}")
        task = GeneratedTask(recipe.task, recipe.training)
        trainer = Trainer(model, task, recipe.training, folder, own, display=display)
        return trainer, lambda model_folder: _save(trainer, recipe, model_folder)

    return train_in(folder, recipe, read_task_recipe, build, device, display)


def _save(trainer: Trainer, recipe: TaskRecipe, folder: Path) -> None:
    """The last weights: the training length is soon right, and which checkpoint is the best there is chance."""
    table = "ema" if recipe.training.ema else "model"
    last = trainer.checkpoints.load(trainer.state.step, table)
    model = CausalLM(recipe.model_config())
    model.load_state_dict(trainer.final_weights() if recipe.training.average > 1 else last, strict=False)
    model.save_pretrained(folder)


def evaluate_task(
    folder: Path,
    device: str | None = None,
    say: Callable[[str], None] = print,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a run at the lengths of its recipe; writes lengths.json.  `settings` change those of LengthsConfig."""
    recipe, model, config = _trained(folder, device, settings)
    scores = score_lengths(model, recipe.task.build(), recipe.task.lengths[1], config, say)
    return _write(folder / LENGTHS, recipe, model, config, {"scores": [score.to_dict() for score in scores]})


def task_heads(
    folder: Path,
    device: str | None = None,
    say: Callable[[str], None] = print,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a run needs each head for: exact match without it, at the lengths of its recipe; writes heads.json."""
    recipe, model, config = _trained(folder, device, settings)
    task, trained = recipe.task.build(), recipe.task.lengths[1]
    found = []
    for multiple in config.multiples:
        length = round(multiple * trained)
        wrong = partial(_wrong, model, task, length, multiple, config)
        importance = head_importance(model, wrong)
        say(f"{multiple:g}x, {length} long: exact match {1 - importance.baseline:.1%}; without head")
        without = {
            site: [1.0 - importance.baseline - change for change in heads] for site, heads in importance.change.items()
        }
        for site, shares in without.items():
            say(f"  {site:16}" + "  ".join(f"{head}: {share:.1%}" for head, share in enumerate(shares)))
        samples = config.samples_at(multiple)
        score = {"multiple": multiple, "length": length, "samples": samples, "exact_match": 1 - importance.baseline}
        found.append({**score, "without": without})
    return _write(folder / HEADS, recipe, model, config, {"heads": found})


def _wrong(model: CausalLM, task: SequenceTask, length: int, multiple: float, config: LengthsConfig) -> float:
    """The share of sequences that are not right in every token."""
    return 1.0 - score_length(model, task, length, multiple, config).exact_match


def _trained(
    folder: Path, device: str | None, settings: dict[str, Any] | None
) -> tuple[TaskRecipe, CausalLM, LengthsConfig]:
    """What a run was told, what came of it, and how it is evaluated."""
    recipe = read_task_recipe(folder / RECIPE)
    config = LengthsConfig.from_dict({**recipe.evaluation.to_dict(), **(settings or {})})
    return recipe, CausalLM.from_pretrained(standing(folder / MODEL)).to(choose_device(device)), config


def _write(
    path: Path, recipe: TaskRecipe, model: CausalLM, config: LengthsConfig, found: dict[str, Any]
) -> dict[str, Any]:
    """What was found, with what it was found of."""
    result = {
        "name": recipe.name,
        "task": recipe.task.to_dict(),
        "mechanism": read_mechanism(model.config.mechanism)[0],
        "position": model.config.describe_position(),
        "training": {"steps": recipe.training.steps, "seed": recipe.training.seed},
        "evaluation": config.to_dict(),
        "device": str(device_of(model)),
        **found,
    }
    write_json(path, result, indent=1)
    return result


def is_task(folder: Path) -> bool:
    """Whether a folder is a run of a task."""
    return (folder / RECIPE).is_file() and "task" in read_tables(folder / RECIPE)


def task_dispersion(
    folder: Path,
    device: str | None = None,
    say: Callable[[str], None] = print,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """How the heads of a run spread at the lengths of its recipe; writes dispersion.json."""
    recipe = read_task_recipe(folder / RECIPE)
    config = DispersionConfig.from_dict({**DispersionConfig().to_dict(), **(settings or {})})
    lengths = config.lengths or [round(multiple * recipe.task.lengths[1]) for multiple in recipe.evaluation.multiples]
    model = CausalLM.from_pretrained(standing(folder / MODEL)).to(choose_device(device))
    task = recipe.task.build()

    def texts(length: int) -> Tensor:
        return task.generate(config.samples, length, stream("test", config.seed, length), "test").tokens[:, :-1]

    return write_dispersion(folder, recipe.name, recipe.task.name, model, lengths, texts, config, say)


def plot_tasks(runs: Sequence[Path] | Mapping[str, Sequence[Path]], output: Path) -> Scores:
    """Draw evaluated runs of one task, a line for each name with the mean of its runs; returns what was drawn.

    Without names there is a line for each mechanism and kind of positions, and its runs are seeds of one recipe.
    """
    named = runs if isinstance(runs, Mapping) else _seeds(runs)
    results = {name: [_scored(folder) for folder in folders] for name, folders in named.items()}
    tasks = {result["task"]["name"] for several in results.values() for result in several}
    if len(tasks) > 1:
        raise ValueError(f"a figure shows one task, got runs of {', '.join(sorted(tasks))}")
    scores = {
        name: [[LengthScore(**score) for score in result["scores"]] for result in several]
        for name, several in results.items()
    }
    draw_lengths(scores, output, ", ".join(tasks))
    return scores


def _seeds(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs of one mechanism and kind of positions under its name; an error if they differ in more than the seed."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        result = _scored(folder)
        found.setdefault(f"{result['mechanism']}, {result['position']}", []).append(folder)
    for name, (first, *others) in found.items():
        settings = read_task_recipe(first / RECIPE).settings()
        for other in others:
            different = set(different_settings(settings, read_task_recipe(other / RECIPE).settings()))
            if different := different - {"training.seed"}:
                raise ValueError(
                    f"{first} and {other} are both {name}, but no seeds of one recipe: they differ in "
                    f"{', '.join(sorted(different))}; give each line a name, NAME=RUN[,RUN...]"
                )
    return found


def _scored(folder: Path) -> dict[str, Any]:
    """What `evaluate_task` wrote."""
    if not (folder / LENGTHS).is_file():
        raise FileNotFoundError(f"{folder} holds no {LENGTHS}: run `tamis tasks evaluate` on it first")
    return json.loads((folder / LENGTHS).read_text(encoding="utf-8"))
