"""Changing what heads do while a model runs: other alphas, or nothing at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from tamis.analysis.importance import silenced
from tamis.analysis.sites import attention_sites
from tamis.attention.rules import Entmax, Rule, Softmax
from tamis.mechanisms import Mechanism
from tamis.mechanisms.base import Inputs
from tamis.settings import choose


@contextmanager
def altered(
    model: nn.Module,
    *,
    alphas: Mapping[str, Mapping[int, float]] | None = None,
    silent: Collection[tuple[str, int]] = (),
) -> Iterator[None]:
    """Give heads of a model other alphas, or silence them, within a `with` block.

    Alpha 1 is softmax.  A mechanism that is not entmax, such as ReLA, has no alpha, and one that layers share cannot
    have another in one of them alone: both are errors.

    Args:
        model: any model with attention of ours in it.
        alphas: by site and head.
        silent: pairs of site and head.
    """
    with ExitStack() as stack:
        for site, head in silent:
            stack.enter_context(silenced(model, site, head))
        for site, of_heads in (alphas or {}).items():
            stack.enter_context(_with_alphas(model, site, of_heads))
        yield


@contextmanager
def _with_alphas(model: nn.Module, site: str, alphas: Mapping[int, float]) -> Iterator[None]:
    known = attention_sites(model)
    attention = known[choose("site", site, known)]
    mechanism: Mechanism = attention.mechanism
    heads = attention.num_heads
    for head, alpha in alphas.items():
        if not 0 <= head < heads:
            raise ValueError(f"{site} has heads 0 to {heads - 1}, got {head}")
        if not 1.0 <= alpha <= 2.0:
            raise ValueError(f"alpha must lie in [1, 2], got {alpha}")
    if not mechanism.has_alphas:
        raise ValueError(f"{site} has no alpha to change: it is {type(mechanism).__name__}")
    if sum(other.mechanism is mechanism for other in known.values()) > 1:
        raise ValueError(f"{site} shares its mechanism with other layers: its alphas cannot be changed alone")
    original = mechanism.rule
    changed = torch.zeros(heads, dtype=torch.bool)
    values = torch.ones(heads)
    changed[list(alphas)], values[list(alphas)] = True, torch.tensor(list(alphas.values()), dtype=torch.float32)

    def rule(inputs: Inputs) -> Rule:
        return _changed(original(inputs), changed, values, inputs.query.device)

    mechanism.__dict__["rule"] = rule
    try:
        yield
    finally:
        del mechanism.__dict__["rule"]


def _changed(rule: Rule, changed: Tensor, values: Tensor, device: torch.device) -> Rule:
    """Entmax with some heads' alphas replaced."""
    alpha = 1.0 if isinstance(rule, Softmax) else rule.alpha if isinstance(rule, Entmax) else None
    if alpha is None:
        raise ValueError(f"there is no alpha to change in {rule!r}")
    before = torch.as_tensor(alpha, dtype=torch.float32, device=device).detach()
    shape = (-1, 1, 1) if before.ndim > 1 else (-1,)
    changed, values = changed.to(device).reshape(shape), values.to(device).reshape(shape)
    return Entmax(torch.where(changed, values, before))
