"""Attention in place, block by block, in memory linear in the length: the path that training takes on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tamis.attention.backend import Backend, full_precision, tracing
from tamis.attention.blocks import Block, Walk
from tamis.attention.call import Call
from tamis.attention.dropout import Factors
from tamis.attention.masks import take
from tamis.attention.rules import BlockRule, Rule
from tamis.attention.statistics import SparseObserver, SparseWeights, Statistics, StatisticsObserver
from tamis.transforms.solver import compute_dtype

_KEEP = 1 << 25  # weights up to this many are kept for the backward pass instead of being solved for again

Observer = Callable[[Block, Tensor], None]
"""Is shown each block and its weights (rows, keys), before dropout."""


class Blocked(Backend):
    """Takes every call of a rule that works on blocks, unless somebody wants to see plain operations."""

    name = "blocked"

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        if not isinstance(rule, BlockRule):
            return f"{type(rule).__name__} has no form for blocks: the whole matrix of weights is in memory"
        return tracing()

    def attend(self, call: Call, rule: Rule) -> Tensor:
        return _attend(call.collected(), rule)

    def attend_with_statistics(self, call: Call, rule: Rule) -> tuple[Tensor, Statistics]:
        observer = StatisticsObserver(call.shape[1], call.query.device)
        return _attend(call, rule, observer), observer.result()

    def statistics(self, call: Call, rule: Rule) -> Statistics:
        observer = StatisticsObserver(call.shape[1], call.query.device)
        _observe(call, rule, observer)
        return observer.result()

    def sparse_weights(self, call: Call, rule: Rule) -> SparseWeights:
        observer = SparseObserver(call.shape, call.query.device, compute_dtype(call.query.dtype))
        _observe(call, rule, observer)
        return observer.result()


def _attend(call: Call, rule: Rule, observer: Observer | None = None) -> Tensor:
    """Output (B, H, Lq, Dv) in the dtype of the query."""
    assert isinstance(rule, BlockRule)
    dropout = Factors.draw(call.dropout)
    with full_precision(call.query):
        if not torch.is_grad_enabled():
            return _outputs(Walk(call, rule), dropout, observer)
        return _Attend.apply(call, rule, dropout, observer, *call.tensors(), *rule.parameters())


@torch.no_grad()
def _observe(call: Call, rule: Rule, observer: Observer) -> None:
    """Show an observer all weights, block by block, in the order of (B, H, Lq) within each block."""
    assert isinstance(rule, BlockRule)
    for block in Walk(call, rule):
        observer(block, block.weights(block.buffer("weights")))


def _outputs(walk: Walk, dropout: Factors, observer: Observer | None, kept: list[Tensor] | None = None) -> Tensor:
    """(B, H, Lq, Dv), block by block; the weights of the blocks are added to `kept`, if given."""
    query, value = walk.call.query, walk.call.value
    shape = (*query.shape[:3], value.shape[3])
    out = query.new_empty(shape) if walk.size > 0 else query.new_zeros(shape)
    for block in walk:
        weights = block.weights(block.buffer("weights") if kept is None else None)
        if observer is not None:
            observer(block, weights)
        if kept is not None:
            kept.append(weights)
        if dropout.p > 0.0:
            weights = weights * block.factors(dropout, weights)
        block.multiply(block.by_group(weights), block.of_keys(value), out[block.index])
    return out


def _with_tensors(call: Call, rule: BlockRule, tensors: Sequence[Tensor | None]) -> tuple[Call, BlockRule]:
    """The same call and rule with other tensors, or with none."""
    count = len(call.tensors())
    return call.with_tensors(tensors[:count]), rule.with_parameters(tensors[count:])


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, rule: BlockRule, dropout: Factors, observer: Observer | None, *tensors: Tensor | None
    ) -> Tensor:
        """`tensors` are those of `call` and `rule`: autograd saves them, and nobody else."""
        walk = Walk(call, rule)
        train = any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        keep_weights = train and rule.keeps_weights and walk.size <= _KEEP
        out = _outputs(walk, dropout, observer, kept if keep_weights else None)
        if train:
            ctx.save_for_backward(*tensors, *kept)
            ctx.static = (*_with_tensors(call, rule, [None] * len(tensors)), dropout)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, rule, dropout = ctx.static
        needs = ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors  # once: activation checkpointing computes them at every look
        inputs, kept = saved[: len(needs)], saved[len(needs) :]
        call, rule = _with_tensors(call, rule, inputs)
        walk = Walk(call, rule)
        # Blocks write the first three gradients, those of keys and values only if all blocks see all of these, and add
        # to the others.
        new = [torch.empty_like if walk.size > 0 else torch.zeros_like] * 3 + [torch.zeros_like] * (len(needs) - 3)
        if walk.narrows:
            new[1] = new[2] = torch.zeros_like
        grads = [
            make(t, dtype=compute_dtype(t.dtype)) if t is not None and need else None
            for make, t, need in zip(new, inputs, needs, strict=True)
        ]
        d_query, d_key, d_value, d_mask, d_slopes = grads[:5]
        d_parameters, wanted = grads[len(call.tensors()) :], list(needs[len(call.tensors()) :])
        for block in walk:
            later = walk.narrows or block.index[2].start > 0  # of the same keys: their gradients add up
            weights = kept[block.number] if kept else block.weights(block.buffer("weights"))
            scores = block.buffer("scores")
            d_out = block.of_queries(grad)  # (groups, rows, Dv)
            d_weights = block.buffer("d_weights")
            torch.bmm(d_out, block.of_keys(call.value).mT, out=block.by_group(d_weights))
            dropped = weights
            if dropout.p > 0.0:
                factors = block.factors(dropout, weights)
                dropped = weights * factors
                d_weights.mul_(factors)
            if d_value is not None:
                block.multiply(block.by_group(dropped).mT, d_out, d_value[block.key_index], add=later)
            d_scores = block.buffer("d_scores")
            d_rows = rule.backward(scores, weights, d_weights, block.values, wanted, d_scores)
            block.hide(d_scores)
            by_group = block.by_group(d_scores)
            if d_query is not None:
                block.multiply(by_group, block.of_keys(call.key), d_query[block.index], call.scale)
            if d_key is not None:
                block.multiply(by_group.mT, block.of_queries(call.query), d_key[block.key_index], call.scale, add=later)
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
        return (None, None, None, None, *cast)
