"""Softpick: rectified softmax, Zuhri, Fuadi and Aji 2025, https://arxiv.org/abs/2504.20966

    p_j = relu(e^(x_j) - 1) / (sum_i |e^(x_i) - 1| + eps e^m),   m = max(x, 0)

Weights are sparse and need not sum to one.  The rule has no form for blocks: the whole matrix of weights is in memory.
"""

from __future__ import annotations

from tamis.attention.rules import Rule, Softpick
from tamis.mechanisms.base import Inputs, Mechanism


class SoftpickAttention(Mechanism):
    """Rectified softmax: sparse weights whose sum is at most one.  `eps` keeps rows of zero scores from 0 / 0."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def rule(self, inputs: Inputs) -> Rule:
        return Softpick(self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
