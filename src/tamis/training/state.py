"""All that changes while training, but for weights and optimiser."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Self

from tamis.data.batching import Position


@dataclass
class State:
    """What a checkpoint says in plain values.

    Random numbers are not among it: each step draws from a stream of its own, see `stream_seed`.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    best_step: int = 0
    best_value: float | None = None
    """Lower is better, whatever is monitored."""
    stale: int = 0
    """Validations since the best."""
    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time in training, without validation."""
    window_loss: float = 0.0
    """Sum since the last record."""
    window_tokens: int = 0

    def judge(self, value: float) -> bool:
        """Whether this validation is the best so far."""
        better = self.best_value is None or value < self.best_value
        if better and math.isfinite(value):
            self.best_step, self.best_value, self.stale = self.step, value, 0
            return True
        self.stale += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"position": self.position.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(**own | {"position": Position.from_dict(own["position"])})


def stream_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one process for one step: no generator's state has to be saved to go on exactly."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
