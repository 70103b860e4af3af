"""How well a model predicts references word by word: perplexity, and its relatives for sparse output layers.

Sparse Text Generation, Martins, Marinho and Martins 2020, https://arxiv.org/abs/2004.02644

With p the predicted distribution over V tokens and x the gold token, averaged over tokens:

    perplexity           exp(mean -log p_x);  infinite as soon as one p_x is 0
    epsilon-perplexity   exp(mean -log((p_x + eps) / (1 + eps V)))
    sparsemax score      p_x + (1 - ||p||^2) / 2;  1 if p is right and certain, 0 if it is wrong and certain
    Jensen-Shannon       log 2 + (p_x log p_x - (1 + p_x) log(1 + p_x)) / 2,  the divergence in nats between p and the
                         one-hot gold;  0 if p_x = 1, log 2 if p_x = 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.data.batching import Batch
from tamis.functional import entmax
from tamis.models import Seq2Seq
from tamis.nn.modes import evaluating


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Means over all gold tokens."""

    tokens: int
    nll: float
    """Mean of -log p of the gold token, in nats; infinite if one was given no probability."""
    perplexity: float
    epsilon: float
    epsilon_perplexity: float
    sparsemax_score: float
    jensen_shannon: float
    support: float
    """Mean number of tokens with a non-zero probability."""
    zero_share: float
    """Share of gold tokens that were given no probability."""

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: None stands for it."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class LikelihoodMeter:
    """Adds up the figures of many batches; sums are in float64 and every token weighs the same.

    Args:
        alpha: of the output layer, 1 for softmax, otherwise alpha-entmax as in training with its loss.
        epsilon: of the epsilon-perplexity.
    """

    def __init__(self, alpha: float = 1.0, epsilon: float = 1e-6) -> None:
        if not alpha >= 1.0:
            raise ValueError(f"alpha must be at least 1, got {alpha}")
        if not 0.0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be a number of at least 0, got {epsilon}")
        self.alpha, self.epsilon = float(alpha), float(epsilon)
        self.tokens = 0
        self._sums = torch.zeros(6, dtype=torch.float64)

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, ignore: int | None = None) -> None:
        """Add logits (..., V) and gold tokens (...), leaving out those that are `ignore`."""
        if logits.shape[:-1] != labels.shape:
            raise ValueError(f"logits (..., V) need labels (...), got {tuple(logits.shape)} and {tuple(labels.shape)}")
        counted = torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore
        gold = labels[counted]
        if not gold.numel():
            return
        z = logits[counted].to(torch.promote_types(logits.dtype, torch.float32))  # (N, V)
        if self.alpha == 1.0:
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            log_gold = log_p.gather(-1, gold[:, None])[:, 0].double()
        else:
            p = entmax(z, self.alpha)
            log_gold = p.gather(-1, gold[:, None])[:, 0].double().log()
        p_gold = log_gold.exp()
        smoothed = (p_gold + self.epsilon).log() - math.log1p(self.epsilon * z.shape[-1])
        values = (
            -log_gold,
            log_gold if self.epsilon == 0.0 else smoothed,
            p_gold + 0.5 * (1.0 - p.square().sum(-1, dtype=torch.float64)),
            math.log(2.0) + 0.5 * (torch.special.xlogy(p_gold, p_gold) - (1.0 + p_gold) * p_gold.log1p()),
            (p > 0.0).sum(-1),
            log_gold.isinf(),
        )
        self._sums += torch.stack([value.double().sum() for value in values]).cpu()
        self.tokens += gold.numel()

    def add(self, other: LikelihoodMeter) -> None:
        """Add all that another meter was given."""
        self.tokens += other.tokens
        self._sums += other._sums

    def result(self) -> Likelihood:
        if not self.tokens:
            raise ValueError("there is no token to average over")
        nll, smoothed, score, divergence, support, zeros = (self._sums / self.tokens).tolist()
        return Likelihood(
            tokens=self.tokens,
            nll=nll,
            perplexity=_exp(nll),
            epsilon=self.epsilon,
            epsilon_perplexity=_exp(-smoothed),
            sparsemax_score=score,
            jensen_shannon=divergence,
            support=support,
            zero_share=zeros,
        )


def translation_likelihood(
    model: Seq2Seq, batches: Iterable[Batch], *, pad_id: int | None = None, alpha: float = 1.0, epsilon: float = 1e-6
) -> Likelihood:
    """Measure an encoder-decoder on references: end-of-sentence tokens count, padding does not.

    `pad_id` is that of the labels, by default the model's.

    Args:
        model: the encoder-decoder.
        batches: references to score.
        pad_id: of the labels; by default the model's.
        alpha: of the output layer.
        epsilon: of the epsilon-perplexity.

    Returns:
        means over all gold tokens.
    """
    meter = LikelihoodMeter(alpha, epsilon)
    device = next(model.parameters()).device
    ignore = model.config.pad_id if pad_id is None else pad_id
    with evaluating(model):
        for batch in batches:
            batch = batch.to(device)
            meter.update(model(batch.source, batch.target), batch.labels, ignore)
    return meter.result()


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf
