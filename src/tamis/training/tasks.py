"""Generated sequences as something to learn: a source is read, and the target that follows from it is predicted.

An update is drawn when it is needed, ahead of its time and on the host, so that a batch is the same on every device;
it is a function of the seed and its number alone, which makes resuming exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.data.batching import IGNORED, ROOM_LENGTH, ROOM_ROWS, Position, rounded_up
from tamis.data.tasks import SequenceTask, build_task, stream
from tamis.parallel import ContextParallel
from tamis.settings import Config, at_least
from tamis.training.distributed import Process
from tamis.training.objective import Measured, Objective
from tamis.training.protocol import Update
from tamis.training.settings import TrainingConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """What is generated for a run."""

    name: str
    """Name of one of `tamis.data.tasks.TASKS`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that task."""
    also: list[dict[str, Any]] = field(default_factory=list)
    """Changed options of easier forms of the task, each of which is as likely as the task itself, in training alone."""
    lengths: tuple[int, int] = (32, 64)
    """The least and the greatest in training."""
    batch_size: int = 128
    """Sequences of one update, over all processes."""
    lengths_per_batch: int = 4
    """An update has equal parts of so many lengths, each drawn anew: cheaper than a length for every row."""
    validation_size: int = 512
    """Sequences, of lengths spread evenly."""

    def __post_init__(self) -> None:
        lengths = self.lengths
        if not isinstance(lengths, list | tuple) or [type(n) for n in lengths] != [int, int]:
            raise ValueError(f"lengths must be the least and the greatest, two ints, got {lengths!r}")
        object.__setattr__(self, "lengths", tuple(lengths))  # which TOML has not
        if not isinstance(self.options, dict):
            raise ValueError(f"options must be a table, got {self.options!r}")
        if not isinstance(self.also, list) or not all(isinstance(options, dict) for options in self.also):
            raise ValueError(f"also must be a list of tables, got {self.also!r}")
        task, *easier = self.build_all()
        if any(other.num_symbols != task.num_symbols for other in easier):
            raise ValueError(f"easier forms of {self.name} must have its symbols, got {self.also!r}")
        if not task.shortest <= lengths[0] <= lengths[1]:
            raise ValueError(f"lengths of {self.name} must ascend from {task.shortest} or more, got {lengths}")
        for form, length in itertools.product((task, *easier), lengths):
            form.answer_length(length)  # an error where the options do not allow it
        at_least(self, 1, "batch_size", "lengths_per_batch", "validation_size")

    def build(self) -> SequenceTask:
        return build_task(self.name, **self.options)

    def build_all(self) -> list[SequenceTask]:
        """Return the task and its easier forms."""
        return [self.build(), *(build_task(self.name, **{**self.options, **changes}) for changes in self.also)]


@dataclass(frozen=True)
class Part:
    """Some sequences, padded at their ends: causal attention cannot see that."""

    inputs: Tensor
    """(B, L): all tokens but the last."""
    labels: Tensor
    """(B, L): the token that comes next where it is part of the answer, IGNORED elsewhere."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> Self:
        return self._map(Tensor.pin_memory)

    @property
    def length(self) -> int:
        """Tokens of each sequence that attention sees."""
        return self.inputs.shape[1]

    def shared(self, context: ContextParallel) -> Self:
        """This process's tokens of all sequences."""
        return replace(self, inputs=context.take(self.inputs), labels=context.take(self.labels, fill=IGNORED))

    def room_shape(self) -> tuple[int, ...]:
        rows, length = self.inputs.shape
        return rounded_up(rows, ROOM_ROWS), rounded_up(length, ROOM_LENGTH)

    def room(self, device: torch.device | str) -> Part:
        shape = self.room_shape()
        return Part(*(torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2)))

    def fill(self, part: Part) -> None:
        """Take over another part, with places around it that have no answer."""
        rows, length = part.inputs.shape
        for own, other, padding in ((self.inputs, part.inputs, 0), (self.labels, part.labels, IGNORED)):
            own.fill_(padding)
            own[:rows, :length].copy_(other, non_blocking=True)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, inputs=function(self.inputs), labels=function(self.labels))


class Numbered:
    """The order of training: update 0, 1, 2, ... without end or repetition."""

    def iterate(self, position: Position) -> Iterator[tuple[Position, np.ndarray]]:
        number = position.update
        while True:
            yield Position(0, number + 1), np.array([number])
            number += 1


