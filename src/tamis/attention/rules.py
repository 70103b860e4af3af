"""Scores to weights: what differs between entmax, ReLU and softpick attention, and nothing else.

A rule says what is computed, a call says of what, and a backend computes it.  `Entmax`, `Activation` and the others are
what users write; `bind` checks one against a call and gives the form that backends work with.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.attention.call import Call
from tamis.attention.masks import take
from tamis.transforms.entmax import alpha_gradient_rows, entmax_weights, vjp_rows
from tamis.transforms.parameters import number, row_parameter, switch, values_known
from tamis.transforms.solver import Power, Workspace, compute_dtype, solve_rows

ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")

_SHORT = 4096
"""Up to so many scores torch.softmax sums a row to rounding, and all that the solver adds is care for infinities."""


class Rule:
    """How scores become weights.  A new one needs `dense` alone: the whole matrix of weights is then in memory."""

    @property
    def hidden(self) -> float:
        """The score that masked entries get: -inf where that gives weight and slope 0, else 0 and both are erased."""
        return -math.inf

    def bind(self, call: Call) -> Rule:
        """Return the rule for this call, in the form that backends compute with; an error if it does not fit."""
        return self

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """Differentiable weights of scores (B, H, Lq, Lk), where what is masked, not `keep`, is `hidden`.

        Rows without a visible key must come out 0, as must what is masked.
        """
        raise NotImplementedError(f"{type(self).__name__} must define dense()")

    def margin(self) -> float | Tensor | None:
        """Say how far below the largest of its row a score surely has weight 0, for all heads or (H,); None if
        never."""
        return None

    def over_rows(self, change: Callable[[Tensor], Tensor]) -> Rule:
        """Return the same rule with its tensors per row, each as one that broadcasts to (B, H, Lq, 1), changed.

        A rule that holds such tensors must define it to work for some of the heads or queries of a call.
        """
        return self

    def of_heads(self, heads: slice) -> Rule:
        """Return the same rule for some of the heads."""
        return self.over_rows(lambda rows: take(rows, 1, heads))


def bind(rule: Rule, call: Call) -> Rule:
    """The rule for this call; what is no rule is refused."""
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a Rule, such as Entmax(1.5), got {rule!r}")
    return rule.bind(call)


class BlockRule(Rule):
    """A rule that also works in place on blocks of score rows (rows, n), in memory linear in the length."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the backward pass can do with the weights alone; they are then kept if memory allows."""
        raise NotImplementedError

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Tensors per row, broadcastable to (B, H, Lq, 1), that are saved for the backward pass."""
        raise NotImplementedError

    def with_parameters(self, values: Sequence[Tensor | None]) -> Self:
        """The same rule with other tensors, in the order of `parameters`; what has none keeps nothing alive."""
        raise NotImplementedError

    def weights(self, scores: Tensor, values: list[Power | None], out: Tensor, workspace: Workspace) -> None:
        """Write the weights of a block, given its rows of the parameters; the scores stay as they are."""
        raise NotImplementedError

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool], out: Tensor
    ) -> list[Tensor | None]:
        """Write the score gradient for the weights' gradient; return one per row (rows, 1) for each parameter wanted.

        `grad` may be overwritten, and `scores`: it holds the scores unless the weights were kept, else it is scratch.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Entmax(Rule):
    """alpha-entmax: exact zeros, and weights that sum to 1.

    Args:
        alpha: in [1, 2].  A number, one per query head (H,), or a tensor that broadcasts to (B, H, Lq, 1).  The number
            1 is `Softmax`.
    """

    alpha: float | Tensor = 1.5

    def bind(self, call: Call) -> BoundEntmax:
        e = row_parameter("alpha", self.alpha, 0.0, call.shape, call.query.dtype, 3, subtract=1.0)
        if isinstance(e, Tensor):
            if values_known(e) and e.numel() and not 0.0 <= e.min().item() <= e.max().item() <= 1.0:
                shown = f"{e.min().item() + 1:g} to {e.max().item() + 1:g}"
                raise ValueError(f"alpha must lie in [1, 2] for attention, got {shown}")
        elif not 0.0 <= e <= 1.0:
            raise ValueError(f"alpha must lie in [1, 2] for attention, got {self.alpha}")
        return BoundSoftmax(e) if not isinstance(e, Tensor) and e == 0.0 else BoundEntmax(e)

    def margin(self) -> float | Tensor | None:
        if isinstance(self.alpha, Tensor):
            return 1.0 / (self.alpha.double() - 1.0) if self.alpha.ndim <= 1 else None
        return 1.0 / (self.alpha - 1.0) if self.alpha > 1.0 else None

    def over_rows(self, change: Callable[[Tensor], Tensor]) -> Entmax:
        if not isinstance(self.alpha, Tensor) or self.alpha.ndim == 0:
            return self
        sizes = tuple(self.alpha.shape)
        sizes = (1, *sizes, 1, 1) if len(sizes) == 1 else (1,) * (4 - len(sizes)) + sizes
        return Entmax(change(self.alpha.reshape(sizes)))


@dataclass(frozen=True)
class Softmax(Rule):
    """Dense weights, through `F.scaled_dot_product_attention` where that agrees: `Entmax(1.0)` by its name."""

    def bind(self, call: Call) -> BoundSoftmax:
        return BoundSoftmax(0.0)


