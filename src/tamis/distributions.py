"""A categorical distribution with exact zeros."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from tamis import functional

__all__ = ["EntmaxCategorical"]


class EntmaxCategorical(Distribution):
    """Categorical with probabilities ``entmax(logits, alpha)``: some outcomes cannot happen.

    Args:
        logits: scores (..., K).
        alpha: as in :func:`tamis.entmax`, per distribution: it broadcasts against ``logits[..., :1]``.

    `probs`, `sample` and `log_prob` as in `torch.distributions.Categorical`; `log_prob` is -inf off the support.
    `support_mask` says which outcomes are possible.  Gradients reach the logits and alpha.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"logits": constraints.real_vector}
    has_enumerate_support = True

    def __init__(self, logits: Tensor, alpha: float | Tensor = 1.5, validate_args: bool | None = None) -> None:
        if logits.ndim == 0:
            raise ValueError("logits must have a dimension of outcomes, got a 0-dim tensor")
        self.logits, self.alpha = logits, alpha
        self.probs = functional.entmax(logits, alpha, -1)
        super().__init__(logits.shape[:-1], validate_args=validate_args)

    @property
    def num_outcomes(self) -> int:
        return self.logits.shape[-1]

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Any:
        return constraints.integer_interval(0, self.num_outcomes - 1)

    @property
    def support_mask(self) -> Tensor:
        """True for outcomes of positive probability, (..., K)."""
        return self.probs > 0.0

    @property
    def mean(self) -> Tensor:
        """Outcomes have no order: NaN, as for `torch.distributions.Categorical`."""
        return torch.full(self._extended_shape(), math.nan, dtype=self.probs.dtype, device=self.probs.device)

    @property
    def variance(self) -> Tensor:
        return self.mean

    @property
    def mode(self) -> Tensor:
        return self.probs.argmax(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> EntmaxCategorical:
        new = self._get_checked_instance(EntmaxCategorical, _instance)
        batch_shape = torch.Size(batch_shape)
        new.logits = self.logits.expand((*batch_shape, self.num_outcomes))
        new.probs = self.probs.expand((*batch_shape, self.num_outcomes))
        new.alpha = self.alpha
        super(EntmaxCategorical, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        rows = self.probs.detach().reshape(-1, self.num_outcomes)
        count = torch.Size(sample_shape).numel()
        if rows.shape[0] == 0 or count == 0:
            return torch.zeros(shape, dtype=torch.long, device=rows.device)
        return torch.multinomial(rows.float(), count, True).T.reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        value, probs = torch.broadcast_tensors(value.long().unsqueeze(-1), self.probs)
        picked = probs.gather(-1, value[..., :1]).squeeze(-1)
        return torch.where(picked > 0.0, torch.where(picked > 0.0, picked, 1.0).log(), -math.inf)

    def entropy(self) -> Tensor:
        """Shannon's entropy in nats; 0 log 0 = 0."""
        return -(self.probs * self._safe_log()).sum(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All outcomes 0 .. K - 1, impossible ones included, as every batch member must have the same ones."""
        values = torch.arange(self.num_outcomes, device=self.probs.device)
        values = values.view(-1, *(1,) * len(self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values

    def _safe_log(self) -> Tensor:
        return torch.where(self.support_mask, self.probs, 1.0).log()


@register_kl(EntmaxCategorical, EntmaxCategorical)
def _kl(p: EntmaxCategorical, q: EntmaxCategorical) -> Tensor:
    """Infinite where p can produce what q cannot."""
    terms = p.probs * (p._safe_log() - q._safe_log())
    return torch.where(p.support_mask & ~q.support_mask, math.inf, terms).sum(-1)