class GeneratedTask:
    """The `Task` of generated sequences."""

    def __init__(self, config: TaskConfig, training: TrainingConfig) -> None:
        self.config, self.training = config, training
        self.task, *self.easier = config.build_all()
        self.updates = Numbered()
        self.objective = Objective(training, IGNORED)

    def update(self, indices: np.ndarray, process: Process) -> Update:
        (number,) = indices.tolist()
        drawn = self._drawn(number)
        tokens = sum(rows * task.answer_length(n) for rows, (task, n) in _shared(self.config.batch_size, drawn))
        return Update(tokens, self._split(self._batch("train", number, drawn), process))

    def loss(self, model: Callable[..., Tensor], part: Part) -> Tensor:
        return self.objective(model(part.inputs), part.labels)

    def validation(self, process: Process) -> Iterator[Part]:
        """Return the same sequences for every seed, so that runs can be compared."""
        low, high = self.config.lengths
        count = min(self.config.validation_size, high - low + 1, 8)
        lengths = [low + (high - low) * k // max(count - 1, 1) for k in range(count)]
        yield from self._split(self._batch("valid", 0, [(self.task, length) for length in lengths]), process)

    def sample(self, tokens: int) -> Iterator[Part]:
        """Sequences that stand for the validation set, of about so many tokens."""
        length = self.config.lengths[1]
        drawn = _group(self.task, 1, length, stream("valid", 0, 0), "valid").inputs.shape[1]
        rows = min(self.config.validation_size, max(1, tokens // drawn))
        yield _group(self.task, rows, length, stream("valid", 0, 0), "valid")

    def measure(self, model: Callable[..., Tensor], part: Part) -> Measured:
        return self.objective.measure(model(part.inputs), part.labels)

    def describe(self, part: Part) -> str:
        rows, length = part.inputs.shape
        return f"{rows} sequences of up to {length} tokens"

    def fingerprint(self) -> str:
        easier = f" {self.easier}" if self.easier else ""
        return f"{self.task} {self.config.lengths} {self.config.batch_size} {self.config.lengths_per_batch}{easier}"

    def _drawn(self, number: int) -> list[tuple[SequenceTask, int]]:
        """Which form of the task and which length each part of an update has."""
        low, high = self.config.lengths
        count = min(self.config.lengths_per_batch, self.config.batch_size)
        generator = stream("lengths", self.training.seed, number)
        lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
        forms = [self.task, *self.easier]
        chosen = torch.randint(len(forms), (count,), generator=generator).tolist()
        return [(forms[form], length) for form, length in zip(chosen, lengths, strict=True)]

    def _batch(self, split: str, number: int, drawn: list[tuple[SequenceTask, int]]) -> Part:
        """All sequences of an update, or of the validation set."""
        seed = self.training.seed if split == "train" else 0
        size = self.config.batch_size if split == "train" else self.config.validation_size
        generator = stream(split, seed, number)
        groups = [_group(task, rows, n, generator, split) for rows, (task, n) in _shared(size, drawn)]
        longest = max(group.inputs.shape[1] for group in groups)
        inputs = [F.pad(group.inputs, (0, longest - group.inputs.shape[1])) for group in groups]
        labels = [F.pad(group.labels, (0, longest - group.labels.shape[1]), value=IGNORED) for group in groups]
        return Part(torch.cat(inputs), torch.cat(labels))

    def _split(self, whole: Part, process: Process) -> list[Part]:
        """This process's rows, in as many parts as in every other."""
        rows, length = whole.inputs.shape
        places = split_rows(rows, length, self.training.device_tokens, process)
        return [Part(whole.inputs[some], whole.labels[some]) for some in places]


def split_rows(rows: int, length: int, device_tokens: int | None, process: Process) -> list[Tensor]:
    """Which of an update's rows this process takes, in as many parts as every other."""
    most = max(1, (device_tokens * process.per_row if device_tokens else rows * length) // length)
    count = -(-rows // (most * process.world))
    return list(torch.arange(rows)[process.rank :: process.world].tensor_split(count))


def _group(task: SequenceTask, rows: int, length: int, generator: torch.Generator, split: str) -> Part:
    drawn = task.generate(rows, length, generator, split)
    return Part(drawn.tokens[:, :-1], drawn.tokens[:, 1:].masked_fill(~drawn.answer[:, 1:], IGNORED))


def _shared(rows: int, kinds: list[T]) -> list[tuple[int, T]]:
    """About as many rows for each kind."""
    ends = [rows * k // len(kinds) for k in range(len(kinds) + 1)]
    return [(end - start, kind) for start, end, kind in zip(ends, ends[1:], kinds, strict=False)]
