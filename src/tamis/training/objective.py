"""What training makes small, as sums over tokens: sums add up over parts of a batch and over processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis import functional
from tamis.training.settings import TrainingConfig


class Objective:
    """Label-smoothed cross-entropy, or the entmax loss, summed over the labels that are not padding."""

    def __init__(self, config: TrainingConfig, pad_id: int) -> None:
        self.config, self.pad_id = config, pad_id

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(B, L, V) and (B, L) to a scalar."""
        return self._loss(logits, labels, self.config.label_smoothing)

    def _loss(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        rows, targets = logits.flatten(0, 1).float(), labels.flatten()
        options: dict[str, Any] = {"ignore_index": self.pad_id, "reduction": "sum", "label_smoothing": smoothing}
        if self.config.loss == "cross-entropy":
            return F.cross_entropy(rows, targets, **options)
        return functional.entmax_loss(rows, targets, self.config.loss_alpha, **options)

    @torch.no_grad()
    def measure(self, logits: Tensor, labels: Tensor) -> Measured:
        """The loss without smoothing, and how many tokens the model would have chosen itself."""
        real = labels != self.pad_id
        correct = ((logits.argmax(-1) == labels) & real).sum()
        return Measured(self._loss(logits, labels, 0.0).double(), correct.double(), real.sum().double())


class Measured(NamedTuple):
    """Sums over tokens; fp64 scalars."""

    loss: Tensor
    correct: Tensor
    tokens: Tensor
