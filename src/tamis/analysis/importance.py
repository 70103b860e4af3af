"""How much a model needs each head: its loss with one head at a time silenced.

Are Sixteen Heads Really Better than One?, Michel et al. 2019, https://arxiv.org/abs/1905.10650
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tamis.analysis.metrics import plain
from tamis.analysis.sites import AttentionSite, NamedSite, attention_sites, refuse_compiled
from tamis.nn.modes import evaluating
from tamis.settings import choose


@dataclass(frozen=True, kw_only=True)
class HeadImportance:
    """What silencing each head costs."""

    baseline: float
    """The loss with all heads."""
    change: dict[str, tuple[float, ...]]
    """By site, for each head: the loss without it less the baseline.  Near 0: an idle head; below 0: a harmful one."""

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))


@contextmanager
def silenced(model: nn.Module, site: str, head: int) -> Iterator[None]:
    """Silence one head of a model within a `with` block: its channels are zero where the output projection reads them.

    That is after a mechanism's norm over all heads, such as ReLA's, so the other heads go on as they were.  Zeros
    before the norm would make them louder, and a LayerNorm would make something else of the zeros.

    Args:
        model: any model with attention of ours in it.
        site, head: which.
    """
    known = attention_sites(model)
    attention = known[choose("site", site, known)]
    if not 0 <= head < attention.num_heads:
        raise ValueError(f"{site} has heads 0 to {attention.num_heads - 1}, got {head}")
    refuse_compiled(model)
    mute = _without(attention, head)
    if isinstance(attention, NamedSite):
        handle = attention.register_forward_hook(lambda module, args, output: mute(output))
    else:
        handle = attention.out_proj.register_forward_pre_hook(lambda module, args: (mute(args[0]),))
    try:
        yield
    finally:
        handle.remove()


def head_importance(
    model: nn.Module, loss: Callable[[], float], *, sites: Callable[[str], bool] | None = None
) -> HeadImportance:
    """Measure what a loss becomes when each head is silenced alone.

    Args:
        model: any model with attention of ours in it.
        loss: measures the model on some data, always the same; it is called once for each head and once more.
        sites: which sites to try, by name; all by default.

    Returns:
        the change of the loss, by site and head.
    """
    change: dict[str, tuple[float, ...]] = {}
    with evaluating(model):
        baseline = float(loss())
        for site, attention in attention_sites(model).items():
            if sites is None or sites(site):
                without = []
                for head in range(attention.num_heads):
                    with silenced(model, site, head):
                        without.append(float(loss()))
                change[site] = tuple(value - baseline for value in without)
    return HeadImportance(baseline=baseline, change=change)


def _without(attention: AttentionSite, head: int) -> Callable[[Tensor], Tensor]:
    channels = torch.arange(attention.num_heads).repeat_interleave(attention.head_dim) == head
    return lambda merged: merged.masked_fill(channels.to(merged.device), 0.0)
