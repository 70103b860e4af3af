"""Attention from the whole matrix of weights, in differentiable operations: short, obviously right, and the oracle for
everything else.  What torch.compile and torch.func see, and what a rule of one's own needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention.backend import Backend, full_precision
from tamis.attention.call import Call
from tamis.attention.dropout import Factors
from tamis.attention.rules import Rule
from tamis.attention.statistics import SparseWeights, Statistics, dense_statistics, sparse_weights
from tamis.transforms.solver import compute_dtype


def dense_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Biased, unmasked scores (B, H, Lq, Lk) in the compute dtype, and the mask (True = attend)."""
    dtype = compute_dtype(call.query.dtype)
    key = _for_every_head(call.key, call)
    with full_precision(call.query):
        scores = (call.query.to(dtype) @ key.to(dtype).mT) * call.scale
    everything = slice(None)
    keep, bias = call.visibility.block(everything, everything, everything)
    return (scores if bias is None else scores + bias.to(dtype)), keep


def dense_weights(call: Call, rule: Rule) -> Tensor:
    """All weights (B, H, Lq, Lk), in the compute dtype, differentiable as often as one likes."""
    scores, keep = dense_scores(call)
    mask = call.visibility.attn_mask
    if rule.hidden == 0.0 and mask is not None and mask.is_floating_point():
        # -inf in a mask hides a key too; an activation must not see it.  A score of NaN is hidden by nothing.
        keep = mask > float("-inf") if keep is None else keep & (mask > float("-inf"))
    return rule.dense(scores if keep is None else torch.where(keep, scores, rule.hidden), keep)


class Dense(Backend):
    """Takes every call."""

    name = "dense"

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        return None

    def attend(self, call: Call, rule: Rule) -> Tensor:
        call = call.collected()
        dropout = Factors.draw(call.dropout)
        weights = dense_weights(call, rule)
        value = _for_every_head(call.value, call)
        if dropout.p > 0.0:
            weights = weights * dropout.of(weights, 0)
        with full_precision(call.query):
            return (weights @ value.to(weights.dtype)).to(call.query.dtype)

    def attend_with_statistics(self, call: Call, rule: Rule) -> tuple[Tensor, Statistics]:
        return self.attend(call, rule), self.statistics(call, rule)

    def statistics(self, call: Call, rule: Rule) -> Statistics:
        return dense_statistics(dense_weights(call, rule), call.visibility)

    @torch.no_grad()
    def sparse_weights(self, call: Call, rule: Rule) -> SparseWeights:
        return sparse_weights(dense_weights(call, rule))


def _for_every_head(x: Tensor, call: Call) -> Tensor:
    return x.repeat_interleave(call.groups, 1) if call.groups > 1 else x
