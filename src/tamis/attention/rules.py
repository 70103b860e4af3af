"""Scores to weights inside attention: what differs between entmax and ReLU attention, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.transforms.entmax import curvature, entmax_weights, vjp_rows
from tamis.transforms.solver import Power, solve_rows

ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")


class Rule(Protocol):
    """Weights of a block of score rows (rows, n), where masked scores are `hidden`, and their derivative."""

    hidden: float
    """The score that masked entries get, so that they end with weight 0."""
    keeps_weights: bool
    """Whether the backward pass wants the weights kept, because they are dear to compute."""

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Tensors per row, broadcastable to (B, H, Lq, 1), that receive a gradient."""
        ...

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """Differentiable weights of 4-D scores."""
        ...

    def weights(self, scores: Tensor, values: list[Power | None]) -> Tensor:
        """Weights of a block, given its rows of the parameters; may overwrite the scores."""
        ...

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Score gradient for the weights' gradient, and a gradient per row (rows, 1) for each parameter wanted.

        `scores` holds the scores again, unless the weights were kept: then it is scratch.
        """
        ...


@dataclass(frozen=True)
class EntmaxRule:
    """alpha-entmax with e = alpha - 1: a number, or a tensor that broadcasts to (B, H, Lq, 1)."""

    e: Power
    hidden = -math.inf
    keeps_weights = True

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.e if isinstance(self.e, Tensor) else None,)

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return entmax_weights(scores, self.e)

    def weights(self, scores: Tensor, values: list[Power | None]) -> Tensor:
        return solve_rows(scores, self._power(values))[0]

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        power = self._power(values)
        d_scores = torch.empty_like(weights)
        vjp_rows(weights, power, torch.zeros_like(weights[:, :1]), grad, d_scores, scores)
        d_power = -(curvature(weights, power) * d_scores).sum(-1, keepdim=True) if wanted[0] else None
        return d_scores, [d_power]

    def _power(self, values: list[Power | None]) -> Power:
        return self.e if not isinstance(self.e, Tensor) else values[0]  # type: ignore[return-value]


@dataclass(frozen=True)
class ActivationRule:
    """Elementwise weights activation(score + bias) * scale: no row sum, so rows may be null.

    `bias` is a number; `scale`, if any, is a tensor per query, (B or 1, H or 1, Lq, 1), without a gradient.
    """

    activation: str
    bias: float = 0.0
    scale: Tensor | None = None
    hidden = 0.0
    keeps_weights = False

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.scale,)

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = self._activate(scores + self.bias)
        if self.scale is not None:
            weights = weights * self.scale
        return weights if keep is None else torch.where(keep, weights, 0.0)

    def weights(self, scores: Tensor, values: list[Power | None]) -> Tensor:
        weights = self._activate(scores.add_(self.bias) if self.bias else scores)
        return weights if values[0] is None else weights.mul_(values[0])

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        grad = grad if values[0] is None else grad.mul_(values[0])
        x = scores.add_(self.bias) if self.bias else scores
        return self._slope(x).mul_(grad), [None]

    def _activate(self, x: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                return x.relu()
            case "squared_relu":
                return x.relu().square()
            case "leaky_relu":
                return F.leaky_relu(x)
            case "gelu":
                return F.gelu(x)
            case "sigmoid":
                return x.sigmoid()
            case _:
                return x.clone()

    def _slope(self, x: Tensor) -> Tensor:
        match self.activation:
            case "relu":
                return torch.gt(x, 0.0, out=torch.empty_like(x))
            case "squared_relu":
                return x.relu().mul_(2.0)
            case "leaky_relu":
                return torch.gt(x, 0.0, out=torch.empty_like(x)).mul_(0.99).add_(0.01)
            case "gelu":
                density = (x.square() * -0.5).exp_().mul_(x / math.sqrt(2.0 * math.pi))
                return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(0.5).add_(density)
            case "sigmoid":
                s = x.sigmoid()
                return s * (1.0 - s)
            case _:
                return torch.ones_like(x)
