"""One call of attention: its arguments, checked once and put into one form, which then travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from tamis.attention.masks import Visibility
from tamis.transforms.parameters import number, switch, values_known
from tamis.transforms.solver import compute_dtype

Window = int | tuple[int | None, int | None]

FARTHEST = 2**62
"""Distances of given positions stay below: their differences, and what is added to them, must fit 64 bits."""
LONGEST = 2**30
"""Where no positions are given, those of places do: kernels add a window to them in 32 bits."""


class Options(TypedDict, total=False):
    """The keyword arguments that all attention functions share; see :func:`tamis.entmax_attention`."""

    alibi_slopes: Tensor | None
    window: Window | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    key_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


class Part(NamedTuple):
    """Which weights of a larger call these are: dropout then treats each as it would there."""

    seed: int
    """Of the larger call; no number is drawn."""
    head: int = 0
    """The first head, in the larger call."""
    query: int = 0
    """The first query there; keys begin at the same one."""


class Dropout(NamedTuple):
    """The share of weights to drop, and where the one random number comes from: torch's own generator if None."""

    p: float = 0.0
    generator: torch.Generator | None = None
    part: Part | None = None


NO_DROPOUT = Dropout()


class Pages(NamedTuple):
    """Where the keys of each sequence lie in a pool that all share."""

    table: Tensor
    """Integers (B, n): the i-th page of a sequence holds its positions from i * page on."""
    norms: Tensor | None
    """(pages, Hk), no less than the norm of any key in the page."""


