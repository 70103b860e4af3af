"""Attention weights row by row: what every figure is made of.

Weights are (..., H, Lq, Lk), those before dropout.  `visible` is boolean and broadcastable to them: True where the
query may see the key.  A query that sees no key, such as padding, does not count anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Sums = tuple[Tensor, Tensor]
"""Totals and how much was counted, fp64: sums of many batches are those of all their rows."""


class Rows(NamedTuple):
    """The rows of some weights, checked."""

    p: Tensor
    """(B, H, Lq, Lk) fp64: each row scaled to sum 1, by magnitude where weights may be negative; a null row is 0."""
    visible: Tensor
    """(B, H, Lq, Lk)"""
    keys: Tensor
    """(B, H, Lq): how many keys the query sees."""
    support: Tensor
    """(B, H, Lq): how many of them have a non-zero weight."""

    @classmethod
    def of(cls, weights: Tensor, visible: Tensor | None = None) -> Rows:
        weights, visible = _checked(weights, visible)
        mass = torch.where(visible, weights, 0.0).abs().double()
        total = mass.sum(-1, keepdim=True)
        p = mass / torch.where(total > 0.0, total, 1.0)
        return cls(p, visible, visible.sum(-1), ((weights != 0.0) & visible).sum(-1))

    @property
    def seen(self) -> Tensor:
        """(B, H, Lq): rows that see a key."""
        return self.keys > 0

    @property
    def alive(self) -> Tensor:
        """(B, H, Lq): rows that attend to something."""
        return self.support > 0

    @property
    def choosing(self) -> Tensor:
        """(B, H, Lq): rows that see two keys or more; one with a single key has nothing to choose from."""
        return self.keys > 1


class SumsBySite(dict[str, dict[str, Sums]]):
    """Sums by site and figure, on the CPU, to which those of more batches are added."""

    def add(self, site: str, found: Mapping[str, Sums]) -> None:
        own = self.setdefault(site, {})
        for name, (total, count) in found.items():
            before = own.get(name, (total.new_zeros(()).cpu(), count.new_zeros(()).cpu()))
            if before[0].ndim and before[0].shape != total.shape:
                raise ValueError(f"{site} had {len(before[0])} heads so far, now {len(total)}")
            own[name] = (total.cpu() + before[0], count.cpu() + before[1])


def over_rows(values: Tensor, counted: Tensor) -> Sums:
    """Totals per head, (H,), of values (B, H, Lq) over the rows that count."""
    return torch.where(counted, values.double(), 0.0).sum((0, 2)), counted.double().sum((0, 2))


def ratio(sums: Sums) -> Tensor:
    """The mean; 0 where nothing was counted."""
    total, count = sums
    return total / count.clamp(min=1.0)


def entropy_of(p: Tensor) -> Tensor:
    """Shannon's, in nats, over the last dim."""
    return -torch.special.xlogy(p, p).sum(-1)


def _checked(weights: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as (B, H, Lq, Lk), the mask possibly broadcast."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a floating-point tensor, got {kind}")
    if weights.ndim < 3:
        raise ValueError(f"weights must be (..., heads, queries, keys), got shape {tuple(weights.shape)}")
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=weights.device)
    elif not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"visible must be a boolean tensor, True where a query sees a key, got {kind}")
    try:
        visible = visible.expand(weights.shape)
    except RuntimeError as error:
        shapes = f"{tuple(visible.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"visible must broadcast to the weights, got shapes {shapes}") from error
    shape = (-1, *weights.shape[-3:]) if weights.numel() else (weights.shape[:-3].numel(), *weights.shape[-3:])
    return weights.detach().reshape(shape), visible.reshape(shape)
