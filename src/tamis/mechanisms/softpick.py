"""Softpick: rectified softmax, Zuhri, Fuadi and Aji 2025, https://arxiv.org/abs/2504.20966

    p_j = relu(e^(x_j) - 1) / (sum_i |e^(x_i) - 1| + eps e^m),   m = max(x, 0)

Weights are sparse and need not sum to one.  Its row sum makes it neither entmax nor elementwise, so it has the plain
path only: the whole matrix of weights is in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis import functional
from tamis.mechanisms.base import Mechanism


class SoftpickAttention(Mechanism):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        hidden: Tensor | None = None,
        dropout_p: float = 0.0,
        generator: torch.Generator | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> Tensor:
        scores, keep = functional.attention_scores(query, key, **options)
        x = torch.where(keep, scores, 0.0)  # e^0 - 1 = 0: hidden keys have no part in the sum
        if x.shape[-1] == 0:
            return x
        # Relative to the largest exponent, so that nothing overflows; expm1 where e^x - 1 would cancel.
        top = x.detach().amax(-1, keepdim=True).clamp(min=0.0)
        large = (x - top).exp() - (-top).exp()
        small = x.clamp(max=1.0).expm1() * (-top).exp()
        shifted = torch.where(x > 1.0, large, small)
        return shifted.relu() / (shifted.abs().sum(-1, keepdim=True) + self.eps)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden: Tensor | None = None,
        dropout_p: float = 0.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Tensor:
        weights = self.weights(query, key, **options)
        if dropout_p > 0.0:
            kept = torch.empty_like(weights).bernoulli_(1.0 - dropout_p, generator=generator)
            weights = weights * (kept / (1.0 - dropout_p) if dropout_p < 1.0 else kept)
        groups = query.shape[1] // max(1, value.shape[1])
        value = value.repeat_interleave(groups, 1) if groups > 1 else value
        return (weights @ value.to(weights.dtype)).to(query.dtype)

    def statistics(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Any:
        raise NotImplementedError("Softpick has no streamed statistics; look at weights() instead")

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
