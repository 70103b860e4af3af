"""Sampling of tokens from an entmax distribution: improbable tokens cannot come up, with no cut-off to choose."""

from __future__ import annotations

from torch import FloatTensor, LongTensor
from transformers import LogitsProcessor

from tamis.distributions import EntmaxCategorical


class EntmaxLogitsProcessor(LogitsProcessor):
    """Makes `generate(do_sample=True)` draw from ``entmax(logits, alpha)``.

    The scores become logarithms of the probabilities, -inf where they are zero.  `temperature`, `top_k` and `top_p` of
    `generate` are applied afterwards, so leave them at 1, 0 and 1; `temperature` here divides the scores before.
    """

    def __init__(self, alpha: float = 1.5, temperature: float = 1.0) -> None:
        if not alpha >= 1.0:
            raise ValueError(f"alpha must be at least 1, got {alpha}")
        if not temperature > 0.0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.alpha, self.temperature = alpha, temperature

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        distribution = EntmaxCategorical(scores.float() / self.temperature, self.alpha)
        return distribution.log_probs.to(scores.dtype)  # type: ignore[return-value]
