"""How a config becomes layers: shared by the models."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from tamis.mechanisms import build_mechanism
from tamis.mechanisms.checks import choose
from tamis.mechanisms.registry import Spec
from tamis.nn.attention import Attention
from tamis.nn.layers import FeedForward, TransformerLayer
from tamis.positions import NAPE, ALiBi, LearnedPositions, NoPE, Position, RoPE, Sinusoidal

POSITIONS = ("sinusoidal", "learned", "rope", "alibi", "nape", "none")
INSIDE = ("rope", "alibi", "nape")
"""Those that act inside attention; the others are added to the embeddings, which is the model's own work."""


class BlockConfig(Protocol):
    """What layers need to know; both model configs provide it."""

    @property
    def embed_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm(self) -> str: ...
    @property
    def arrangement(self) -> str: ...
    @property
    def bias(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def position(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def rope_base(self) -> float: ...


def build_position(config: BlockConfig) -> Position:
    match choose("position", config.position, POSITIONS):
        case "sinusoidal":
            return Sinusoidal(config.embed_dim)
        case "learned":
            return LearnedPositions(config.embed_dim, config.max_length)
        case "rope":
            return RoPE(config.head_dim or config.embed_dim // config.num_heads, config.rope_base)
        case "alibi":
            return ALiBi(config.num_heads)
        case "nape":
            return NAPE(config.num_heads)
        case _:
            return NoPE()


def build_attention(config: BlockConfig, spec: Spec, position: Position | None) -> Attention:
    scaled: Tensor | None = position.scaled_heads() if position is not None else None
    return Attention(
        config.embed_dim,
        config.num_heads,
        mechanism=build_mechanism(spec, config.embed_dim, config.num_heads, scaled, head_dim=config.head_dim),
        position=position,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.bias,
        dropout=config.attention_dropout,
    )


def build_layer(config: BlockConfig, spec: Spec, position: Position, cross: Spec | None = None) -> TransformerLayer:
    inside = position if config.position in INSIDE else None
    return TransformerLayer(
        build_attention(config, spec, inside),
        FeedForward(config.embed_dim, config.ffn_dim, config.activation, config.dropout, config.bias),
        None if cross is None else build_attention(config, cross, None),
        norm=config.norm,
        arrangement=config.arrangement,
        dropout=config.dropout,
    )


def initialise(model: nn.Module, embed_dim: int, spread: float = 1.0) -> None:
    """Xavier for matrices, N(0, 1/embed_dim) for embeddings, zero biases; modules of our own keep their start.

    With inputs of unit variance scores have a standard deviation of about 1, times `spread`.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embed_dim**-0.5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Attention):
                module.q_proj.weight.mul_(math.sqrt(spread))
                module.k_proj.weight.mul_(math.sqrt(spread))


def positions_of(mask: Tensor | None, start: int, length: int, like: Tensor) -> Tensor:
    """Positions (B or 1, length) of new tokens: counted over real ones, so that left padding does not shift them.

    `mask` (B, start + length) is False for padding.
    """
    if mask is None:
        return (like.new_zeros(1, length).long().add(1).cumsum(-1) - 1) + start
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
