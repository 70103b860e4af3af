"""An attention layer: projections around a mechanism, with positions and a cache."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tamis.attention.masks import segments_at
from tamis.functional.sharding import places, refuse_shards
from tamis.mechanisms import Mechanism, SoftmaxAttention
from tamis.nn.cache import AttentionCache
from tamis.positions import NoPE, Position, position_rows
from tamis.precision import for_products
from tamis.settings import check_heads

FAR = 8192
"""Cached keys from which on it pays to ask which of them an ALiBi bias puts out of reach."""


class Attention(nn.Module):
    """Multi-head attention under the contract of `tamis.functional`; returns a tensor.

    Args:
        embed_dim: width of the input and output.
        num_heads: query heads.
        mechanism: how scores become weights, e.g. ``EntmaxAttention(num_heads)``; softmax by default.
        position: rotates queries and keys or biases the scores; nothing by default.
        num_kv_heads: heads of keys and values, each shared by a group of query heads; as many by default.
        head_dim: embed_dim // num_heads by default.
        memory_dim: width of what cross-attention reads; embed_dim by default.
        bias: whether the projections have one.
        dropout: of the weights, in training.
        initial_spread: draws the projections so that inputs of unit variance start with scores of this standard
            deviation; by default they start as `nn.Linear` does.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mechanism: Mechanism | None = None,
        position: Position | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        memory_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        initial_spread: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, embed_dim if head_dim is None else None)
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {head_dim}")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie in [0, 1], got {dropout}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.dropout = num_heads, num_kv_heads, dropout
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.mechanism = mechanism_of_layer(mechanism, embed_dim, num_heads, self.head_dim)
        self.position = NoPE() if position is None else position
        self.position.check_layer(num_heads, self.head_dim)
        memory_dim = embed_dim if memory_dim is None else memory_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias)
        if initial_spread is not None:
            start_with_spread(self, initial_spread)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend from x (B, Lq, embed_dim) to itself, or to `memory` (B, Lk, memory_dim).

        Args:
            attn_mask: boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk).
            key_mask: boolean (B, Lk), False for padding; with a cache it covers all cached keys.
            positions: of the queries, (Lq,) or (B or 1, Lq); by default they follow what is cached.
            cache: for self-attention it grows by x; for cross-attention it is filled once and then read.
            options: further keyword arguments of :func:`tamis.entmax_attention`, such as `window`.
        """
        query, key, value, arguments = self._prepare(x, memory, attn_mask, key_mask, positions, cache, options)
        dropout_p = self.dropout if self.training else 0.0
        if cache is not None and not options and self._reach_is_bounded(query, cache, arguments):
            arguments["page_norms"] = cache.page_norms
        context = self.mechanism(query, key, value, hidden=x, is_causal=is_causal, dropout_p=dropout_p, **arguments)
        return self.out_proj(self.mechanism.merge(context))

    def weights(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        positions: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the weights (B, H, Lq, Lk) that `forward` would use."""
        query, key, _, arguments = self._prepare(x, memory, attn_mask, key_mask, positions, None, options)
        return self.mechanism.weights(query, key, hidden=x, is_causal=is_causal, **arguments)

    def score_projections(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases that make queries, and those that make keys."""
        return [*self.q_proj.parameters()], [*self.k_proj.parameters()]

    def _prepare(
        self,
        x: Tensor,
        memory: Tensor | None,
        attn_mask: Tensor | None,
        key_mask: Tensor | None,
        positions: Tensor | None,
        cache: AttentionCache | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Queries, all keys and values, and the keyword arguments of the mechanism."""
        x, memory = for_products(x), None if memory is None else for_products(memory)
        query = self._split(self.q_proj(x), self.num_heads)
        arguments = dict(options)
        if positions is not None:
            positions = position_rows(positions, x.shape[0], x.shape[1])
        if cache is not None:  # before anything is changed
            refuse_shards("attention with a cache")
            cache.check(query[:, : self.num_kv_heads], query[:, : self.num_kv_heads])
        if memory is None:
            own = positions
            if own is None and (cache is not None or self.position.rotates):
                own = places(x.shape[1], cache.length if cache is not None else 0, x.device)
                if (packed := options.get("cu_seqlens_q")) is not None:  # counted from 0 in each sequence
                    own = segments_at(packed.long(), own[0])[1][None]
            key = self._split(self.k_proj(x), self.num_kv_heads)
            if self.position.rotates and own is not None:
                query, key = self.position.rotate(query, own), self.position.rotate(key, own)
            value = self._split(self.v_proj(x), self.num_kv_heads)
            key_positions = positions
            if cache is not None:
                key_positions = cache.note_positions(positions, x.shape[1], x.device)
                key, value = cache.append(key, value)
            if key_positions is not None:  # else the defaults of the functions are right, and cheaper
                arguments["query_positions"], arguments["key_positions"] = own, key_positions
        else:
            kept = cache.contents() if cache is not None else None
            if kept is None:
                key = self._split(self.k_proj(memory), self.num_kv_heads)
                value = self._split(self.v_proj(memory), self.num_kv_heads)
                if cache is not None:
                    cache.append(key, value)
            else:
                key, value = kept
        if key_mask is not None:
            attn_mask = merge_key_mask(attn_mask, key_mask)
        if attn_mask is not None:
            arguments["attn_mask"] = attn_mask
        if memory is None and (slopes := self.position.slopes()) is not None:
            arguments.setdefault("alibi_slopes", slopes)
        if self.num_kv_heads != self.num_heads:
            arguments["enable_gqa"] = True
        return query, key, value, arguments

    def _reach_is_bounded(self, query: Tensor, cache: AttentionCache, arguments: dict[str, Any]) -> bool:
        """Whether cached keys may be passed over: far ones, by a single token, where ALiBi is all that there is."""
        return (
            arguments.keys() == {"alibi_slopes"}
            and arguments["alibi_slopes"].ndim == 1
            and query.shape[2] == 1
            and cache.length >= FAR
            and query.device.type == "cpu"  # elsewhere to wait for the answer costs more than to read the keys
            and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
            and torch._C._functorch.peek_interpreter_stack() is None
            and type(self.mechanism).forward is Mechanism.forward
        )

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # (B, heads, L, head_dim)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def mechanism_of_layer(mechanism: Mechanism | None, embed_dim: int, num_heads: int, head_dim: int) -> Mechanism:
    """What a layer of these sizes was given, or softmax; an error if it does not fit."""
    if mechanism is None:
        return SoftmaxAttention()
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"mechanism must be an object, such as EntmaxAttention({num_heads}), got {mechanism!r}; "
            f'by name: tamis.mechanisms.build_mechanism("entmax", {embed_dim}, {num_heads})'
        )
    mechanism.check_layer(embed_dim, num_heads, head_dim)
    return mechanism


