"""The call of attention that processes share, and the parts of it that one of them computes.

Queries are this process's; everything about keys is that of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tamis.attention.call import Call, Dropout, check_call
from tamis.attention.masks import Visibility, take
from tamis.attention.rules import Rule, bind
from tamis.functional.backends import choose
from tamis.parallel.exchange import Exchange, to_heads, whole


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of a call beside its tensors."""

    scale: float
    enable_gqa: bool
    dropout_p: float = 0.0
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Who sees whom: masks and positions of this process's queries, among all keys.

    The order is that of the whole sequence, so a causal call of consecutive queries needs the keys up to its last one
    and no positions: that is cheap, and the way of `plain` calls.  Others compare positions.
    """

    exchange: Exchange
    device: torch.device
    num_queries: int
    num_keys: int
    """The number of keys of the whole sequence."""
    is_causal: bool
    attn_mask: Tensor | None
    """4-D; its queries are this process's, its keys all, where they are not 1."""
    options: dict[str, Any]
    """Positions of queries are this process's (B or 1, L / P), those of keys all."""

    @property
    def is_plain(self) -> bool:
        """Whether positions follow from places."""
        given = (self.options.get(name) for name in ("query_positions", "key_positions", "cu_seqlens_k"))
        return self.is_causal and self.num_queries == self.num_keys and all(x is None for x in given)

    def of_chunk(self, local: slice, place: slice) -> tuple[int, dict[str, Any]]:
        """For consecutive queries: how many keys they need, and the arguments of their call."""
        options = dict(self.options)
        stop = place.stop if self.is_plain else self.num_keys
        cu_q, lengths, own = (options.get(name) for name in ("cu_seqlens_q", "key_lengths", "query_positions"))
        if not self.is_plain and own is None and self._compares_positions:
            own, options["key_positions"] = self._default_positions(place)
        elif own is not None:
            own = own[:, local]
        options["query_positions"] = own
        if cu_q is not None:
            cu_k = options.get("cu_seqlens_k")
            options["cu_seqlens_q"] = cu_q.clamp(place.start, place.stop) - place.start
            options["cu_seqlens_k"] = (cu_q if cu_k is None else cu_k).clamp(max=stop)
        if lengths is not None:
            options["key_lengths"] = lengths.clamp(max=stop)
        mask = self.attn_mask
        if mask is not None:
            mask = take(take(mask, 2, local), 3, slice(0, stop))
        return stop, {"attn_mask": mask, "is_causal": self.is_causal, **options}

    def of_heads(self, heads: slice) -> dict[str, Any]:
        """For all queries of some heads: the arguments of their call."""
        options = dict(self.options)
        if (slopes := options.get("alibi_slopes")) is not None:
            options["alibi_slopes"] = slopes[..., heads]
        if (own := options.get("query_positions")) is not None:
            options["query_positions"] = gathered(self.exchange, own, 1)
        mask = None if self.attn_mask is None else rows_of_heads(self.exchange, self.attn_mask, heads)
        return {"attn_mask": mask, "is_causal": self.is_causal, **options}

    @property
    def _compares_positions(self) -> bool:
        biased = self.options.get("window") is not None or self.options.get("alibi_slopes") is not None
        return self.is_causal or biased

    def _default_positions(self, place: slice) -> tuple[Tensor, Tensor]:
        """Those that a call of the whole sequence would have by itself, of some queries and of all keys."""
        cu_q, cu_k = self.options.get("cu_seqlens_q"), self.options.get("cu_seqlens_k")
        packed = None if cu_q is None else (cu_q.long(), (cu_q if cu_k is None else cu_k).long())
        by_default = Visibility(
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            device=self.device,
            key_positions=self.options.get("key_positions"),
            cu_seqlens=packed,
        )
        queries, keys = by_default.positions()
        return queries[:, place], keys


