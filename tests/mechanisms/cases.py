"""Every mechanism at one small size, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tamis.mechanisms import (
    AdaptiveScale,
    ASEntmaxAttention,
    ASSMaxAttention,
    EntmaxAttention,
    LearnedAlpha,
    Mechanism,
    ReLAttention,
    ScalableSoftmaxAttention,
    SoftmaxAttention,
    SoftpickAttention,
)

EMBED, HEADS, HEAD_DIM, BATCH, QUERIES, KEYS = 24, 4, 6, 2, 5, 9

ACTIVATIONS = ("relu", "squared_relu", "leaky_relu", "gelu", "identity", "sigmoid")

VARIANTS = ("g", "i", "rms", "layernorm", "none")

HALF = (torch.float16, torch.bfloat16)

FACTORIES: dict[str, Callable[[], Mechanism]] = {
    "softmax": SoftmaxAttention,
    "entmax-learn": lambda: EntmaxAttention(HEADS),
    "entmax-1": lambda: EntmaxAttention(HEADS, 1),
    "entmax-1.3": lambda: EntmaxAttention(HEADS, 1.3),
    "entmax-2": lambda: EntmaxAttention(HEADS, 2.0),
    "entmax-tensor": lambda: EntmaxAttention(HEADS, torch.tensor([1.0, 1.1, 1.7, 2.0])),
    "entmax-parameter": lambda: EntmaxAttention(HEADS, nn.Parameter(torch.tensor([1.1, 1.3, 1.7, 1.9]))),
    "entmax-range": lambda: EntmaxAttention(HEADS, LearnedAlpha(HEADS, 1.2, 1.6)),
    **{f"rela-{v}": lambda v=v: ReLAttention(EMBED, HEADS, v) for v in VARIANTS},
    **{f"rela-{a}": lambda a=a: ReLAttention(EMBED, HEADS, "g", a, bias=-0.3) for a in ACTIVATIONS},
    "rela-count": lambda: ReLAttention(EMBED, HEADS, "none", divide_by_count=True),
    "softpick": SoftpickAttention,
    "asentmax": lambda: ASEntmaxAttention(EMBED, HEADS),
    "asentmax-small": lambda: ASEntmaxAttention(EMBED, HEADS, init="small"),
    "asentmax-per-head": lambda: ASEntmaxAttention(EMBED, HEADS, 1.3, 0.5, per_head=True),
    "asentmax-some": lambda: ASEntmaxAttention(
        EMBED, HEADS, scaled_heads=torch.tensor([False, True, False, True]), init="small"
    ),
    "asentmax-far": lambda: ASEntmaxAttention(
        EMBED, HEADS, scaled_heads=torch.tensor([False, True, False, True]), unscaled_alpha=1.0
    ),
    "assmax": lambda: ASSMaxAttention(EMBED, HEADS),
    "ssmax": lambda: ScalableSoftmaxAttention(HEADS),
    "ssmax-some": lambda: ScalableSoftmaxAttention(
        HEADS, init=0.4, scaled_heads=torch.tensor([True, False, False, True])
    ),
}

every_mechanism = pytest.mark.parametrize("name", FACTORIES)


def make(name: str, dtype: torch.dtype = torch.float32) -> Mechanism:
    torch.manual_seed(0)
    return FACTORIES[name]().to(dtype)


def inputs(
    dtype: torch.dtype = torch.float32, queries: int = QUERIES, keys: int = KEYS, spread: float = 1.5, seed: int = 1
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": spread * draw(BATCH, HEADS, queries, HEAD_DIM),
        "key": draw(BATCH, HEADS, keys, HEAD_DIM),
        "value": draw(BATCH, HEADS, keys, HEAD_DIM),
        "hidden": draw(BATCH, queries, EMBED),
    }


def some_mask() -> Tensor:
    """(B, 1, Lq, Lk) with one row that sees nothing and one that sees a single key."""
    keep = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(5)) < 0.6
    keep[0, 0, 2] = False
    keep[1, 0, 0] = False
    keep[1, 0, 0, 3] = True
    return keep


def adaptive_scale(scale: AdaptiveScale, hidden: Tensor, count: Tensor) -> Tensor:
    """delta + beta log(n + 1)^gamma, for counts (B, Lq); (B, H, Lq)."""
    bias = scale.bias.double()
    out = (
        bias.expand(*hidden.shape[:2], -1) if scale.weight is None else hidden.double() @ scale.weight.double().T + bias
    )
    raw_beta, raw_gamma = out[..., :HEADS], out[..., HEADS:]
    beta, gamma = torch.log1p(raw_beta.exp()), 2.0 * raw_gamma.tanh()
    return (scale.delta + beta * torch.log(count.double() + 1.0)[..., None] ** gamma).transpose(1, 2)