class ScoreProjections(Protocol):
    """A layer that can say what makes its queries and keys."""

    def score_projections(self) -> tuple[list[Tensor], list[Tensor]]: ...


@torch.no_grad()
def start_with_spread(layer: ScoreProjections, spread: float) -> None:
    """Draw the projections of queries and keys so that inputs of unit variance have scores of this spread."""
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0.0 < spread < math.inf:
        raise ValueError(f"initial_spread must be a number above 0, got {spread!r}")
    for weight, *biases in layer.score_projections():
        bound = math.sqrt(3.0 * spread / weight.shape[1])  # each row has the variance `spread` then
        nn.init.uniform_(weight, -bound, bound)
        for bias in biases:
            nn.init.zeros_(bias)


def merge_key_mask(attn_mask: Tensor | None, key_mask: Tensor) -> Tensor:
    """One mask from a mask of any kind and a boolean mask over keys (B, Lk)."""
    if key_mask.dtype != torch.bool or key_mask.ndim != 2:
        raise ValueError(f"key_mask must be boolean (B, Lk), got {key_mask.dtype} {tuple(key_mask.shape)}")
    keys = key_mask[:, None, None, :]
    if attn_mask is None:
        return keys
    if attn_mask.dtype == torch.bool:
        return attn_mask & keys
    return torch.where(keys, attn_mask, float("-inf"))