def share_sight(
    exchange: Exchange,
    call: Call,
    attn_mask: Tensor | None,
    is_causal: bool,
    length: int | None,
    options: dict[str, Any],
) -> Sight:
    """From the arguments of one process, of which `call` has the tensors; an error for what cannot be shared.

    Args:
        length: tokens of the sequence without what fills it up, or None.
    """
    layout = exchange.layout
    queries, keys = (
        _whole_length(exchange, name, own) for name, own in zip(("query", "key"), call.shape[2:], strict=True)
    )
    sight = Sight(
        exchange=exchange,
        device=call.query.device,
        num_queries=queries,
        num_keys=keys,
        is_causal=is_causal,
        attn_mask=_shared_mask(exchange, attn_mask, *call.shape[2:]),
        options=_shared_positions(exchange, options, *call.shape[2:]),
    )
    ends = options.get("key_lengths") is not None or options.get("cu_seqlens_q") is not None
    if length is None or ends or sight.is_plain or not length < keys == layout.padded(length):
        return sight
    lengths = torch.full((call.shape[0],), length, device=sight.device)  # what take() filled in is no key
    return replace(sight, options={**sight.options, "key_lengths": lengths})


def _whole_length(exchange: Exchange, name: str, own: int) -> int:
    if exchange.size > 1 and own % 2:
        raise ValueError(
            f"{name} must hold two chunks of the whole sequence, an even number of tokens, got {own}: take() fills up "
            f"a sequence of any length"
        )
    return own * exchange.size


def _shared_positions(exchange: Exchange, options: dict[str, Any], queries: int, keys: int) -> dict[str, Any]:
    """With the positions of this process's queries and of all keys, where any are given."""
    own = {name: options.get(name) for name in ("query_positions", "key_positions")}
    if own["query_positions"] is None:
        own["query_positions"] = own["key_positions"]
    for name, length in (("query_positions", queries), ("key_positions", keys)):
        given = own[name]
        if given is None:
            continue
        if given.shape[-1] != length:
            raise ValueError(f"{name} must be those of this process's {length} tokens, got {tuple(given.shape)}")
        rows = given[None] if given.ndim == 1 else given
        own[name] = gathered(exchange, rows, 1) if name == "key_positions" else rows
    return {**options, **own}


def _shared_mask(exchange: Exchange, mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    all_keys = keys * exchange.size
    if mask.shape[2] not in (1, queries) or mask.shape[3] not in (1, keys, all_keys):
        raise ValueError(
            f"attn_mask of a shared sequence has rows for the {queries} queries of this process, or one, and columns "
            f"for all {all_keys} keys, or one; got {tuple(mask.shape)}"
        )
    if mask.shape[3] in (1, all_keys):
        return mask
    if mask.shape[2] != 1:
        raise ValueError(
            f"attn_mask of a shared sequence must have columns for all {all_keys} keys where it has a row for each "
            f"query, got {tuple(mask.shape)}"
        )
    return gathered(exchange, mask, 3)


def gathered(exchange: Exchange, x: Tensor, dim: int) -> Tensor:
    """The whole sequence, with a gradient where there can be one."""
    return whole(exchange, dim, _sendable(x))[0].to(x.dtype)


def rows_of_heads(exchange: Exchange, x: Tensor, heads: slice) -> Tensor:
    """Return the rows of all queries and some heads of what broadcasts to (B, H, L / P, n)."""
    if x.shape[2] == 1:
        return take(x, 1, heads)
    if x.shape[1] == 1:
        return gathered(exchange, x, 2)
    return to_heads(exchange, _sendable(x))[0].to(x.dtype)


def _sendable(x: Tensor) -> Tensor:
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    settings: Settings,
    dropout: Dropout,
    arguments: dict[str, Any],
) -> Tensor:
    """One part, by whichever backend is best at it."""
    call = _checked(query, key, value, settings, arguments)
    call = replace(call, dropout=dropout)
    bound = bind(rule, call)
    return choose("attend", call, bound, settings.backend).attend(call, bound)


def counts(query: Tensor, key: Tensor, settings: Settings, arguments: dict[str, Any]) -> Tensor:
    """How many keys each query of a part sees."""
    return _checked(query, key, key, settings, arguments).counts()


def _checked(query: Tensor, key: Tensor, value: Tensor, settings: Settings, arguments: dict[str, Any]) -> Call:
    return check_call(query, key, value, scale=settings.scale, enable_gqa=settings.enable_gqa, **arguments)


def rule_of_queries(rule: Rule, local: slice) -> Rule:
    """The rule for some of this process's queries."""
    return rule.over_rows(lambda rows: take(rows, 2, local))


def rule_of_heads(rule: Rule, exchange: Exchange, heads: slice) -> Rule:
    """The rule for some of the heads, and all queries."""
    return rule.over_rows(lambda rows: rows_of_heads(exchange, rows, heads))
