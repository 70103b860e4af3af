"""What processes send each other, in as few messages as there are steps; differentiable, and counted in bytes.

A gradient goes back the way that its tensor came: what was gathered is summed, what was swapped is swapped back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tamis.parallel.layout import Layout
from tamis.transforms.solver import compute_dtype

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""By its name from torch 2.13 on, or the one before."""


class Exchange:
    """Messages between the processes of a group; None is a process by itself."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.layout = Layout(self.size, 0 if group is None else dist.get_rank(group))
        self.sent = 0
        """Bytes that this process has sent to others."""

    def gather(self, x: Tensor) -> Tensor:
        """What every process holds, (P, *shape)."""
        if self.size == 1 or x.numel() == 0:
            return x.expand(self.size, *x.shape)
        self._count(x, self.size - 1)
        out = x.new_empty(self.size * x.numel())
        _ALL_GATHER(out, x.contiguous().view(-1), group=self.group)
        return out.view(self.size, *x.shape)

    def swap(self, x: Tensor) -> Tensor:
        """Send row i of (P, ...) to process i; returns the row of this process from each."""
        if self.size == 1 or x.numel() == 0:
            return x
        self._count(x[0], self.size - 1)
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def maximum(self, x: Tensor) -> Tensor:
        """The largest of all processes."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def first(self, number: int, device: torch.device) -> int:
        """What the first process says."""
        return int(self.gather(torch.tensor(number, device=device)).flatten()[0].item()) if self.size > 1 else number

    def gather_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`gather` of tensors of one dtype in one message."""
        out = self.gather(torch.cat([x.reshape(-1) for x in tensors]))
        return self._unpacked(out, [x.shape for x in tensors])

    def swap_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`swap` of tensors (P, ...) of one dtype in one message."""
        out = self.swap(torch.cat([x.reshape(self.size, x[0].numel()) for x in tensors], 1))
        return self._unpacked(out, [x.shape[1:] for x in tensors])

    def _reduced(self, x: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return x
        self._count(x, 2 * (self.size - 1) / self.size)  # by a ring
        x = x.contiguous().clone()
        dist.all_reduce(x, operation, group=self.group)
        return x

    def _unpacked(self, rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Tensors (P, *shape) from rows that hold them end to end."""
        parts = rows.split([shape.numel() for shape in shapes], 1)
        return [part.reshape(self.size, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _count(self, x: Tensor, times: float) -> None:
        self.sent += round(times * x.numel() * x.element_size())


def whole(exchange: Exchange, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Whole sequences from the tokens, along `dim`, of every process; gradients are summed over processes."""
    return _Whole.apply(exchange, dim, *tensors)


def to_heads(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some tokens of all heads (B, H, L / P, D) for all tokens of some heads (B, H / P, L, D)."""
    return _Swapped.apply(exchange, True, *tensors)


def to_tokens(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The reverse."""
    return _Swapped.apply(exchange, False, *tensors)


def summed(exchange: Exchange, x: Tensor) -> Tensor:
    """The sum over all processes, each of which goes on with it: gradients are summed as well."""
    return _Summed.apply(exchange, x)


def used_by_all(exchange: Exchange, x: Tensor) -> Tensor:
    """x, which all processes hold alike, for what each of them does with it: gradients are summed."""
    return _UsedByAll.apply(exchange, x)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _Summed.apply(ctx.exchange, grad)


class _UsedByAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _Summed.apply(ctx.exchange, grad)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.dim = exchange, dim
        return tuple(exchange.layout.join(parts, dim) for parts in exchange.gather_all(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Not a reduction: this sends as much, sums in the order of processes, and in fp32.
        parts = ctx.exchange.swap_all([ctx.exchange.layout.split(grad, ctx.dim) for grad in grads])
        sums = [part.to(compute_dtype(part.dtype)).sum(0).to(part.dtype) for part in parts]
        return (None, None, *sums)


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, by_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.by_heads = exchange, by_heads
        layout = exchange.layout
        if by_heads:
            parts = exchange.swap_all([x.unflatten(1, (exchange.size, -1)).movedim(1, 0) for x in tensors])
            return tuple(layout.join(part, 2) for part in parts)
        parts = exchange.swap_all([layout.split(x, 2) for x in tensors])
        return tuple(part.movedim(0, 1).flatten(1, 2) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *_Swapped.apply(ctx.exchange, not ctx.by_heads, *grads))
