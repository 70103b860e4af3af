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
        if not isinstance(logits, Tensor):
            raise TypeError(f"logits must be a floating-point tensor, got {type(logits).__name__}")
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
        value, logs = torch.broadcast_tensors(value.long().unsqueeze(-1), self.log_probs)
        return logs.gather(-1, value[..., :1]).squeeze(-1)

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of all outcomes, (..., K); -inf off the support.

        Where a probability is too small for its dtype its logarithm follows from the threshold instead.
        """
        p = self.probs
        tau, _ = functional.entmax_threshold(self.logits, self.alpha)
        e = self.alpha - 1.0
        z, top = self.logits.detach(), self.logits.detach().amax(-1, keepdim=True)
        gap = torch.where(z == top, 0.0, z - top).to(tau.dtype)
        largest = p.detach().amax(-1, keepdim=True).to(tau.dtype).log()
        if isinstance(e, Tensor) or e != 0.0:
            e = torch.as_tensor(e, dtype=tau.dtype, device=tau.device).detach()
            e = torch.where(e == 0.0, 1e-20, e)
            w = (gap * e * (-e * largest).exp()).clamp(min=-1.0)
            gap = torch.log1p(w) / e
        small = torch.where(gap > -math.inf, gap + largest, -math.inf).to(p.dtype)
        return torch.where(p > torch.finfo(p.dtype).tiny, torch.where(p > 0.0, p, 1.0).log(), small)

    def entropy(self) -> Tensor:
        """Shannon's entropy in nats; 0 log 0 = 0."""
        return -(self.probs * torch.where(self.support_mask, self.probs, 1.0).log()).sum(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all outcomes 0 .. K - 1, impossible ones included, as every batch member must have the same ones."""
        values = torch.arange(self.num_outcomes, device=self.probs.device)
        values = values.view(-1, *(1,) * len(self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values


@register_kl(EntmaxCategorical, EntmaxCategorical)
def _kl(p: EntmaxCategorical, q: EntmaxCategorical) -> Tensor:
    """Infinite where p can produce what q cannot."""
    possible = p.probs > 0.0
    impossible = possible & (q.log_probs == -math.inf)
    log_p = torch.where(possible, p.probs, 1.0).log()
    log_q = torch.where(possible & ~impossible, q.log_probs, 0.0)
    return torch.where(impossible, math.inf, p.probs * (log_p - log_q)).sum(-1)
