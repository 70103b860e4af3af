"""Scores to weights inside attention: what differs between entmax and ReLU attention, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.transforms.entmax import alpha_gradient_rows, entmax_weights, vjp_rows
from tamis.transforms.solver import Power, Workspace, solve_rows

ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")

_SHORT = 4096
"""Up to so many scores torch.softmax sums a row to rounding, and all that the solver adds is care for infinities."""


class Rule(Protocol):
    """Weights of a block of score rows (rows, n), where masked scores are `hidden`, and their derivative."""

    @property
    def hidden(self) -> float:
        """The score that masked entries get: -inf where that gives weight and slope 0, else 0 and both are erased."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether the backward pass can do with the weights alone; they are then kept if memory allows."""
        ...

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Tensors per row, broadcastable to (B, H, Lq, 1), that receive a gradient."""
        ...

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """Differentiable weights of 4-D scores."""
        ...

    def weights(self, scores: Tensor, values: list[Power | None], out: Tensor, workspace: Workspace) -> None:
        """Write the weights of a block, given its rows of the parameters; the scores stay as they are."""
        ...

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool], out: Tensor
    ) -> list[Tensor | None]:
        """Write the score gradient for the weights' gradient; return one per row (rows, 1) for each parameter wanted.

        `grad` may be overwritten, and `scores`: it holds the scores unless the weights were kept, else it is scratch.
        """
        ...


@dataclass(frozen=True)
class EntmaxRule:
    """alpha-entmax with e = alpha - 1: a number, or a tensor that broadcasts to (B, H, Lq, 1)."""

    e: Power

    @property
    def keeps_weights(self) -> bool:
        return True

    @property
    def hidden(self) -> float:
        return -math.inf

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.e if isinstance(self.e, Tensor) else None,)

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return entmax_weights(scores, self.e)

    def weights(self, scores: Tensor, values: list[Power | None], out: Tensor, workspace: Workspace) -> None:
        power = self._power(values)
        if not isinstance(power, Tensor) and power == 0.0 and scores.shape[-1] <= _SHORT:
            torch.softmax(scores, -1, out=out)
            if not math.isnan(out.sum().item()):  # else there are rows that the solver knows to treat
                return
        solve_rows(scores, power, out, workspace)

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool], out: Tensor
    ) -> list[Tensor | None]:
        power = self._power(values)
        vjp_rows(weights, power, torch.zeros_like(weights[:, :1]), grad, out, scores)
        return [alpha_gradient_rows(weights, power, out, (scores, grad)) if wanted[0] else None]

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

    @property
    def keeps_weights(self) -> bool:
        return self.activation == "relu"  # its slope can be read off the weights

    @property
    def hidden(self) -> float:
        return -math.inf if self.activation in ("relu", "squared_relu", "sigmoid") else 0.0

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.scale,)

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = self._activate(scores + self.bias)
        if self.scale is not None:
            weights = weights * self.scale
        return weights if keep is None else torch.where(keep, weights, 0.0)

    def weights(self, scores: Tensor, values: list[Power | None], out: Tensor, workspace: Workspace) -> None:
        x = scores + self.bias if self.bias else scores
        if self.activation == "relu":
            torch.clamp(x, min=0.0, out=out)
        else:
            out.copy_(self._activate(x))
        if values[0] is not None:
            out.mul_(values[0])

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool], out: Tensor
    ) -> list[Tensor | None]:
        if self.activation == "relu":
            torch.gt(weights, 0.0, out=out)
        else:
            out.copy_(self._slope(scores.add_(self.bias) if self.bias else scores))
        out.mul_(grad)
        if values[0] is not None:
            out.mul_(values[0])
        return [None]

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
