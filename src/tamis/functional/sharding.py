"""Sequences of which each process holds some tokens, and layers of which each holds some heads.

`tamis.parallel` defines both.  The first it sets for the time of a `with` block, and attention functions, layers and
models ask it; the second it hands to what belongs to a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Sharding:
    """Attention between tokens that lie in several processes; all lengths that it is given are of this one's share."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return what :func:`tamis.attention` gives for these queries within the whole sequence."""
        raise NotImplementedError

    def visible_counts(self, query: Tensor, key: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Count how many keys of the whole sequence each of these queries sees."""
        raise NotImplementedError

    def places(self, length: int, device: torch.device) -> Tensor:
        """Return where in the whole sequence this process's tokens are, (1, length)."""
        raise NotImplementedError

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return what all processes hold, in the order of the sequence."""
        raise NotImplementedError


class Heads:
    """The heads of a layer that one process has, of `size` that have as many each."""

    size: int

    def split(self, module: nn.Module, *names: str, dim: int = 0) -> None:
        """Of these tensors of `module`, leave it those of its heads: an even part of the dimension `dim`."""
        raise NotImplementedError

    def choose(self, module: nn.Module, *names: str, blocks: int) -> None:
        """The same where the first dimension holds all heads several times, block after block."""
        raise NotImplementedError

    def mean(self, x: Tensor) -> Tensor:
        """Over the channels of all heads, of which this process has some: (..., channels) to (..., 1)."""
        raise NotImplementedError


# One for the process, not one for each thread: what is computed anew in a backward pass runs in a thread of autograd's.
_active: Sharding | None = None


def active() -> Sharding | None:
    """Who is asked now; None where all tokens are here."""
    return _active


def start(sharding: Sharding) -> None:
    """Ask `sharding` from now on."""
    global _active
    if _active is not None:
        raise RuntimeError("sequences are sharded already: contexts of tamis.parallel do not nest")
    _active = sharding


def stop() -> None:
    """Ask nobody from now on."""
    global _active
    _active = None


def places(length: int, past: int, device: torch.device) -> Tensor:
    """Where in their sequence so many tokens are that follow `past` others, (1, length)."""
    if _active is not None:
        return _active.places(length, device)
    return torch.arange(past, past + length, device=device)[None]


def refuse_shards(function: str) -> None:
    """Raise where a function would look at this process's tokens only."""
    if _active is not None:
        raise RuntimeError(
            f"{function} sees only the tokens of this process: call it outside of tamis.parallel's context"
        )