@dataclass(frozen=True)
class Activation(Rule):
    """Elementwise weights, activation(score + bias): nothing is normalised.

    Args:
        name: "relu", "squared_relu", "leaky_relu", "gelu", "identity" or "sigmoid".
        bias: added to every score, as in sigmoid attention, where about -log n is usual.
        per_count: divide the weights by the number of keys that the query sees.
        slope: of leaky relu below 0.
    """

    name: str = "relu"
    bias: float = 0.0
    per_count: bool = False
    slope: float = 0.01

    def bind(self, call: Call) -> BoundActivation:
        if not isinstance(self.name, str):
            raise TypeError(f"activation must be a name, one of {', '.join(ACTIVATIONS)}, got {self.name!r}")
        if self.name not in ACTIVATIONS:
            nearest = difflib.get_close_matches(self.name, ACTIVATIONS, 1, 0.0)[0]
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.name!r}; did you mean {nearest!r}?"
            )
        bias, slope = number("bias", self.bias), number("slope", self.slope)
        scale = None
        if switch("per_count", self.per_count):
            scale = 1.0 / call.counts().clamp(min=1).unsqueeze(-1).to(compute_dtype(call.query.dtype))
        return BoundActivation(self.name, bias, slope, scale)


@dataclass(frozen=True)
class Softpick(Rule):
    """Rectified softmax, ``relu(e^x - 1) / sum |e^x - 1|``: sparse weights whose sum is at most one.

    Args:
        eps: keeps rows of zero scores from 0 / 0.
    """

    eps: float = 1e-6

    def bind(self, call: Call) -> Softpick:
        number("eps", self.eps, low=0.0)
        return self

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        x = scores.masked_fill(scores == -math.inf, 0.0)  # e^0 - 1 = 0: hidden keys have no part in the sum
        if x.shape[-1] == 0:
            return x
        # Relative to the largest exponent, so that nothing overflows; expm1 where e^x - 1 would cancel.
        top = x.detach().amax(-1, keepdim=True).clamp(min=0.0)
        large = (x - top).exp() - (-top).exp()
        small = x.clamp(max=1.0).expm1() * (-top).exp()
        shifted = torch.where(x > 1.0, large, small)
        return shifted.relu() / (shifted.abs().sum(-1, keepdim=True) + self.eps)


# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundEntmax(BlockRule):
    """alpha-entmax with e = alpha - 1: a number, or a tensor that broadcasts to (B, H, Lq, 1)."""

    e: Power | None
    """None where the tensor was taken out, to be saved."""

    @property
    def keeps_weights(self) -> bool:
        return True

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.e if isinstance(self.e, Tensor) else None,)

    def with_parameters(self, values: Sequence[Tensor | None]) -> Self:
        return self if isinstance(self.e, float) else replace(self, e=values[0])

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        assert self.e is not None
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
class BoundSoftmax(BoundEntmax):
    """Entmax with e = 0 that torch's own attention may compute."""


@dataclass(frozen=True)
class BoundActivation(BlockRule):
    """Elementwise weights activation(score + bias) * scale: no row sum, so rows may be null."""

    name: str
    bias: float
    slope: float
    scale: Tensor | None
    """Per query, (B or 1, H or 1, Lq, 1), without a gradient."""

    @property
    def keeps_weights(self) -> bool:
        return self.name == "relu"  # its slope can be read off the weights

    @property
    def hidden(self) -> float:
        return -math.inf if self.name in ("relu", "squared_relu", "sigmoid") else 0.0

    def parameters(self) -> tuple[Tensor | None, ...]:
        return (self.scale,)

    def with_parameters(self, values: Sequence[Tensor | None]) -> Self:
        return self if values[0] is self.scale else replace(self, scale=values[0])

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights = self._activate(scores + self.bias)
        if self.scale is not None:
            weights = weights * self.scale
        return weights if keep is None else torch.where(keep, weights, 0.0)

    def weights(self, scores: Tensor, values: list[Power | None], out: Tensor, workspace: Workspace) -> None:
        x = scores + self.bias if self.bias else scores
        if self.name == "relu":
            torch.clamp(x, min=0.0, out=out)
        else:
            out.copy_(self._activate(x))
        if values[0] is not None:
            out.mul_(values[0])

    def backward(
        self, scores: Tensor, weights: Tensor, grad: Tensor, values: list[Power | None], wanted: list[bool], out: Tensor
    ) -> list[Tensor | None]:
        if self.name == "relu":
            torch.gt(weights, 0.0, out=out)
        else:
            out.copy_(self._derivative(scores.add_(self.bias) if self.bias else scores))
        out.mul_(grad)
        if values[0] is not None:
            out.mul_(values[0])
        return [None]

    def _activate(self, x: Tensor) -> Tensor:
        match self.name:
            case "relu":
                return x.relu()
            case "squared_relu":
                return x.relu().square()
            case "leaky_relu":
                return F.leaky_relu(x, self.slope)
            case "gelu":
                return F.gelu(x)
            case "sigmoid":
                return x.sigmoid()
            case _:
                return x.clone()

    def _derivative(self, x: Tensor) -> Tensor:
        match self.name:
            case "squared_relu":
                return x.relu().mul_(2.0)
            case "leaky_relu":
                return torch.gt(x, 0.0, out=torch.empty_like(x)).mul_(1.0 - self.slope).add_(self.slope)
            case "gelu":
                density = (x.square() * -0.5).exp_().mul_(x / math.sqrt(2.0 * math.pi))
                return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(0.5).add_(density)
            case "sigmoid":
                s = x.sigmoid()
                return s * (1.0 - s)
            case _:
                return torch.ones_like(x)
