"""Attention in plain torch, two ways with one contract.

`dense` builds the whole matrix of weights from differentiable operations: short, obviously right, the oracle for
everything else, and what torch.compile and torch.func see.  `attend` walks over blocks of queries in place, in memory
linear in the length: the path that CPU training takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tamis.attention.masks import Visibility, take
from tamis.attention.rules import Rule
from tamis.transforms.solver import Power, Workspace, compute_dtype

_BLOCK = 1 << 20  # scores worked on at a time
_FEWEST, _MOST = 64, 1024  # queries of a block that sees some keys only: products of fewer are slower
_KEEP = 1 << 25  # weights up to this many are kept for the backward pass instead of being solved for again


def dense_scores(query: Tensor, key: Tensor, visibility: Visibility, scale: float) -> tuple[Tensor, Tensor | None]:
    """Biased, unmasked scores (B, H, Lq, Lk) in the compute dtype, and the mask (True = attend)."""
    dtype = compute_dtype(query.dtype)
    groups = query.shape[1] // max(1, key.shape[1])
    key = key.repeat_interleave(groups, 1) if groups > 1 else key
    with _full_precision(query):
        scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    everything = slice(None)
    keep, bias = visibility.block(everything, everything, everything)
    return (scores if bias is None else scores + bias.to(dtype)), keep


def dense_weights(query: Tensor, key: Tensor, rule: Rule, visibility: Visibility, scale: float) -> Tensor:
    """All weights (B, H, Lq, Lk), in the compute dtype, differentiable as often as one likes."""
    scores, keep = dense_scores(query, key, visibility, scale)
    if rule.hidden == 0.0 and visibility.attn_mask is not None:
        keep = scores > float("-inf") if keep is None else keep & (scores > float("-inf"))
    return rule.dense(scores if keep is None else torch.where(keep, scores, rule.hidden), keep)


def dense(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, visibility: Visibility, scale: float, dropout: Dropout
) -> Tensor:
    weights = dense_weights(query, key, rule, visibility, scale)
    groups = query.shape[1] // max(1, key.shape[1])
    value = value.repeat_interleave(groups, 1) if groups > 1 else value
    if dropout.p > 0.0:
        weights = weights * dropout.factors(weights.shape, weights.dtype, weights.device, 0)
    with _full_precision(query):
        return (weights @ value.to(weights.dtype)).to(query.dtype)


def _full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Autocast has been applied to the inputs; what follows is in the compute dtype."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@dataclass(frozen=True)
class Dropout:
    """Dropout of weights that can be drawn again: the factors of a block depend on the seed and its number alone."""

    p: float = 0.0
    seed: int | None = 0
    """None: torch's own dropout, for graphs that cannot hold a generator."""

    @staticmethod
    def draw(p: float, generator: torch.Generator | None) -> Dropout:
        """Take one number from the generator (torch's own by default), so that repeated calls differ."""
        if p == 0.0:
            return Dropout()
        if torch.compiler.is_compiling():
            if generator is not None:
                raise ValueError("dropout under torch.compile takes no generator")
            return Dropout(p, None)
        device = generator.device if generator is not None else "cpu"
        seed = torch.randint(2**62, (), generator=generator, device=device)
        return Dropout(p, int(seed.item()))

    def factors(self, shape: Any, dtype: torch.dtype, device: torch.device, block: int) -> Tensor:
        """0 or 1 / (1 - p) for each weight of a block."""
        if self.seed is None:
            return torch.dropout(torch.ones(shape, dtype=dtype, device=device), self.p, True)
        generator = torch.Generator(device).manual_seed((self.seed + block * 0x9E3779B9) % 2**63)
        kept = torch.empty(shape, dtype=dtype, device=device).bernoulli_(1.0 - self.p, generator=generator)
        return kept.div_(1.0 - self.p) if self.p < 1.0 else kept


