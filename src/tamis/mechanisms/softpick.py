"""Softpick: rectified softmax, Zuhri, Fuadi and Aji 2025, https://arxiv.org/abs/2504.20966

    p_j = relu(e^(x_j) - 1) / (sum_i |e^(x_i) - 1| + eps e^m),   m = max(x, 0)

Weights are sparse and need not sum to one.  Its row sum makes it neither entmax nor elementwise, so it has the plain
path only: the whole matrix of weights is in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.attention.checks import Call, check_call, check_dropout
from tamis.attention.reference import Dropout, dense_scores
from tamis.attention.statistics import Statistics, dense_statistics
from tamis.functional.attention import BACKENDS
from tamis.mechanisms.base import Mechanism
from tamis.mechanisms.checks import choose


class SoftpickAttention(Mechanism):
    """Rectified softmax: sparse weights whose sum is at most one.  `eps` keeps rows of zero scores from 0 / 0."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden: Tensor | None = None,
        dropout_p: float = 0.0,
        generator: torch.Generator | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> Tensor:
        if choose("backend", backend, BACKENDS) == "triton":
            raise RuntimeError('backend="triton": there is no kernel for Softpick; backend="auto" takes the plain path')
        call = check_call(query, key, value, **options)
        weights = self._weights(call)
        dropout = Dropout.draw(check_dropout(dropout_p), generator)
        if dropout.p > 0.0:
            weights = weights * dropout.factors(weights.shape, weights.dtype, weights.device, 0)
        value = call.value.repeat_interleave(call.query.shape[1] // max(1, call.key.shape[1]), 1)
        with torch.autocast(value.device.type, enabled=False):  # it has been applied to the inputs
            return (weights @ value.to(weights.dtype)).to(call.query.dtype)

    def weights(
        self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        return self._weights(check_call(query, key, None, **options))

    def statistics(
        self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Statistics:
        call = check_call(query, key, None, **options)
        return dense_statistics(self._weights(call), call.visibility)

    def _weights(self, call: Call) -> Tensor:
        scores, keep = dense_scores(call.query, call.key, call.visibility, call.scale)
        seen = scores > float("-inf") if keep is None else keep & (scores > float("-inf"))
        x = torch.where(seen, scores, 0.0)  # e^0 - 1 = 0: hidden keys have no part in the sum
        if x.shape[-1] == 0:
            return x
        # Relative to the largest exponent, so that nothing overflows; expm1 where e^x - 1 would cancel.
        top = x.detach().amax(-1, keepdim=True).clamp(min=0.0)
        large = (x - top).exp() - (-top).exp()
        small = x.clamp(max=1.0).expm1() * (-top).exp()
        shifted = torch.where(x > 1.0, large, small)
        return shifted.relu() / (shifted.abs().sum(-1, keepdim=True) + self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
