"""Steps captured as CUDA graphs, one for each shape of a batch.

A step is thousands of short kernels.  For all but large models the host takes longer to launch them than the GPU to run
them; a graph launches them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MOST_GRAPHS = 512
"""What comes in yet other shapes runs without a graph."""


class Part(Protocol):
    """What goes through the model at once, and can lie in memory that stays where it is."""

    def room(self, device: torch.device) -> Any:
        """Memory for this part and for others of about its shape."""

    def room_shape(self) -> tuple[int, ...]:
        """Parts with the same fit into one room."""

    def fill(self, part: Any) -> None:
        """Take over what another part holds, with padding around it; neither trains differently."""


@dataclass
class _Held:
    """A part and the factor of its loss in memory of their own, and the graph that works on them."""

    part: Any
    factor: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    loss: Tensor | None = None
    runs: int = field(default=0)


class GraphedBackward:
    """`backward(part, factor)`, which adds to gradients and returns a loss, replayed where a shape comes again.

    The gradients must be there before the first replay and stay the same tensors: zero them, do not drop them.
    """

    def __init__(
        self, backward: Callable[[Any, Tensor], Tensor], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self.backward, self.parameters, self.device = backward, list(parameters), device
        self._held: dict[tuple[int, ...], _Held] = {}
        self._pool: Any = None

    def __call__(self, part: Part, factor: float) -> Tensor:
        held = self._fill(part, factor)
        held.runs += 1
        # The first time compiles kernels, and models where they are compiled, and makes gradients: a capture must not.
        if held.runs == 1 or (held.graph is None and self._full()):
            return self.backward(held.part, held.factor)
        if held.graph is None:
            self._capture(held)
        assert held.graph is not None
        assert held.loss is not None
        held.graph.replay()
        return held.loss

    def _fill(self, part: Part, factor: float) -> _Held:
        shape = part.room_shape()
        held = self._held.get(shape)
        if held is None:
            held = self._held[shape] = _Held(part.room(self.device), torch.empty((), device=self.device))
        held.part.fill(part)
        held.factor.fill_(factor)
        return held

    def _full(self) -> bool:
        return sum(held.graph is not None for held in self._held.values()) >= MOST_GRAPHS

    def _capture(self, held: _Held) -> None:
        held.graph = torch.cuda.CUDAGraph()
        # The thread that prefetches pins memory meanwhile, which the default mode takes for an error of this thread.
        with torch.cuda.graph(held.graph, pool=self._pool, capture_error_mode="thread_local"):
            held.loss = self._added_at_once(held)
        self._pool = held.graph.pool()  # one after the other they can use the same memory

    def _added_at_once(self, held: _Held) -> Tensor:
        """`backward`, with its gradients added in a few kernels instead of one for each parameter."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.backward(held.part, held.factor)
        pairs = [(own, p.grad) for own, p in zip(kept, self.parameters, strict=True) if p.grad is not None]
        torch._foreach_add_(*(list(side) for side in zip(*pairs, strict=True)))
        for parameter, own in zip(self.parameters, kept, strict=True):
            parameter.grad = own
        return loss
