"""What the loop asks of what is to be learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tamis.data.batching import Position
from tamis.training.distributed import Process
from tamis.training.objective import Measured


class Update(NamedTuple):
    """One update of the weights."""

    tokens: int
    """Labels in the whole update, over all processes: what its loss is divided by."""
    parts: list[Any]
    """What this process puts through the model; as many parts in every process."""


class Order(Protocol):
    """Which update comes when."""

    def iterate(self, position: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Updates from a position on, without end, each with the position after it."""


class Task(Protocol):
    """What is learned: batches and their loss.  The loop knows nothing else about the data."""

    @property
    def updates(self) -> Order:
        """The order of training."""

    def update(self, indices: np.ndarray, process: Process) -> Update:
        """One update, drawn once."""

    def loss(self, model: Callable[..., Tensor], part: Any) -> Tensor:
        """Summed over labels."""

    def validation(self, process: Process) -> Iterator[Any]:
        """Parts of the validation set for this process; as many in every process."""

    def measure(self, model: Callable[..., Tensor], part: Any) -> Measured:
        """Sums over labels."""

    def describe(self, part: Any) -> str:
        """Describe the task in the message when memory runs out."""

    def fingerprint(self) -> str:
        """Return a fingerprint of the training data: a run does not go on with other data."""
