"""Rectified linear attention (ReLA).

Sparse Attention with Linear Units, Zhang, Titov and Sennrich 2021, https://arxiv.org/abs/2104.07012

    Z = concat over heads of relu(q k^T / sqrt(d)) v
    Y = g * z r * sigmoid(w * z),   r = (mean z^2 + 1e-8)^(-1/2)        ReLA-g
    Y = g * z r,                    g ~ U(-sqrt(3 / d), sqrt(3 / d))    ReLA-i, d the head size

The norm runs over all concatenated channels of a query, before the output projection; the gate is elementwise, on the
un-normalised z.  A query whose scores are all negative attends to nothing (null attention) and passes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis import functional
from tamis.attention.rules import ACTIVATIONS, Activation, Rule
from tamis.functional.sharding import Heads
from tamis.kernels.rela_norm import ops
from tamis.mechanisms.base import Inputs, Mechanism, span
from tamis.precision import KeepsPrecision
from tamis.settings import check_heads, check_switch, choose

VARIANTS = ("g", "i", "rms", "layernorm", "none")
EPSILON = 1e-8
LAYER_NORM_EPSILON = 1e-5
"""As torch has it."""


class ReLAttention(Mechanism):
    """ReLU attention and the norm that stabilises it.

    Args:
        embed_dim: channels of all heads together, those that the norm runs over.
        num_heads: query heads.
        variant: "g" gated RMSNorm, "i" RMSNorm with a small random gain, "rms" RMSNorm without parameters,
            "layernorm", or "none".
        activation: as in :func:`tamis.relu_attention`; "relu" is the paper's.
        bias, divide_by_count: as there.
        slope: of leaky relu below 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        variant: str = "g",
        activation: str = "relu",
        *,
        bias: float = 0.0,
        divide_by_count: bool = False,
        slope: float = 0.01,
    ) -> None:
        super().__init__()
        check_heads(num_heads, embed_dim)
        choose("activation", activation, ACTIVATIONS)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.activation, self.bias, self.slope = activation, bias, slope
        self.divide_by_count = check_switch("divide_by_count", divide_by_count)
        self.norm = ReLANorm(embed_dim, embed_dim // num_heads, variant)

    def rule(self, inputs: Inputs) -> Rule:
        slope = self.moved("slope")
        if slope is None or self.at_rest:
            return Activation(self.activation, self.bias, self.divide_by_count, self.slope)
        return Activation("leaky_relu", self.bias, self.divide_by_count, slope.item())

    def movable(self) -> dict[str, float]:
        """Return the slope below 0 of what is a relu in the end."""
        return {"slope": 0.0} if self.activation == "relu" else {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        slope = self.moved("slope")
        if slope is None or self.at_rest:
            return super().forward(query, key, value, **arguments)
        # max(x, s x) = (1 - s) relu(x) + s x: every backend knows both, and s stays a tensor.  Dropout draws for each.
        arguments = {name: given for name, given in arguments.items() if name not in ("hidden", "page_norms")}
        rectified, straight = (
            functional.attention(query, key, value, rule=Activation(name, self.bias, self.divide_by_count), **arguments)
            for name in ("relu", "identity")
        )
        return torch.lerp(rectified, straight, slope.to(rectified.dtype))

    def check_layer(self, embed_dim: int, num_heads: int, head_dim: int) -> None:
        super().check_layer(embed_dim, num_heads, head_dim)
        if self.embed_dim != num_heads * head_dim:
            built = f"{type(self).__name__} was built for embed_dim={self.embed_dim}"
            raise ValueError(f"{built}, but the heads of the layer have {num_heads} * {head_dim} channels together")

    def merge(self, context: Tensor) -> Tensor:
        return self.norm(super().merge(context))

    def split_heads(self, heads: Heads) -> None:
        self.num_heads //= heads.size
        self.norm.split_heads(heads)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, activation={self.activation!r}"


class ReLANorm(KeepsPrecision):
    """The norm of ReLA over the last dim, with its gate; fp32 inside, whatever comes in."""

    def __init__(self, embed_dim: int, head_dim: int, variant: str = "g") -> None:
        super().__init__()
        choose("variant", variant, VARIANTS)
        self.embed_dim, self.head_dim, self.variant = embed_dim, head_dim, variant
        gain = variant in ("g", "i", "layernorm")
        self.gain = nn.Parameter(torch.empty(embed_dim, dtype=torch.float32)) if gain else None
        self.gate = nn.Parameter(torch.empty(embed_dim, dtype=torch.float32)) if variant == "g" else None
        self.offset = nn.Parameter(torch.empty(embed_dim, dtype=torch.float32)) if variant == "layernorm" else None
        self.heads: Heads | None = None
        """Whom to ask for means, where only some of the channels are here."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.gain is not None:
                width = math.sqrt(3.0 / self.head_dim)
                self.gain.uniform_(-width, width) if self.variant == "i" else self.gain.fill_(1.0)
            if self.gate is not None:
                width = math.sqrt(3.0 / self.embed_dim)
                self.gate.uniform_(-width, width)
            if self.offset is not None:
                self.offset.zero_()

    def forward(self, z: Tensor) -> Tensor:
        if self.variant == "none":
            return z
        if self.heads is not None:
            return self._of_heads(z, self.heads)
        if self.variant == "layernorm":
            return F.layer_norm(_wide(z), (self.embed_dim,), self.gain, self.offset).to(z.dtype)
        if (by := ops.worker(z)) is None:
            return plain_norm(z, self.gain, self.gate)
        return ops.rela_norm(z, self.gain, self.gate, EPSILON, plain_norm, by)

    def split_heads(self, heads: Heads) -> None:
        self.heads = heads
        heads.split(self, *(name for name, _ in self.named_parameters()))

    def _of_heads(self, z: Tensor, heads: Heads) -> Tensor:
        """Where the channels of other heads lie elsewhere: means are those over all."""
        if self.variant != "layernorm":
            return plain_norm(z, self.gain, self.gate, mean=heads.mean)
        assert self.gain is not None
        assert self.offset is not None
        wide = _wide(z)
        centred = wide - heads.mean(wide)
        y = centred * torch.rsqrt(heads.mean(centred.square()) + LAYER_NORM_EPSILON)
        return (y * self.gain + self.offset).to(z.dtype)

    def extra_repr(self) -> str:
        learned = "".join(f", {name}={span(x)}" for name, x in self.named_parameters())
        return f"{self.embed_dim}, variant={self.variant!r}{learned}"


def mean_of_channels(z: Tensor) -> Tensor:
    return z.mean(-1, keepdim=True)


def plain_norm(
    z: Tensor, gain: Tensor | None, gate: Tensor | None, *, mean: Callable[[Tensor], Tensor] = mean_of_channels
) -> Tensor:
    """The norm and its gate, without what is None, in the dtype of z."""
    dtype, z = z.dtype, _wide(z)
    # A null row would be scaled by 1e4, forward and backward: select instead of multiplying.
    alive = mean((z != 0.0).any(-1, keepdim=True).to(z.dtype)) > 0.0
    safe = torch.where(alive, z, 1.0)
    y = safe * torch.rsqrt(mean(safe.square()) + EPSILON)
    if gain is not None:
        y = y * gain
    if gate is not None:
        y = y * torch.sigmoid(gate * safe)
    return torch.where(alive, y, 0.0).to(dtype)


def _wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()
