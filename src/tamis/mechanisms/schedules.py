"""What moves sparsity in the course of training: a value on its way from one number to another, pressure on alphas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tamis.mechanisms.entmax import LearnedAlpha


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """`start` up to step `begin`, `target` from step `end` on, and a straight line between.  Steps count from 1."""

    start: float
    target: float
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise ValueError(f"a ramp needs 0 <= begin <= end, got begin={self.begin} and end={self.end}")

    def at(self, step: int) -> float:
        """Return the value at a step, of which alone it is a function: a run that goes on has the same."""
        if step >= self.end:
            return self.target
        done = max(step - self.begin, 0) / max(self.end - self.begin, 1)
        return self.start + (self.target - self.start) * done


def learned_alphas_of(modules: Iterable[nn.Module]) -> list[LearnedAlpha]:
    """Those within some modules, themselves."""
    return [inner for module in modules for inner in module.modules() if isinstance(inner, LearnedAlpha)]


def distance_from_sparsest(alphas: Sequence[LearnedAlpha]) -> Tensor:
    """How far alphas are from their upper end, on average, from 0 to 1."""
    distances = [(alpha.high - alpha()) / (alpha.high - alpha.low) for alpha in alphas]
    return torch.cat([distance.flatten() for distance in distances]).mean()


def press(alphas: Sequence[LearnedAlpha], strength: float) -> None:
    """Add the gradient of `strength` times that distance to those that the loss has left, at the alphas that learn.

    It depends on nothing but the alphas: it is added once for each update, after clipping, whatever the accumulation
    and the number of processes.
    """
    raw = [alpha.raw for alpha in alphas if alpha.raw.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(strength * distance_from_sparsest(alphas), raw)
    for parameter, gradient in zip(raw, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)  # in place: captured steps add to tensors that stay
