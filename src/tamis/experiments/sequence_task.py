"""Generated tasks, whole: sequences drawn as they are needed, a decoder, exact match at lengths never trained.

    name = "reverse"
    [task]        what is generated                   tamis.training.tasks.TaskConfig
    [model]       sizes and the mechanism             tamis.models.CausalLMConfig
    [training]    the loop                            TaskTraining
    [evaluation]  at which lengths                    tamis.evaluation.lengths.LengthsConfig

What the ASEntmax paper has for all tasks is the default, and recipes need not repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from tamis.analysis.capture import capture
from tamis.analysis.importance import head_importance
from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.sites import device_of
from tamis.analysis.tokens import Sentences, Tokens
from tamis.data.tasks import SequenceTask, stream
from tamis.evaluation.dispersion import DispersionConfig
from tamis.evaluation.lengths import (
    LengthsConfig,
    LengthScore,
    Scores,
    lengths_table,
    score_length,
    score_lengths,
)
from tamis.evaluation.table import Table
from tamis.experiments.base import (
    OBSERVED_TOKENS,
    Experiment,
    Material,
    OpenRun,
    Rows,
    Spreading,
    attention_rows,
    count_heads,
    counted,
)
from tamis.experiments.folder import RunFolder
from tamis.mechanisms.registry import read_mechanism
from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.models.config import ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn.modes import evaluating
from tamis.report.lengths import draw_lengths
from tamis.settings import choose_device
from tamis.training.journal import Display
from tamis.training.protocol import Task
from tamis.training.settings import TrainingConfig
from tamis.training.tasks import GeneratedTask, TaskConfig
from tamis.training.trainer import Trainer

PAPER_MODEL = {"arrangement": "both"}
ANALYSED = 256
"""Sequences that an analysis looks at."""


@dataclass(frozen=True, kw_only=True)
class TaskTraining(TrainingConfig):
    """The loop, with the defaults of tasks."""

    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.99)
    schedule: str = "cosine"
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GeneratedSequences(Experiment):
    """From a task to a model that does it, at lengths that it was trained at and others."""

    section: ClassVar[str] = "task"
    what: ClassVar[str] = "a generated task"
    model_class: ClassVar[type[ModelConfig]] = CausalLMConfig

    task: TaskConfig
    training: TaskTraining = field(default_factory=TaskTraining)
    evaluation: LengthsConfig = field(default_factory=LengthsConfig)

    def model_config(self, prepared: None = None) -> CausalLMConfig:
        if "vocab_size" in self.model:
            raise ValueError("[model] vocab_size follows from the task and cannot be set")
        if self.training.batch_tokens != TrainingConfig().batch_tokens:
            raise ValueError("a task counts sequences: set task.batch_size, not training.batch_tokens")
        return CausalLMConfig.from_dict({**PAPER_MODEL, **self.model, "vocab_size": self.task.build().vocab_size})

    def build_model(self, prepared: None) -> CausalLM:
        return CausalLM(self.model_config())

    def build_task(self, prepared: None) -> GeneratedTask:
        return GeneratedTask(self.task, self.training)

    def final_weights(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the last weights: the training length is soon right, and which checkpoint is the best there is
        chance."""
        if self.training.average > 1:
            return trainer.final_weights()
        return trainer.checkpoints.load(trainer.state.step, "ema" if self.training.ema else "model")

    def amount(self, task: Task) -> str:
        return self.told()

    def export(self, model: PretrainedModel, prepared: None, folder: Path) -> None:
        model.save_pretrained(folder)

    def usage(self, folder: str) -> str:
        return f'from tamis.models import CausalLM\n\nmodel = CausalLM.from_pretrained("{folder}").eval()'

    def told(self) -> str:
        return f"{self.task.name}, lengths {self.task.lengths[0]} to {self.task.lengths[1]}"

    def check_evaluation(self, settings: dict[str, Any]) -> None:
        self._lengths(settings)

    def evaluate(
        self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display
    ) -> dict[str, Any]:
        """Score a run at the lengths of its recipe.  `settings` change [evaluation]."""
        model, config = self._model(run, device), self._lengths(settings)
        with display.track("evaluating", len(config.multiples)) as advance:
            scores = score_lengths(model, self.task.build(), self.task.lengths[1], config, display.say, advance)
        metrics = AttentionMetrics()
        with evaluating(model), capture(model, metrics):
            for part in self.build_task(None).sample(OBSERVED_TOKENS):
                model(part.inputs.to(device_of(model)))
        found = {"scores": [score.to_dict() for score in scores], "attention": metrics.to_dict()}
        return self._described(model, config, found)

    def scores(self, evaluation: dict[str, Any]) -> Rows:
        rows = [
            (f"{row['multiple']:g}x", f"{row['exact_match']:.1%} exact match, {row['token_accuracy']:.1%} of tokens")
            for row in evaluation["scores"]
        ]
        return rows + attention_rows(evaluation)

    def heads(self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display) -> dict[str, Any]:
        """Measure what a run needs each head for: exact match without it, at the lengths of its recipe."""
        model, config = self._model(run, device), self._lengths(settings)
        task, trained = self.task.build(), self.task.lengths[1]
        found = []
        for multiple in config.multiples:
            length = round(multiple * trained)
            wrong = partial(_wrong, model, task, length, multiple, config)
            with display.track(f"{multiple:g}x without each head", count_heads(model) + 1) as advance:
                importance = head_importance(model, counted(wrong, advance))
            display.say(f"{multiple:g}x, {length} long: exact match {1 - importance.baseline:.1%}; without head")
            without = {
                site: [1.0 - importance.baseline - change for change in heads]
                for site, heads in importance.change.items()
            }
            for site, shares in without.items():
                display.say(f"  {site:16}" + "  ".join(f"{head}: {share:.1%}" for head, share in enumerate(shares)))
            samples = config.samples_at(multiple)
            score = {"multiple": multiple, "length": length, "samples": samples, "exact_match": 1 - importance.baseline}
            found.append({**score, "without": without})
        return self._described(model, config, {"heads": found})

    def material(self, run: RunFolder, data: Any, device: str | None, shown: int) -> Material:
        if data is not None:
            raise ValueError(f"a task draws its own sequences and reads no text, got {data!r}")
        model, task = self._model(run, device), self.task.build()
        sample = list(self.build_task(None).sample(OBSERVED_TOKENS))
        low, high = self.task.lengths
        return Material(
            model=model,
            data=f"{self.task.name}:valid",
            sentences=lambda: _sentences(task, ANALYSED, high),
            batches=len(list(_sentences(task, ANALYSED, high))),
            loss=lambda: self._loss(model, sample),
            tokens=lambda _, sentence: {"source": [], "target": [_piece(task, n) for n in sentence.target.tolist()]},
            extracts=list(_sentences(task, shown, low)) if shown else (),
            growing={n: self._texts(4, n, 0) for n in (high, 2 * high, 4 * high)},
        )

    def spreading(self, run: RunFolder, device: str | None, config: DispersionConfig) -> Spreading:
        multiples = self.evaluation.multiples
        lengths = config.lengths or [round(multiple * self.task.lengths[1]) for multiple in multiples]
        texts = partial(self._texts, config.samples, seed=config.seed)
        return Spreading(self._model(run, device), self.task.name, lengths, texts)

    def compare(self, systems: Mapping[str, Sequence[OpenRun]], baseline: str | None) -> Table:
        """Exact match at each multiple of the length in training, runs averaged."""
        return Table.of(
            "exact match, %",
            {
                name: [(score.multiple, 100 * score.exact_match) for scores in runs for score in scores]
                for name, runs in _scored(systems).items()
            },
            unit="x",
        )

    def draw(self, systems: Mapping[str, Sequence[OpenRun]], path: Path, dpi: int) -> str:
        """Exact match and token accuracy against length."""
        results = [run.folder.evaluated() for runs in systems.values() for run in runs]
        if len(tasks := sorted({result["task"]["name"] for result in results})) > 1:
            raise ValueError(f"a figure shows one task, got runs of {', '.join(tasks)}")
        scores = _scored(systems)
        draw_lengths(scores, path, tasks[0])
        return "\n\n".join(lengths_table(scores, share) for share in ("exact_match", "token_accuracy"))

    def _texts(self, samples: int, length: int, seed: int) -> Tensor:
        return self.task.build().generate(samples, length, stream("test", seed, length), "test").tokens[:, :-1]

    def _model(self, run: RunFolder, device: str | None) -> CausalLM:
        return CausalLM.from_pretrained(run.standing_model()).to(choose_device(device))

    def _lengths(self, settings: dict[str, Any]) -> LengthsConfig:
        return LengthsConfig.from_dict({**self.evaluation.to_dict(), **settings})

    def _loss(self, model: CausalLM, sample: list[Any]) -> float:
        task = self.build_task(None)
        with evaluating(model):
            found = [task.measure(model, part.to(device_of(model))) for part in sample]
        return float(sum(part.loss for part in found) / sum(part.tokens for part in found))

    def _described(self, model: CausalLM, config: LengthsConfig, found: dict[str, Any]) -> dict[str, Any]:
        """What was found, with what it was found of."""
        return {
            "name": self.name,
            "task": self.task.to_dict(),
            "mechanism": read_mechanism(model.config.mechanism)[0],
            "position": model.config.describe_position(),
            "training": {"steps": self.training.steps, "seed": self.training.seed},
            "evaluation": config.to_dict(),
            "device": str(device_of(model)),
            **found,
        }


def _wrong(model: CausalLM, task: SequenceTask, length: int, multiple: float, config: LengthsConfig) -> float:
    """The share of sequences that are not right in every token."""
    return 1.0 - score_length(model, task, length, multiple, config).exact_match


def _scored(systems: Mapping[str, Sequence[OpenRun]]) -> Scores:
    return {
        name: [[LengthScore(**score) for score in run.folder.evaluated()["scores"]] for run in runs]
        for name, runs in systems.items()
    }


def _sentences(task: SequenceTask, count: int, length: int) -> Iterator[Sentences]:
    """Sequences of the validation set as a decoder reads them, one at a time."""
    tokens = task.generate(count, length, stream("valid", 0, length), "valid").tokens
    for row in tokens[:, :-1].split(1):
        yield Sentences(target=Tokens(ids=row))


def _piece(task: SequenceTask, number: int) -> str:
    names = {task.bos_id: "<s>", task.sep_id: "=", task.eos_id: "</s>"}
    return names.get(number, str(number))
