"""Transformer layers: attention, feed-forward and norms, in the usual arrangements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis.nn.attention import Attention
from tamis.nn.cache import LayerCache
from tamis.precision import for_products
from tamis.settings import choose


class RMSNorm(nn.RMSNorm):
    """In fp32 under autocast, as LayerNorm: torch does so from 2.12 on, on CUDA devices, and until then takes two dozen
    kernels to norm a half-precision input with fp32 gains."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return super().forward(x.to(self.weight.dtype) if torch.is_autocast_enabled(x.device.type) else x)


NORMS: dict[str, type[nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}
ARRANGEMENTS = ("pre", "post", "both")


def make_norm(kind: str, embed_dim: int, eps: float | None = None) -> nn.Module:
    """A norm by its name; `eps` is what it adds to a variance, if not what torch does."""
    make: Any = NORMS[choose("norm", kind, NORMS)]
    norm: nn.Module = make(embed_dim) if eps is None else make(embed_dim, eps=eps)
    return norm


class FeedForward(nn.Module):
    """Two layers with an activation between; "swiglu" and "geglu" multiply by a gate of the same width."""

    def __init__(
        self, embed_dim: int, ffn_dim: int, activation: str = "relu", dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = choose("activation", activation, ACTIVATIONS)
        self.up = nn.Linear(embed_dim, ffn_dim, bias=bias)
        self.gate = nn.Linear(embed_dim, ffn_dim, bias=bias) if activation.endswith("glu") else None
        self.down = nn.Linear(ffn_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        function, x = ACTIVATIONS[self.activation], for_products(x)
        hidden = function(self.up(x)) if self.gate is None else function(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class Residual(nn.Module):
    """x + sublayer(x) with norms before the sublayer, after the sum, or before and after the sublayer ("both")."""

    def __init__(
        self, embed_dim: int, norm: str, arrangement: str, dropout: float, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.arrangement = choose("arrangement", arrangement, ARRANGEMENTS)
        self.norm = make_norm(norm, embed_dim, norm_eps)
        self.after = make_norm(norm, embed_dim, norm_eps) if arrangement == "both" else None
        self.dropout = nn.Dropout(dropout)

    def before(self, x: Tensor) -> Tensor:
        """What the sublayer gets."""
        return x if self.arrangement == "post" else self.norm(x)

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        if self.after is not None:
            output = self.after(output)
        x = x + self.dropout(output)
        return self.norm(x) if self.arrangement == "post" else x


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention if given, and feed-forward.

    One class for encoder, decoder and decoder-only layers: what it attends to is decided by the arguments of forward.
    """

    def __init__(
        self,
        self_attention: Attention,
        feed_forward: FeedForward,
        cross_attention: Attention | None = None,
        *,
        norm: str = "layernorm",
        arrangement: str = "pre",
        dropout: float = 0.0,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        embed_dim = feed_forward.down.out_features
        self.self_attention, self.cross_attention, self.feed_forward = self_attention, cross_attention, feed_forward
        residual = partial(Residual, embed_dim, norm, arrangement, dropout, norm_eps)
        self.self_residual = residual()
        self.cross_residual = residual() if cross_attention is not None else None
        self.feed_residual = residual()

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        **options: Any,
    ) -> Tensor:
        """x (B, L, embed_dim); `key_mask` (B, Lk) and `memory_mask` (B, Lm) are False for padding."""
        if memory is not None and self.cross_attention is None:
            raise ValueError("this layer has no cross-attention and cannot read memory")
        own = cache.self_attention if cache is not None else None
        residual = self.self_residual
        attended = self.self_attention(
            residual.before(x), key_mask=key_mask, is_causal=is_causal, positions=positions, cache=own, **options
        )
        x = residual(x, attended)
        if self.cross_attention is not None and self.cross_residual is not None:
            if memory is None:
                raise ValueError("this layer has cross-attention and needs memory")
            read = cache.cross_attention if cache is not None else None
            residual = self.cross_residual
            x = residual(x, self.cross_attention(residual.before(x), memory, key_mask=memory_mask, cache=read))
        residual = self.feed_residual
        return residual(x, self.feed_forward(residual.before(x)))
