"""Dense attention, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762

softmax(q k^T / sqrt(d)) v
"""

from __future__ import annotations

from tamis.attention.rules import Rule, Softmax
from tamis.mechanisms.base import Inputs, Mechanism


class SoftmaxAttention(Mechanism):
    """The baseline: every weight is positive."""

    has_alphas = True
    initial_spread = 1.0

    def rule(self, inputs: Inputs) -> Rule:
        return Softmax()