Observer = Callable[["Block", Tensor], None]
"""Is shown each block and its weights (rows, keys), before dropout."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    visibility: Visibility,
    scale: float,
    dropout: Dropout,
    observer: Observer | None = None,
) -> Tensor:
    """Output (B, H, Lq, Dv) in the dtype of the query."""
    with _full_precision(query):
        if not torch.is_grad_enabled():
            return _outputs(Walk(query, key, rule, visibility, scale), value, dropout, observer)
        tensors = (query, key, value, visibility.attn_mask, visibility.alibi_slopes, *rule.parameters())
        return _Attend.apply(rule, visibility, scale, dropout, observer, *tensors)


def _outputs(
    walk: Walk, value: Tensor, dropout: Dropout, observer: Observer | None, kept: list[Tensor] | None = None
) -> Tensor:
    """(B, H, Lq, Dv), block by block; the weights of the blocks are added to `kept`, if given."""
    query = walk.query
    shape = (*query.shape[:3], value.shape[3])
    out = query.new_empty(shape) if walk.size > 0 else query.new_zeros(shape)
    for block in walk:
        weights = block.weights(block.buffer("weights") if kept is None else None)
        if observer is not None:
            observer(block, weights)
        if kept is not None:
            kept.append(weights)
        if dropout.p > 0.0:
            weights = weights * dropout.factors(weights.shape, weights.dtype, weights.device, block.number)
        block.multiply(block.by_group(weights), block.of_keys(value), out[block.index])
    return out


@torch.no_grad()
def observe(query: Tensor, key: Tensor, rule: Rule, visibility: Visibility, scale: float, observer: Observer) -> None:
    """Show an observer all weights, block by block, in the order of (B, H, Lq) within each block."""
    for block in Walk(query, key, rule, visibility, scale):
        observer(block, block.weights(block.buffer("weights")))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: Rule,
        visibility: Visibility,
        scale: float,
        dropout: Dropout,
        observer: Observer | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        query, key, value = tensors[0], tensors[1], tensors[2]
        assert query is not None
        assert key is not None
        assert value is not None
        walk = Walk(query, key, rule, visibility, scale)
        train = any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        keep_weights = train and rule.keeps_weights and walk.size <= _KEEP
        out = _outputs(walk, value, dropout, observer, kept if keep_weights else None)
        if train:
            ctx.save_for_backward(*tensors, *kept)
            ctx.static = (rule, visibility, scale, dropout)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rule, visibility, scale, dropout = ctx.static
        needs = ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # once: activation checkpointing computes them at every look
        inputs, kept = saved[: len(needs)], saved[len(needs) :]
        query, key, value = inputs[:3]
        walk = Walk(query, key, rule, visibility, scale)
        # Blocks write the first three gradients, those of keys and values only if all blocks see all of these, and add
        # to the others.
        new = [torch.empty_like if walk.size > 0 else torch.zeros_like] * 3 + [torch.zeros_like] * (len(needs) - 3)
        if walk.narrows:
            new[1] = new[2] = torch.zeros_like
        grads = [
            make(t, dtype=compute_dtype(t.dtype)) if t is not None and need else None
            for make, t, need in zip(new, inputs, needs, strict=True)
        ]
        d_query, d_key, d_value, d_mask, d_slopes, *d_parameters = grads
        for block in walk:
            later = walk.narrows or block.index[2].start > 0  # of the same keys: their gradients add up
            weights = kept[block.number] if kept else block.weights(block.buffer("weights"))
            scores = block.buffer("scores")
            d_out = block.of_queries(grad)  # (groups, rows, Dv)
            d_weights = block.buffer("d_weights")
            torch.bmm(d_out, block.of_keys(value).mT, out=block.by_group(d_weights))
            dropped = weights
            if dropout.p > 0.0:
                factors = dropout.factors(weights.shape, weights.dtype, weights.device, block.number)
                dropped = weights * factors
                d_weights.mul_(factors)
            if d_value is not None:
                block.multiply(block.by_group(dropped).mT, d_out, d_value[block.key_index], add=later)
            d_scores = block.buffer("d_scores")
            d_rows = rule.backward(scores, weights, d_weights, block.values, list(needs[5:]), d_scores)
            block.hide(d_scores)
            by_group = block.by_group(d_scores)
            if d_query is not None:
                block.multiply(by_group, block.of_keys(key), d_query[block.index], scale)
            if d_key is not None:
                block.multiply(by_group.mT, block.of_queries(query), d_key[block.key_index], scale, add=later)
            for d_parameter, d_row in zip(d_parameters, d_rows, strict=True):
                if d_parameter is not None and d_row is not None:
                    block.add_reduced(d_parameter, d_row)
            if d_mask is not None:
                block.add_reduced(d_mask, d_scores)
            if d_slopes is not None:
                moved = -(block.four_d(d_scores) * block.distances()).sum((-1, -2))
                target = take(take(d_slopes, 0, block.index[0]), 1, block.index[1])
                target.add_(moved.sum_to_size(target.shape))
        cast = [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
        return (None, None, None, None, None, *cast)


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

    def __init__(self, query: Tensor, key: Tensor, rule: Rule, visibility: Visibility, scale: float) -> None:
        self.query, self.key, self.rule, self.visibility, self.scale = query, key, rule, visibility, scale
        self.dtype = compute_dtype(query.dtype)
        self.batches, self.heads, self.queries = query.shape[:3]
        self.key_heads, self.keys = key.shape[1:3]
        self.groups = self.heads // max(1, self.key_heads)
        self.rows = min(self.queries, _FEWEST)
        widest = max((width for _, width in self._areas()), default=0)
        per_query = max(1, self.groups * widest)
        self.rows = min(self.queries, max(16, _BLOCK // per_query))
        if visibility.keys_in_sight(slice(0, 1)) != slice(0, self.keys):
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
        self.workspace = Workspace(self.dtype, query.device)
        self.structure = replace(visibility, alibi_slopes=None)
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
        self.num_groups = self.num_rows // (walk.groups * self.shape[2])
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
        query, key = self.of_queries(walk.query), self.of_keys(walk.key)
        torch.baddbmm(product, query, key.mT, beta=0.0, alpha=walk.scale, out=product)
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
        return keep if keep is not None else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.walk.query.device)

    def distances(self) -> Tensor:
        """|key position - query position|, (b or 1, 1, q, keys)."""
        return self.walk.visibility.distances(self.index[0], self.index[2], self.keys)

    def four_d(self, rows: Tensor) -> Tensor:
        return rows.view(*self.shape, -1)

    def by_group(self, rows: Tensor) -> Tensor:
        """(rows, n) as (key heads of all batches, rows that share one, n)."""
        return rows.view(self.num_groups, -1, rows.shape[-1])

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.index].to(self.walk.dtype).reshape(self.num_groups, -1, x.shape[-1])

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.key_index].to(self.walk.dtype).flatten(0, 1)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
        """out = scale * a @ b, or += with `add`; out is this block's part of a 4-D tensor."""
        if out.is_contiguous() and out.dtype == a.dtype:
            flat = out.view(self.num_groups, -1, out.shape[-1])
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
