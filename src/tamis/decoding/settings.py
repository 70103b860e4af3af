"""How to decode: one table of settings for every method."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from tamis.settings import LARGEST_SEED, Config, at_least, choose, numbers, optional_at_least, shares

METHODS = ("beam", "greedy", "sample")
MOST_HYPOTHESES = 10_000
"""Of a sentence: a step compares all continuations of all of them, and translations get no better beyond a hundred."""
MOST_TOKENS = 1_000_000
"""Of a text: they are written one by one."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Config):
    """Settings of beam search, greedy search and sampling; each method reads those that concern it.

    Lengths count tokens with the end-of-sentence token, as they are scored.
    """

    method: str = "beam"
    """"beam", "greedy" (beam search with one beam) or "sample"."""
    beam: int = 5
    """Hypotheses that are developed for each sentence."""
    n_best: int = 1
    """Hypotheses returned for each sentence: the best, at most `beam`; or so many draws."""
    length_penalty: float = 1.0
    """Scores are divided by ((5 + length) / 6) ** length_penalty, Wu et al. 2016, https://arxiv.org/abs/1609.08144"""
    max_length: int = 256
    """No translation is longer,"""
    max_ratio: float = 2.0
    """nor longer than max_ratio times its source"""
    max_extra: int = 20
    """and so many tokens more."""
    min_length: int = 1
    """A translation does not end earlier, unless nothing else has any probability."""
    max_source_length: int = 1024
    """Longer sources are cut there, with a warning."""
    alpha: float = 1.0
    """The output layer: 1 for softmax, above 1 for entmax, which gives most tokens no probability at all."""
    temperature: float = 1.0
    """Sampling divides the scores by it."""
    top_k: int | None = None
    """Sampling draws from so many most probable tokens."""
    top_p: float | None = None
    """Sampling draws from the fewest most probable tokens that hold this share of the probability."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        choose("method", self.method, METHODS)
        at_least(self, 1, "beam", "n_best", largest=MOST_HYPOTHESES)
        at_least(self, 1, "max_length", "min_length", "max_source_length", largest=MOST_TOKENS)
        at_least(self, 0, "max_extra", largest=MOST_TOKENS)
        at_least(self, 0, "seed", largest=LARGEST_SEED)
        optional_at_least(self, 1, "top_k")
        numbers(self, "max_ratio")
        numbers(self, "temperature", above=0.0)
        numbers(self, "length_penalty", above=-math.inf)
        if abs(self.length_penalty) > 10.0:
            raise ValueError(f"length_penalty must lie in [-10, 10], got {self.length_penalty!r}")
        numbers(self, "alpha")
        if self.alpha < 1.0:
            raise ValueError(f"alpha must be at least 1, got {self.alpha!r}")
        if self.top_p is not None:
            shares(self, "top_p")
            numbers(self, "top_p", above=0.0)
        if self.method == "greedy" and self.n_best > 1:
            raise ValueError(f"greedy search finds one hypothesis, got n_best={self.n_best}")
        if self.method == "beam" and self.n_best > self.beam:
            raise ValueError(f"n_best must be at most beam, got n_best={self.n_best} and beam={self.beam}")

    def of_output(self, alpha: float) -> Self:
        """Return the same for a model whose output layer has this alpha, unless there is one here already."""
        return replace(self, alpha=alpha) if self.alpha == 1.0 else self
