"""A long text through a language model, a part at a time: no tensor grows with its length but the cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tamis.models.causal_lm import CausalLM
from tamis.nn.cache import ModelCache

AT_A_TIME = 4096
"""Tokens whose logits are held at once."""


def read(
    model: CausalLM, tokens: Tensor, cache: ModelCache | None = None, at_a_time: int = AT_A_TIME
) -> Iterator[tuple[slice, Tensor]]:
    """Places and their logits (B, some, vocabulary), so many that all rows together have `at_a_time` at most.

    `tokens` (B, L) continue what the cache holds, and are in it afterwards.
    """
    step = max(1, at_a_time // max(1, tokens.shape[0]))
    if cache is None and step < tokens.shape[1]:
        cache = model.new_cache()
    for start in range(0, tokens.shape[1], step):
        places = slice(start, min(start + step, tokens.shape[1]))
        yield places, model(tokens[:, places], cache=cache)
