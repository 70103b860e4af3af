"""Blocks of queries against the keys that they may see: what attention in place walks over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tamis.attention.call import Call
from tamis.attention.masks import take
from tamis.attention.rules import BlockRule
from tamis.transforms.solver import Power, Workspace, compute_dtype

_BLOCK = 1 << 20  # scores worked on at a time
_FEWEST, _MOST = 64, 1024  # queries of a block that sees some keys only: products of fewer are slower


@dataclass(frozen=True)
class Masks:
    """What hides keys from some queries and biases their scores; 4-D and broadcastable to them."""

    keep: Tensor | None
    """True where a key is seen."""
    bias: Tensor | None
    """That of an additive mask."""
    ceiling: Tensor | None
    """+inf where a key is seen, -inf where it is hidden."""
    distances: Tensor | None
    """What ALiBi's slopes are multiplied by."""


class Walk:
    """Blocks of queries, each small enough to stay in cache: all of several heads, or some queries of one.

    Blocks of the same queries follow one another, and share their masks where all heads have the same.
    """

    def __init__(self, call: Call, rule: BlockRule) -> None:
        self.call, self.rule, self.visibility = call, rule, call.visibility
        self.dtype = compute_dtype(call.query.dtype)
        self.batches, self.heads, self.queries = call.query.shape[:3]
        self.key_heads, self.keys = call.key.shape[1:3]
        self.groups = call.groups
        self.rows = min(self.queries, _FEWEST)
        widest = max((width for _, width in self._areas()), default=0)
        per_query = max(1, self.groups * widest)
        self.rows = min(self.queries, max(16, _BLOCK // per_query))
        if self.visibility.keys_in_sight(slice(0, 1)) != slice(0, self.keys):
            # The fewer rows, the fewer keys that only some of them see.
            self.rows = min(self.rows, max(_FEWEST, min(self.queries // 8, _MOST)))
        areas = self._areas()
        self.narrows = any(width < self.keys for _, width in areas)
        self.size = self.batches * self.heads * sum(rows * width for rows, width in areas)
        self.head_step = max(1, min(self.key_heads, _BLOCK // (per_query * max(1, self.rows))))
        whole = self.head_step >= self.key_heads
        per_head = any(value is not None and value.shape[1] > 1 for value in rule.parameters())
        if per_head and self.batches * self.queries * per_query >= _BLOCK // 2:
            self.head_step = 1  # rows of a block then share their alpha, and the solver's form with it
            whole = True
        area = per_query * max(1, self.rows) * self.head_step
        self.batch_step = max(1, _BLOCK // area) if whole else 1
        self.workspace = Workspace(self.dtype, call.query.device)
        self.structure = replace(self.visibility, alibi_slopes=None)
        self._masks: tuple[slice, Masks] | None = None

    def query_slices(self) -> list[slice]:
        """Which queries blocks have."""
        return [slice(q, min(q + self.rows, self.queries)) for q in range(0, self.queries, max(1, self.rows))]

    def _areas(self) -> list[tuple[int, int]]:
        """Rows and keys of the blocks of each head."""
        sights = [(queries, self.visibility.keys_in_sight(queries)) for queries in self.query_slices()]
        return [(queries.stop - queries.start, keys.stop - keys.start) for queries, keys in sights]

    def masks(self, index: tuple[slice, slice, slice], keys: slice) -> Masks:
        if self._masks is not None and self._masks[0] == index[2]:
            return self._masks[1]
        keep, bias = self.structure.block(*index, keys)
        if self.rule.hidden == 0.0 and bias is not None:
            # -inf as a bias hides a key too; an activation must not see it.
            unbiased = bias > -math.inf
            keep = unbiased if keep is None else keep & unbiased
        ceiling = distances = None
        if keep is not None and self.rule.hidden == -math.inf:
            ceiling = torch.full_like(keep, math.inf, dtype=self.dtype).masked_fill_(~keep, -math.inf)
        if self.visibility.alibi_slopes is not None:
            distances = self.visibility.distances(index[0], index[2], keys).to(self.dtype)
        masks = Masks(keep, bias, ceiling, distances)
        if self.visibility.is_common:
            self._masks = (index[2], masks)
        return masks

    def __iter__(self) -> Iterator[Block]:
        if self.keys == 0 or self.queries == 0:
            return
        number = 0
        for queries in self.query_slices():
            for b in range(0, self.batches, self.batch_step):
                for h in range(0, self.key_heads, self.head_step):
                    batches = slice(b, min(b + self.batch_step, self.batches))
                    key_heads = slice(h, min(h + self.head_step, self.key_heads))
                    yield Block(self, number, batches, key_heads, queries)
                    number += 1


class Block:
    """A block of (batches, heads, queries) against the keys that it may see; its rows are ordered as in (B, H, Lq)."""

    def __init__(self, walk: Walk, number: int, batches: slice, key_heads: slice, queries: slice) -> None:
        self.walk, self.number = walk, number
        self.keys = walk.visibility.keys_in_sight(queries)
        self.key_index = (batches, key_heads, self.keys)
        heads = slice(key_heads.start * walk.groups, key_heads.stop * walk.groups)
        self.index = (batches, heads, queries)
        self.shape = (batches.stop - batches.start, heads.stop - heads.start, queries.stop - queries.start)
        self.num_rows = self.shape[0] * self.shape[1] * self.shape[2]
        self.rows_of_group = walk.groups * self.shape[2]
        self.num_groups = self.num_rows // self.rows_of_group
        self.masks = walk.masks(self.index, self.keys)
        self.values: list[Power | None] = [
            None if value is None else self._rows_of(value) for value in walk.rule.parameters()
        ]

    def buffer(self, name: str) -> Tensor:
        """(rows, keys) of memory that blocks share; "scores" holds the scores once `weights` was called."""
        return self.walk.workspace.take(name, self.num_rows, self.keys.stop - self.keys.start)

    def weights(self, out: Tensor | None) -> Tensor:
        """Weights (rows, keys), in `out` if given."""
        walk = self.walk
        scores = self.buffer("scores")
        product = self.by_group(scores)
        query, key = self.of_queries(walk.call.query), self.of_keys(walk.call.key)
        torch.baddbmm(product, query, key.mT, beta=0.0, alpha=walk.call.scale or 1.0, out=product)
        if walk.call.scale == 0.0:  # with a factor of 0 the product would not look at its inputs, and lose their NaN
            product.mul_(0.0)
        self._add_biases(self.four_d(scores))
        self._mask(scores)
        weights = torch.empty_like(scores) if out is None else out
        walk.rule.weights(scores, self.values, weights, walk.workspace)
        self.hide(weights)
        return weights

    def _add_biases(self, scores: Tensor) -> None:
        if self.masks.bias is not None:
            scores.add_(self.masks.bias)
        slopes = self.walk.visibility.alibi_slopes
        if slopes is not None and self.masks.distances is not None:
            slopes = take(take(slopes, 0, self.index[0]), 1, self.index[1])
            if slopes.device.type != "cpu" or slopes.any():  # half of the heads of NAPE have none
                scores.addcmul_(slopes.to(scores.dtype)[:, :, None, None], self.masks.distances, value=-1.0)

    def _mask(self, scores: Tensor) -> None:
        """Hide scores.  A minimum is many times faster than a fill, and right unless there are NaNs to hide."""
        if self.masks.keep is None:
            return
        if self.masks.ceiling is not None:
            torch.minimum(self.four_d(scores), self.masks.ceiling, out=self.four_d(scores))
            if not math.isnan(scores.sum().item()):
                return
        self.four_d(scores).masked_fill_(~self.masks.keep, self.walk.rule.hidden)

    def hide(self, rows: Tensor) -> None:
        """Zero what is masked, where the rule itself does not."""
        if self.masks.keep is not None and self.walk.rule.hidden == 0.0:
            self.four_d(rows).masked_fill_(~self.masks.keep, 0.0)

    def visible(self) -> Tensor:
        """True where a key is seen, -inf biases included; broadcastable to (b, h, q, keys)."""
        keep = self.masks.keep
        if self.masks.bias is not None:
            unbiased = self.masks.bias > float("-inf")
            keep = unbiased if keep is None else keep & unbiased
        return (
            keep if keep is not None else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.walk.call.query.device)
        )

    def distances(self) -> Tensor:
        """|key position - query position|, (b or 1, 1, q, keys)."""
        return self.walk.visibility.distances(self.index[0], self.index[2], self.keys)

    def four_d(self, rows: Tensor) -> Tensor:
        return rows.view(*self.shape, -1)

    def by_group(self, rows: Tensor) -> Tensor:
        """(rows, n) as (key heads of all batches, rows that share one, n)."""
        return rows.view(self.num_groups, self.rows_of_group, rows.shape[-1])

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.index].to(self.walk.dtype).reshape(self.num_groups, self.rows_of_group, x.shape[-1])

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.key_index].to(self.walk.dtype).flatten(0, 1)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
        """out = scale * a @ b, or += with `add`; out is this block's part of a 4-D tensor."""
        if out.is_contiguous() and out.dtype == a.dtype:
            flat = out.view(self.num_groups, a.shape[1], out.shape[-1])
            torch.baddbmm(flat, a, b, beta=float(add), alpha=scale, out=flat)
            return
        product = torch.bmm(a, b).view(out.shape)
        product = product if scale == 1.0 else product.mul_(scale)
        out.add_(product) if add else out.copy_(product)

    def add_reduced(self, target: Tensor, rows: Tensor) -> None:
        """Add rows (rows, n or 1) to a broadcast 4-D target, summed over what it broadcasts."""
        for dim, index in enumerate((*self.index, self.keys)):
            target = take(target, dim, index)
        target.add_(self.four_d(rows).sum_to_size(target.shape))

    def _rows_of(self, value: Tensor) -> Power:
        for dim, index in enumerate(self.index):
            value = take(value, dim, index)
        if value.numel() == 1 and value.device.type == "cpu":
            return float(value.item())  # numbers have faster forms than rows
        return value.to(self.walk.dtype).expand(*self.shape, 1).reshape(-1, 1)
