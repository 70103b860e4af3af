"""Context parallelism: exact attention over a sequence of which each process holds some tokens.

A threshold is a root over the whole row of scores, so partial outputs cannot be merged as those of softmax can.  Two
ways give the same output, and send different amounts:

    heads   every process gets all tokens of some heads, and gives back their outputs: an all-to-all before, one after
    keys    every process keeps its queries and gathers the keys and values of all

Any backend computes what then lies in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tamis.attention.call import NO_DROPOUT, Call, Dropout, Options, Part, check_call
from tamis.attention.rules import Entmax, Rule
from tamis.functional import sharding
from tamis.parallel.cost import Layer
from tamis.parallel.exchange import Exchange, to_heads, to_tokens, whole
from tamis.parallel.mesh import exchange_of
from tamis.parallel.whole import Settings, Sight, attend, counts, gathered, rule_of_heads, rule_of_queries, share_sight
from tamis.settings import choose

WAYS = ("auto", "heads", "keys")

_ENTMAX15 = Entmax(1.5)


class ContextParallel(sharding.Sharding):
    """Shares sequences between the processes of one dimension of a mesh.

    As a context manager it does so for all attention within, of functions, layers and models of this library, forward
    and backward::

        with ContextParallel(mesh) as context:
            logits = model(context.take(tokens, 1))
            loss = F.cross_entropy(logits.flatten(0, 1), context.take(labels, 1).flatten())
            loss.backward()

    Each process computes the part of the loss that its tokens have, and the part of each weight's gradient that comes
    from them: as in data parallelism, the sum over processes is the whole, which DDP and FSDP2 over all processes take
    care of, or `sum_gradients`.

    Args:
        mesh: one with a dimension named `dim`, or with one dimension; None is a single process.
        context: "heads", "keys", or "auto": the one that sends less.
        dim: of the mesh.
        length: tokens of the sequences, where that is no multiple of twice the processes: `take` fills them up, and
            what it fills in is hidden.
    """

    def __init__(
        self,
        mesh: DeviceMesh | Exchange | None,
        context: str = "auto",
        *,
        dim: str = "context",
        length: int | None = None,
    ) -> None:
        choose("context", context, WAYS)
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.context, self.length = context, length
        self.exchange = exchange_of(mesh, dim)
        self.layout = self.exchange.layout

    def of_length(self, length: int | None) -> ContextParallel:
        """Return the same for sequences of another length, or of one that is known to divide."""
        other = copy(self)
        other.length = length
        return other

    def __enter__(self) -> ContextParallel:
        sharding.start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sharding.stop()

    def take(self, x: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """This process's tokens of a whole sequence that every process has; `fill` brings it to an even share."""
        if self.length is not None and x.shape[dim] != self.length:
            raise ValueError(f"length is {self.length}, got a sequence of {x.shape[dim]} tokens")
        return self.layout.take(x, dim, fill)

    @torch.no_grad()
    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence from what each process has of it, in every process; without a gradient."""
        joined = gathered(self.exchange, x, dim % x.ndim)
        return joined if self.length is None else joined.narrow(dim, 0, min(self.length, joined.shape[dim]))

    def places(self, length: int, device: torch.device) -> Tensor:
        own = self.layout.places(length, device)[None]
        if self.length is not None and self.layout.padded(self.length) == length * self.layout.size:
            own = own.clamp(max=self.length - 1)  # what was filled in has no place of its own
        return own

    def whole(self, x: Tensor, dim: int) -> Tensor:
        return gathered(self.exchange, x, dim)

    def way(self, heads: int, key_heads: int) -> str:
        """Say how a call with so many heads of queries and keys is computed: "heads" or "keys"."""
        size = self.layout.size
        if self.context == "auto":
            # How long the sequence is and how wide heads are changes nothing: sizes that divide.
            layer = Layer(length=size, size=size, heads=heads, key_heads=key_heads, head_dim=size)
            return layer.cheaper(torch.is_grad_enabled())
        if self.context == "heads" and key_heads % size:
            raise ValueError(
                f'context="heads" divides the heads of keys, {key_heads}, by the {size} processes of a sequence, and '
                f'they do not divide: context="keys" takes any number'
            )
        return self.context

    @torch.compiler.disable
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        rule: Rule = _ENTMAX15,
        generator: torch.Generator | None = None,
        backend: str = "auto",
        **options: Unpack[Options],
    ) -> Tensor:
        """:func:`tamis.attention` of this process's queries (B, H, L / P, D) within the whole sequence.

        Arguments are those of this process's tokens, but: `attn_mask` has columns for all keys if it has rows for
        queries; `key_lengths` and `cu_seqlens` are those of the whole sequence.
        """
        call = check_call(
            query, key, value, None, dropout_p, False, scale, enable_gqa, generator=generator
        )  # autocast included: what is sent is in the dtype that is computed in
        sight = share_sight(self.exchange, call, attn_mask, bool(is_causal), self.length, dict(options))
        settings = Settings(scale=call.scale, enable_gqa=enable_gqa, backend=backend)
        dropout = self._shared_dropout(call.dropout, query.device)
        by_heads = self.way(query.shape[1], key.shape[1]) == "heads"
        return (self._by_heads if by_heads else self._by_keys)(call, sight, rule, settings, dropout)

    @torch.compiler.disable
    def visible_counts(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
        **options: Unpack[Options],
    ) -> Tensor:
        """Count how many keys of the whole sequence each of this process's queries sees, (B or 1, H or 1, L / P)."""
        call = check_call(query, key, None, enable_gqa=enable_gqa)
        sight = share_sight(self.exchange, call, attn_mask, bool(is_causal), self.length, dict(options))
        settings = Settings(scale=1.0, enable_gqa=enable_gqa)
        parts = []
        for local, place in self.layout.chunks(query.shape[2]):
            stop, arguments = sight.of_chunk(local, place)
            keys = key.new_empty(()).expand(*key.shape[:2], stop, key.shape[3])  # of the right shape, and of no size
            parts.append(counts(query[:, :, local], keys, settings, arguments))
        return torch.cat(parts, -1)

    @torch.no_grad()
    def sum_gradients(self, parameters: nn.Module | Sequence[Tensor]) -> None:
        """Add up, over the processes of a sequence, the gradients of weights that all of them hold."""
        tensors = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        for parameter in tensors:
            if parameter.grad is not None:
                own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                own.copy_(self.exchange.total(own))

    def _by_heads(self, call: Call, sight: Sight, rule: Rule, settings: Settings, dropout: Dropout) -> Tensor:
        query, key, value = to_heads(self.exchange, call.query, call.key, call.value)
        width = query.shape[1]
        heads = slice(self.layout.rank * width, (self.layout.rank + 1) * width)
        rule = rule_of_heads(rule, self.exchange, heads)
        dropout = _of_part(dropout, heads.start, 0)
        out = attend(query, key, value, rule, settings, dropout, sight.of_heads(heads))
        return to_tokens(self.exchange, out)[0]

    def _by_keys(self, call: Call, sight: Sight, rule: Rule, settings: Settings, dropout: Dropout) -> Tensor:
        key, value = whole(self.exchange, 2, call.key, call.value)
        outputs = []
        with self._not_kept(call, (key, value)):
            for local, place in self.layout.chunks(call.query.shape[2]):
                stop, arguments = sight.of_chunk(local, place)
                part = _of_part(dropout, 0, place.start)
                own = rule_of_queries(rule, local)
                keys = slice(0, stop)
                outputs.append(
                    attend(call.query[:, :, local], key[:, :, keys], value[:, :, keys], own, settings, part, arguments)
                )
        return torch.cat(outputs, 2)

    def _not_kept(self, call: Call, tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
        """Keep this process's keys and values for the backward pass, not those of all, and gather them anew there."""
        if self.layout.size == 1 or not torch.is_grad_enabled():
            return nullcontext()
        own, layout, exchange = (call.key.detach(), call.value.detach()), self.layout, self.exchange

        def gather() -> list[Tensor]:
            return [layout.join(parts, 2) for parts in exchange.gather_all(own)]

        again = _Again(tensors, gather)
        return torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)

    def _shared_dropout(self, dropout: Dropout, device: torch.device) -> Dropout:
        """One seed for all processes of a sequence: each then drops its part of what the whole call drops."""
        if dropout.p == 0.0:
            return NO_DROPOUT
        source = torch.device("cpu") if dropout.generator is None else dropout.generator.device
        seed = int(torch.randint(2**62, (), generator=dropout.generator, device=source).item())
        return Dropout(dropout.p, None, Part(self.exchange.first(seed, device)))


class _Again:
    """Tensors that autograd saves as views of some that are gathered anew when they are needed."""

    def __init__(self, tensors: tuple[Tensor, ...], gather: Callable[[], list[Tensor]]) -> None:
        self.numbers = {x.untyped_storage().data_ptr(): number for number, x in enumerate(tensors)}
        self.gather = gather
        self.tensors: list[Tensor] | None = None

    def pack(self, x: Tensor) -> Any:
        number = self.numbers.get(x.untyped_storage().data_ptr())
        return x if number is None else (number, x.shape, x.stride(), x.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, *view = packed
        if self.tensors is None:  # they stay until the graph goes, which this is a part of
            self.tensors = self.gather()
        return self.tensors[number].as_strided(*view)


def _of_part(dropout: Dropout, head: int, query: int) -> Dropout:
    return dropout if dropout.part is None else dropout._replace(part=Part(dropout.part.seed, head, query))
