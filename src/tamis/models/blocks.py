"""How a config becomes layers: shared by the models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis.functional.sharding import active
from tamis.mechanisms.registry import build_mechanism, read_mechanism
from tamis.models.config import ModelConfig
from tamis.nn.attention import Attention
from tamis.nn.layers import FeedForward, TransformerLayer
from tamis.positions import Position
from tamis.settings import Spec


def build_attention(config: ModelConfig, spec: Spec, position: Position | None) -> Attention:
    scaled = position.scaled_heads() if position is not None else None
    name, own = read_mechanism(spec)
    start = {} if config.initial_spread is None else {"initial_spread": config.initial_spread}
    whole = {"name": name, **start, **own}  # a site's own spread goes before that of the model
    return Attention(
        config.embed_dim,
        config.num_heads,
        mechanism=build_mechanism(whole, config.embed_dim, config.num_heads, scaled, head_dim=config.head_dim),
        position=position,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.bias,
        dropout=config.attention_dropout,
    )


def build_layer(config: ModelConfig, spec: Spec, position: Position, cross: Spec | None = None) -> TransformerLayer:
    inside = position if position.inside else None
    return TransformerLayer(
        build_attention(config, spec, inside),
        FeedForward(config.embed_dim, config.ffn_dim, config.activation, config.dropout, config.bias),
        None if cross is None else build_attention(config, cross, None),
        norm=config.norm,
        arrangement=config.arrangement,
        dropout=config.dropout,
        norm_eps=config.norm_eps,
    )


class Embedding(nn.Embedding):
    """Vectors of tokens; where a model has no output layer, also what the scores of tokens are made of."""

    def scores(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(B, L, embed_dim) to the logits of all tokens, (B, L, vocab_size)."""
        return F.linear(x, self.weight, bias)


def build_output(config: ModelConfig) -> tuple[nn.Linear | None, nn.Parameter | None]:
    """The output layer, or None where the embedding is it, and then its bias."""
    if not config.tie_embeddings:
        return nn.Linear(config.embed_dim, config.vocab_size, bias=config.output_bias), None
    return None, nn.Parameter(torch.zeros(config.vocab_size)) if config.output_bias else None


def initialise(model: nn.Module, embed_dim: int) -> None:
    """Xavier for matrices, N(0, 1/embed_dim) for embeddings, zero biases; modules of our own keep their start.

    With inputs of unit variance scores have a standard deviation of about 1 times what each mechanism asks for.
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
                factor = math.sqrt(module.mechanism.initial_spread)
                module.q_proj.weight.mul_(factor)
                module.k_proj.weight.mul_(factor)


def positions_of(mask: Tensor | None, start: int, length: int, like: Tensor) -> Tensor:
    """Positions (B or 1, length) of new tokens: counted over real ones, so that left padding does not shift them.

    `mask` (B, start + length) is False for padding.
    """
    if (sharding := active()) is not None:
        own = sharding.places(length, like.device)
        return own if mask is None else _counted(sharding.whole(mask, 1))[:, own[0]]
    if mask is None:
        return (like.new_zeros(1, length).long().add(1).cumsum(-1) - 1) + start
    return _counted(mask)[:, start:]


def _counted(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
