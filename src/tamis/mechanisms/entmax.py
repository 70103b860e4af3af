"""Adaptively sparse attention: one alpha per head, learned by gradient.

Adaptively Sparse Transformers, Correia, Niculae and Martins 2019, https://arxiv.org/abs/1909.00015

    alpha = low + (high - low) sigmoid(a),   a ~ N(0, 1)

Deviations: the paper's code clamps alpha itself to [1.01, 2], which stops its gradient at the ends.  Here the raw
value a is held where the sigmoid still has a slope, so a head at either end can always turn back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tamis.attention.rules import Entmax, Rule
from tamis.functional.sharding import Heads
from tamis.mechanisms.base import Inputs, Mechanism, span
from tamis.precision import KeepsPrecision
from tamis.settings import check_heads
from tamis.transforms.parameters import values_known

LIMIT = 8  # an int: torch.compile may take a float for a symbol
"""Largest magnitude of the raw value: alpha comes within 0.04 % of its range's ends, the slope never below 3e-4."""


class LearnedAlpha(KeepsPrecision):
    """A tensor of alphas in (low, high), each learned.

    Args:
        shape: an int or a tuple; `LearnedAlpha(8)` is one alpha per head of eight.  At least one dimension.
        low, high: the open range; 1 to 2 spans softmax to sparsemax.
        init: "normal" draws the raw values from N(0, 1), as the paper does; a number in [low, high] starts there.

    Call it to get the alphas: ``entmax(scores, learned_alpha())``.  It stays in fp32 when the model around it is cast
    to half precision: in bfloat16 the sigmoid saturates just above a raw value of 6.
    """

    limit = LIMIT

    def __init__(
        self, shape: int | tuple[int, ...], low: float = 1.0, high: float = 2.0, init: str | float = "normal"
    ) -> None:
        super().__init__()
        sizes = (shape,) if isinstance(shape, int) else shape
        if not isinstance(sizes, tuple | list) or not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"shape must be an int or a tuple of ints, got {shape!r}")
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape must not be negative, got {shape!r}")
        self.shape = tuple(sizes)
        if len(self.shape) == 0:
            raise ValueError("shape must have at least one dimension, use 1 for a single alpha")
        for name, bound in (("low", low), ("high", high)):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise TypeError(f"{name} must be a number, got {type(bound).__name__}")
        if not 0.0 < low < high < math.inf:
            raise ValueError(f"the range needs 0 < low < high, got low={low}, high={high}")
        if isinstance(init, bool) or not isinstance(init, str | int | float):
            raise TypeError(f'init must be "normal" or a number, got {type(init).__name__}')
        if init != "normal" if isinstance(init, str) else not low <= init <= high:
            raise ValueError(f'init must be "normal" or a number in [{low}, {high}], got {init!r}')
        self.low, self.high, self.init = float(low), float(high), init
        self.raw = nn.Parameter(torch.empty(self.shape, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if isinstance(self.init, str):
                self.raw.normal_()
            else:
                share = (self.init - self.low) / (self.high - self.low)
                self.raw.fill_(math.log(share / (1.0 - share)) if 0.0 < share < 1.0 else math.copysign(99, share - 0.5))
            self.raw.clamp_(-LIMIT, LIMIT)

    def forward(self) -> Tensor:
        if self.training and torch.is_grad_enabled():
            # An optimiser may have stepped past the limit: bring the value back to where the gradient lives.
            with torch.no_grad():
                self.raw.clamp_(-LIMIT, LIMIT)
        return self.low + (self.high - self.low) * torch.sigmoid(_InwardClamp.apply(self.raw))

    def extra_repr(self) -> str:
        with torch.no_grad():
            alphas = self.low + (self.high - self.low) * torch.sigmoid(self.raw.detach().clamp(-LIMIT, LIMIT))
        return f"shape={self.shape}, low={self.low}, high={self.high}, alpha={span(alphas)}"


class EntmaxAttention(KeepsPrecision, Mechanism):
    """alpha-entmax attention.

    Args:
        num_heads: query heads.
        alpha: "learn" for one learned alpha per head, as in the paper; a number in [1, 2]; a tensor of them, (H,) or
            broadcastable to (B, H, Lq, 1); or a `LearnedAlpha` of one's own, for another range.  2 is sparsemax.
        start: where alphas to "learn" start: "normal", or a number, such as 1.05 in place of a trained softmax.
    """

    has_alphas = True

    def __init__(
        self,
        num_heads: int,
        alpha: str | float | Tensor | LearnedAlpha = "learn",
        *,
        start: str | float | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads)
        self.num_heads = num_heads
        if isinstance(alpha, str) and alpha == "learn":
            alpha = LearnedAlpha(num_heads, init="normal" if start is None else start)
        elif start is not None:
            raise ValueError(f'start is where alphas to "learn" start, got start={start} and alpha={alpha}')
        _check_alpha(alpha, num_heads)
        if isinstance(alpha, Tensor) and not isinstance(alpha, nn.Parameter):
            self.register_buffer("alpha", alpha)
        else:
            self.alpha = alpha if isinstance(alpha, nn.Module | Tensor) else float(alpha)

    def rule(self, inputs: Inputs) -> Rule:
        if (moved := self.moved("alpha")) is not None:
            return Entmax(moved)
        return Entmax(self.alpha() if isinstance(self.alpha, nn.Module) else self.alpha)

    def movable(self) -> dict[str, float]:
        return {"alpha": self.alpha} if isinstance(self.alpha, float) else {}

    def learned_alphas(self) -> Tensor | None:
        if isinstance(self.alpha, LearnedAlpha):
            return self.alpha()
        return self.alpha if isinstance(self.alpha, nn.Parameter) else None

    def split_heads(self, heads: Heads) -> None:
        self.num_heads //= heads.size
        if isinstance(self.alpha, float) or (dim := _dim_of_heads(tuple(self.alpha.shape))) is None:
            return
        if isinstance(self.alpha, LearnedAlpha):
            heads.split(self.alpha, "raw", dim=dim)
            self.alpha.shape = tuple(self.alpha.raw.shape)
        else:
            heads.split(self, "alpha", dim=dim)

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.alpha, nn.Module) else f", alpha={self.alpha}"
        return f"num_heads={self.num_heads}{fixed}"


def _check_alpha(alpha: object, num_heads: int) -> None:
    """Raise unless attention of so many heads can take it: better here than at the first batch."""
    if isinstance(alpha, LearnedAlpha):
        low, high = alpha.low, alpha.high
    elif isinstance(alpha, Tensor):
        if not alpha.is_floating_point():
            raise TypeError(f"alpha must be a floating-point tensor, got {alpha.dtype}")
        known = values_known(alpha) and alpha.numel() > 0
        low, high = (alpha.min().item(), alpha.max().item()) if known else (1.0, 2.0)
    elif isinstance(alpha, int | float) and not isinstance(alpha, bool):
        low = high = float(alpha)
    else:
        raise ValueError(f'alpha must be "learn", a number, a tensor or a LearnedAlpha, got {alpha!r}')
    if not 1.0 <= low <= high <= 2.0:
        shown = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        raise ValueError(f"alpha must lie in [1, 2] for attention, got {shown}")
    if isinstance(alpha, LearnedAlpha | Tensor):
        _check_shape(tuple(alpha.shape), num_heads)


def _check_shape(shape: tuple[int, ...], num_heads: int) -> None:
    """One dim is one alpha per head; otherwise they are the last ones of (B, H, Lq, 1)."""
    heads = shape[0] if len(shape) == 1 else shape[-3] if len(shape) >= 3 else 1
    shared = len(shape) != 1 and heads == 1
    if len(shape) > 4 or not (heads == num_heads or shared) or (len(shape) > 1 and shape[-1] != 1):
        raise ValueError(
            f"alpha must be one per head, ({num_heads},), or broadcast to (B, {num_heads}, Lq, 1), got shape {shape}"
        )


def _dim_of_heads(shape: tuple[int, ...]) -> int | None:
    """Where alphas of a checked shape have their heads; None where all heads share them."""
    dim = 0 if len(shape) == 1 else len(shape) - 3
    return dim if dim >= 0 and (len(shape) == 1 or shape[dim] > 1) else None


class _InwardClamp(torch.autograd.Function):
    """clamp(x, -LIMIT, LIMIT) whose gradient passes inside, and outside when a descent step would lead back in."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(-LIMIT, LIMIT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)  # not x, which another call may change in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (clamped,) = ctx.saved_tensors
        return torch.where(clamped * g.sign() <= -LIMIT, 0.0, g)
