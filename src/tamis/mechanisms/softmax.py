"""Dense attention, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762

softmax(q k^T / sqrt(d)) v
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tamis.mechanisms.base import Mechanism


class SoftmaxAttention(Mechanism):
    """The baseline: every weight is positive."""

    def settings(self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        return {"alpha": 1.0}
