"""Who may attend to whom, and with what bias: evaluated for a few queries at a time, never as one L x L array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """All that masks and biases scores (B, H, Lq, Lk).  Dimensions of size 1 broadcast."""

    num_queries: int
    num_keys: int
    device: torch.device
    query_positions: Tensor | None = None
    """(B or 1, Lq), integers.  None: the last query, of each packed sequence, sits on its last key."""
    key_positions: Tensor | None = None
    """(B or 1, Lk), integers.  None: counted from the first key, of each packed sequence."""
    is_causal: bool = False
    """A key is visible if its position is not after the query's."""
    window: tuple[int, int] | None = None
    """Positions visible before and after the query's own; -1 = no bound."""
    attn_mask: Tensor | None = None
    """4-D; boolean (True = attend) or additive."""
    key_lengths: Tensor | None = None
    """(B,): keys from this index on are padding."""
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    """(sequences + 1,) for queries and for keys: where packed sequences, which see only themselves, begin."""
    alibi_slopes: Tensor | None = None
    """(B or 1, H): bias -slope * |distance|."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of `with_tensors`; the mask and the slopes come first and may have gradients."""
        cu_q, cu_k = self.cu_seqlens or (None, None)
        places = (self.query_positions, self.key_positions, self.key_lengths)
        return (self.attn_mask, self.alibi_slopes, *places, cu_q, cu_k)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Visibility:
        """The same visibility with other tensors."""
        if all(x is None for x in tensors) and all(x is None for x in self.tensors()):
            return self
        attn_mask, slopes, query_positions, key_positions, key_lengths, cu_q, cu_k = tensors
        return replace(
            self,
            attn_mask=attn_mask,
            alibi_slopes=slopes,
            query_positions=query_positions,
            key_positions=key_positions,
            key_lengths=key_lengths,
            cu_seqlens=None if cu_q is None or cu_k is None else (cu_q, cu_k),
        )

    @property
    def is_trivial(self) -> bool:
        """Every query sees every key, without a bias."""
        masks = (self.attn_mask, self.key_lengths, self.cu_seqlens, self.alibi_slopes, self.window)
        return not self.is_causal and all(part is None for part in masks)

    @property
    def is_common(self) -> bool:
        """Masks, biases and distances are the same for all sequences and heads, if slopes are not."""
        mask = self.attn_mask
        if self.key_lengths is not None:
            return False
        positions = (self.query_positions, self.key_positions)
        return all(x is None or x.shape[0] == 1 for x in positions) and (
            mask is None or mask.shape[0] == mask.shape[1] == 1
        )

    @property
    def _is_plainly_causal(self) -> bool:
        """A query sees all keys up to its own place, of its packed sequence, and that is all."""
        others = (self.attn_mask, self.key_lengths, self.window, self.query_positions, self.key_positions)
        return self.is_causal and all(part is None for part in others)

    def _keys_before(self) -> Tensor:
        """How many keys each query sees where the visibility is plainly causal, (1, Lq)."""
        counts = (self.positions()[0] + 1).clamp(min=0)
        if self.cu_seqlens is None:
            return counts
        segment = segments_of(self.cu_seqlens[0], self.num_queries)[0]
        return torch.where(segment >= 0, counts, 0)

    def keys_in_sight(self, queries: slice) -> slice:
        """Keys that some of these queries may see, at least one; all where one would have to look at positions."""
        if self.cu_seqlens is not None:
            cu_queries, cu_keys = self._starts
            first, last = (bisect_right(cu_queries, place) for place in (queries.start, queries.stop - 1))
            start, stop = cu_keys[first - 1], cu_keys[min(last, len(cu_keys) - 1)]
        elif self.query_positions is not None or self.key_positions is not None:
            start, stop = 0, self.num_keys
        else:
            before, after = self.window or (-1, -1)
            after = 0 if self.is_causal else after
            first, last = (place + self.num_keys - self.num_queries for place in (queries.start, queries.stop - 1))
            start = first - before if before >= 0 else 0
            stop = last + 1 + after if after >= 0 else self.num_keys
        stop = min(max(stop, 1), self.num_keys)
        return slice(min(max(start, 0), max(stop - 1, 0)), stop)

    @cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        """Where packed sequences begin, as numbers."""
        assert self.cu_seqlens is not None
        cu_queries, cu_keys = self.cu_seqlens
        return cu_queries.tolist(), cu_keys.tolist()

    def block(
        self, batches: slice, heads: slice, queries: slice, keys: slice = slice(None)
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask (True = attend) and the additive bias of a block, each 4-D and broadcastable to it, or None."""
        keep: Tensor | None = None
        bias: Tensor | None = None
        if self.is_causal or self.window is not None or self.alibi_slopes is not None:
            ahead = self._ahead(batches, queries, keys)
            if self.is_causal:
                keep = ahead <= 0
            if self.window is not None:
                before, after = self.window
                if before >= 0:
                    keep = _both(keep, ahead >= -before)
                if after >= 0:
                    keep = _both(keep, ahead <= after)
            if self.alibi_slopes is not None:
                slopes = take(take(self.alibi_slopes, 0, batches), 1, heads)
                bias = -slopes[:, :, None, None] * ahead.abs().to(slopes.dtype)
        if self.cu_seqlens is not None:
            segments = segments_of(self.cu_seqlens[0], self.num_queries)[0][queries, None]
            own = segments == segments_of(self.cu_seqlens[1], self.num_keys)[0][keys]
            keep = _both(keep, (own & (segments >= 0))[None, None])
        if self.key_lengths is not None:
            index = torch.arange(self.num_keys, device=self.key_lengths.device)[keys]
            keep = _both(keep, index < take(self.key_lengths, 0, batches)[:, None, None, None])
        if self.attn_mask is not None:
            mask = self.attn_mask
            for dim, some in enumerate((batches, heads, queries, keys)):
                mask = take(mask, dim, some)
            if mask.dtype == torch.bool:
                keep = _both(keep, mask)
            else:
                bias = mask if bias is None else bias + mask
        return keep, bias

    def _ahead(self, batches: slice, queries: slice, keys: slice) -> Tensor:
        """Key position minus query position, (B or 1, 1, queries, keys)."""
        query_positions, key_positions = self.positions()
        places = take(key_positions, 0, batches)[:, None, None, keys]
        return places - take(query_positions, 0, batches)[:, None, queries, None]

    def positions(self) -> tuple[Tensor, Tensor]:
        """Those of queries (B or 1, Lq) and keys (B or 1, Lk), given or by default."""
        queries, keys = self.query_positions, self.key_positions
        if self.cu_seqlens is not None:
            cu_q, cu_k = self.cu_seqlens
            if queries is None:
                segment, index = segments_of(cu_q, self.num_queries)
                queries = (index + (cu_k.diff() - cu_q.diff())[segment.clamp(min=0)])[None]
            if keys is None:
                keys = segments_of(cu_k, self.num_keys)[1][None]
        if queries is None:
            queries = torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.device)[None]
        if keys is None:
            keys = torch.arange(self.num_keys, device=self.device)[None]
        return queries, keys

    def distances(self, batches: slice, queries: slice, keys: slice = slice(None)) -> Tensor:
        """|key position - query position|, (B or 1, 1, queries, keys)."""
        return self._ahead(batches, queries, keys).abs()

    def counts(self, rows_per_block: int = 1024) -> Tensor:
        """How many keys each query sees, (B or 1, H or 1, Lq).  An additive mask hides a key where it is -inf."""
        device = self.device
        everything = slice(None)
        if self.is_trivial:
            return torch.full((1, 1, self.num_queries), self.num_keys, device=device)
        if self._is_plainly_causal:  # a packed text of a million tokens is no reason to compare each with each
            return self._keys_before()[:, None]
        parts = []
        structural = replace(self, alibi_slopes=None)
        for start in range(0, self.num_queries, rows_per_block):
            rows = slice(start, min(start + rows_per_block, self.num_queries))
            keep, bias = structural.block(everything, everything, rows)
            if bias is not None:
                keep = _both(keep, bias > float("-inf"))
            if keep is None:
                keep = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
            shape = (keep.shape[0], keep.shape[1], rows.stop - rows.start, self.num_keys)
            parts.append(keep.expand(shape).sum(-1))
        if not parts:
            return torch.zeros(1, 1, 0, dtype=torch.long, device=device)
        return torch.cat(parts, -1)


def _both(keep: Tensor | None, other: Tensor) -> Tensor:
    return other if keep is None else keep & other


def take(x: Tensor, dim: int, index: slice) -> Tensor:
    """x[index] along dim, unless x broadcasts there."""
    if x.shape[dim] == 1:
        return x
    return x[(slice(None),) * dim + (index,)]


def segments_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The segment of each packed token and its index within it, (total,).  Tokens past the end have segment -1."""
    return segments_at(cu_seqlens, torch.arange(total, device=cu_seqlens.device))


def segments_at(cu_seqlens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the packed tokens at these places."""
    segment = torch.searchsorted(cu_seqlens, index, right=True) - 1
    start = cu_seqlens[segment.clamp(max=cu_seqlens.shape[0] - 1)]
    return torch.where(index < cu_seqlens[-1], segment, -1), index - start
