"""From the numbers of a step to the records of a run, without making the device wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tamis.training.guards import TrainingError
from tamis.training.journal import Display, Journal, Record, summary
from tamis.training.loggers import LoggedRun, Logger, build_logger
from tamis.training.settings import TrainingConfig
from tamis.training.state import State

PATIENCE_WITH_NAN = 10
"""Steps in a row without a finite gradient before the run stops."""


class StepNumbers(NamedTuple):
    """One step, whose values the device may still be working on."""

    step: int
    epoch: int
    tokens: int
    lr: float
    values: Tensor
    """Loss summed over tokens, norm of the gradient, and 1 where the step was left out, else 0."""
    alphas: dict[str, Tensor]
    """At steps that are recorded."""
    moved: dict[str, float]
    """Where schedules have what they move."""


class Recorder:
    """Adds up steps and writes records: to people, to metrics.jsonl, to loggers."""

    def __init__(
        self,
        state: State,
        config: TrainingConfig,
        folder: Path,
        display: Display,
        leads: bool,
        settings: Mapping[str, Any],
    ) -> None:
        self.state, self.config, self.display = state, config, display
        self._outlets: list[Logger] = []
        self.journal = Journal(folder / "metrics.jsonl", state.step) if leads else None
        if self.journal is not None:
            run = LoggedRun(folder, state.step, settings)
            named = (*config.loggers, *(["tensorboard"] if config.tensorboard else []))
            self._outlets = [self.journal, *(build_logger(spec, run) for spec in named)]
        self._pending: deque[tuple[StepNumbers, torch.cuda.Event | None]] = deque()
        self._began = time.monotonic() - state.seconds
        self._last_seconds, self._last_tokens = state.seconds, state.tokens
        self._waited = 0.0
        display.start(folder.name, state.step, config.steps)

    def wait(self, seconds: float) -> None:
        """Time in which there was no data to train on."""
        self._waited += seconds

    def pause(self, seconds: float) -> None:
        """Time that was not spent on training."""
        self._began += seconds

    def add(self, numbers: StepNumbers) -> None:
        """A step is done.  On a GPU it is read one step later, when reading no longer has to wait."""
        ready = None
        if numbers.values.is_cuda:
            host = torch.empty(numbers.values.shape, dtype=numbers.values.dtype, pin_memory=True)
            host.copy_(numbers.values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            numbers = numbers._replace(values=host)
        self._pending.append((numbers, ready))
        while len(self._pending) > (0 if ready is None else 1):
            self._read()
        self.display.step(numbers.step)

    def settle(self) -> None:
        """Read all that is pending."""
        while self._pending:
            self._read()
        self.state.seconds = time.monotonic() - self._began

    def write(self, record: Record) -> None:
        for outlet in self._outlets:
            outlet.write(record)

    def validated(self, record: Record) -> None:
        self.display.say(f"step {record['step']:>6}  {summary(record)}{'  (best)' if record['best'] else ''}")
        self.write(record)

    def _read(self) -> None:
        numbers, ready = self._pending.popleft()
        if ready is not None:
            ready.synchronize()
        loss, norm, wrong = numbers.values.tolist()
        state = self.state
        if wrong:
            self._skip(numbers.step)
        else:
            state.skipped_in_a_row = 0
            state.window_loss += loss
            state.window_tokens += numbers.tokens
        state.tokens += numbers.tokens
        if numbers.step % self.config.log_every == 0:
            self._record(numbers, norm)

    def _skip(self, step: int) -> None:
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        self.display.say(f"step {step}: the loss or its gradient is not finite; the step is skipped")
        if self.state.skipped_in_a_row >= PATIENCE_WITH_NAN:
            raise TrainingError(
                f"no finite gradient in {PATIENCE_WITH_NAN} steps in a row, up to step {step}: "
                "a lower training.lr, a longer training.warmup or a smaller training.clip may help"
            )

    def _record(self, numbers: StepNumbers, norm: float) -> None:
        state = self.state
        seconds = time.monotonic() - self._began
        spent = max(seconds - self._last_seconds, 1e-9)
        record: Record = {
            "step": numbers.step,
            "epoch": numbers.epoch,
            "loss": state.window_loss / state.window_tokens if state.window_tokens else None,
            "lr": numbers.lr,
            "grad_norm": norm,
            "tokens": state.tokens,
            "tokens_per_second": (state.tokens - self._last_tokens) / spent,
            "data_wait": self._waited / spent,
            "seconds": seconds,
            "skipped": state.skipped,
            "alphas": {name: alphas.flatten().tolist() for name, alphas in numbers.alphas.items()},
        }
        if numbers.moved:
            record["schedules"] = numbers.moved
        self._last_seconds, self._last_tokens, self._waited = seconds, state.tokens, 0.0
        state.window_loss, state.window_tokens = 0.0, 0
        self.display.show(record)
        self.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.display.close()
        for outlet in self._outlets:
            outlet.close()