@dataclass(frozen=True)
class Call:
    """Checked arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    visibility: Visibility
    scale: float
    dropout: Dropout = NO_DROPOUT
    pages: Pages | None = None
    """With them `key` and `value` are pools, (pages, Hk, page, D), and the queries the last of each sequence."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Lq, Lk)"""
        return (*self.query.shape[:3], self.visibility.num_keys)

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    def counts(self) -> Tensor:
        """How many keys each query sees, (B or 1, H or 1, Lq)."""
        return (self if self.pages is None else self._placed()).visibility.counts()

    def collected(self) -> Call:
        """With the pages of each sequence side by side, if there are any: for backends that read no pages."""
        if self.pages is None:
            return self
        key, value = (self._side_by_side(pool, self.pages.table) for pool in (self.key, self.value))
        return replace(self._placed(), key=key, value=value, pages=None)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that autograd is to see: query, key, value, mask and slopes, which may have gradients, and the rest."""
        return (self.query, self.key, self.value, *self.visibility.tensors())

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Call:
        """The same call of other tensors, in the order of `tensors`; what has none keeps nothing alive.

        Without dropout, of which the numbers are drawn by then.
        """
        inputs: Any = dict(zip(("query", "key", "value"), tensors, strict=False))
        return Call(**inputs, visibility=self.visibility.with_tensors(tensors[3:]), scale=self.scale)

    def _placed(self) -> Call:
        """With the positions of the queries, which kernels for pages work out themselves, written down."""
        lengths, queries = self.visibility.key_lengths, self.query.shape[2]
        assert lengths is not None
        own = lengths[:, None] + torch.arange(-queries, 0, device=lengths.device)
        return replace(self, visibility=replace(self.visibility, query_positions=own))

    def _side_by_side(self, pool: Tensor, table: Tensor) -> Tensor:
        """(B, Hk, L, D), zero beyond the length of a sequence."""
        rows = pool[table.long().clamp(0, max(0, pool.shape[0] - 1))]  # (B, n, Hk, page, D)
        rows = rows.transpose(1, 2).flatten(2, 3)
        lengths = self.visibility.key_lengths
        assert lengths is not None
        inside = torch.arange(rows.shape[2], device=rows.device) < lengths[:, None]
        return torch.where(inside[:, None, :, None], rows, 0.0)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    generator: torch.Generator | None = None,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Call:
    """ValueError or TypeError for what does not fit; otherwise the call in one form."""
    value = key if value is None else value
    query, key, value = _autocast(query, key, value)
    _check_shapes(query, key, value, switch("enable_gqa", enable_gqa))
    batch, heads, num_queries = query.shape[:3]
    num_keys = key.shape[2]
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed and key_lengths is not None:
        raise ValueError("key_lengths and cu_seqlens exclude each other: packed sequences have no padding")
    if key_positions is not None and query_positions is None:
        if num_queries != num_keys:
            raise ValueError("key_positions without query_positions is only defined for as many queries as keys")
        query_positions = key_positions
    visibility = Visibility(
        num_queries=num_queries,
        num_keys=num_keys,
        device=query.device,
        query_positions=_positions("query_positions", query_positions, batch, num_queries),
        key_positions=_positions("key_positions", key_positions, batch, num_keys),
        is_causal=switch("is_causal", is_causal),
        window=_window(window, LONGEST if query_positions is None and key_positions is None else FARTHEST),
        attn_mask=_mask(attn_mask, (batch, heads, num_queries, num_keys)),
        key_lengths=_lengths(key_lengths, batch, num_keys),
        cu_seqlens=_packed(cu_seqlens_q, cu_seqlens_k, batch, num_queries, num_keys) if packed else None,
        alibi_slopes=_slopes(alibi_slopes, batch, heads, compute_dtype(query.dtype)),
    )
    scale = 1.0 / math.sqrt(max(1, query.shape[3])) if scale is None else number("scale", scale)
    return Call(query, key, value, visibility, scale, _dropout(dropout_p, generator))


def _dropout(p: float, generator: torch.Generator | None) -> Dropout:
    p = number("dropout_p", p, 0.0, 1.0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    return Dropout(p, generator)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the dtype that F.scaled_dot_product_attention would compute in."""
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    return tensors


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim), got shape {tuple(x.shape)}")
        if x.dtype != query.dtype or x.device != query.device:
            expected = f"{query.dtype} on {query.device}"
            raise ValueError(f"{name} must match query, {expected}, got {x.dtype} on {x.device}")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        raise ValueError(f"query, key and value must have one batch size, got {shapes}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"query and key must have one head_dim, got {shapes}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key and value must have as many heads and positions, got {shapes}")
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and not enable_gqa:
        raise ValueError(f"{heads} query heads need as many key heads, or enable_gqa=True, got {shapes}")
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ValueError(f"with enable_gqa the query heads must be a multiple of the key heads, got {shapes}")


def _mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask must be boolean (True = attend) or an additive float tensor, got {kind}")
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > 4 or not all(have == 1 or have == want for have, want in sizes):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to (B, H, Lq, Lk) = {shape}")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _window(window: Window | None, beyond: int) -> tuple[int, int] | None:
    """The sides, -1 for no bound, which is what reaches `beyond` all distances too."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int | tuple | list):
        raise TypeError(f"window must be an int or a pair (left, right), got {type(window).__name__}")
    pair = (window, window) if isinstance(window, int) else tuple(window)
    if len(pair) != 2 or not all(side is None or (type(side) is int and side >= -1) for side in pair):
        raise ValueError(f"window must be a count or a pair of counts (None or -1 = no bound), got {window}")
    left, right = (-1 if side is None or side >= beyond else side for side in pair)
    return None if left < 0 and right < 0 else (left, right)


def _integers(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be an integer tensor, got {kind}")
    return x.long()


def _positions(name: str, positions: Tensor | None, batch: int, length: int) -> Tensor | None:
    if positions is None:
        return None
    given = _integers(name, positions)
    rows = given[None] if given.ndim == 1 else given
    if rows.ndim != 2 or not (rows.shape[0] == 1 or rows.shape[0] == batch) or rows.shape[1] != length:
        raise ValueError(f"{name} must be ({length},) or ({batch}, {length}), got {tuple(given.shape)}")
    return rows


def _lengths(lengths: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    if lengths is None:
        return None
    lengths = _integers("key_lengths", lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"key_lengths must be one per sequence, ({batch},), got {tuple(lengths.shape)}")
    if values_known(lengths) and not bool(((lengths >= 0) & (lengths <= num_keys)).all()):
        raise ValueError(f"key_lengths must lie in [0, {num_keys}], the number of keys, got {lengths.tolist()}")
    return lengths


def _slopes(slopes: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        kind = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"alibi_slopes must be a floating-point tensor, got {kind}")
    shaped = slopes[None] if slopes.ndim == 1 else slopes
    if shaped.ndim != 2 or not (shaped.shape[0] == 1 or shaped.shape[0] == batch) or shaped.shape[1] != heads:
        raise ValueError(f"alibi_slopes must be ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")
    return shaped.to(dtype)


def _packed(
    cu_q: Tensor | None, cu_k: Tensor | None, batch: int, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    if cu_q is None or batch != 1:
        raise ValueError("packed sequences need cu_seqlens_q and inputs of shape (1, heads, tokens, head_dim)")
    cu_k = cu_q if cu_k is None else cu_k
    cu_q, cu_k = _integers("cu_seqlens_q", cu_q), _integers("cu_seqlens_k", cu_k)
    if cu_q.ndim != 1 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be 1-D and of one length (sequences + 1), "
            f"got {tuple(cu_q.shape)} and {tuple(cu_k.shape)}"
        )
    for name, ends, total in (("cu_seqlens_q", cu_q, num_queries), ("cu_seqlens_k", cu_k, num_keys)):
        if values_known(ends) and not (ends[0] == 0 and bool((ends.diff() >= 0).all()) and ends[-1] <= total):
            raise ValueError(f"{name} must rise from 0 to at most {total}, the number of tokens, got {ends.tolist()}")
    return cu_q, cu_k
