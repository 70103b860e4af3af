"""The decoder-only language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tamis.mechanisms.registry import read_mechanism
from tamis.models.blocks import build_layer, build_output, initialise, positions_of
from tamis.models.config import MOST_LAYERS, ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn.cache import ModelCache
from tamis.nn.layers import make_norm
from tamis.positions import position_rows
from tamis.settings import Spec, at_least, numbers, readable


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(ModelConfig):
    """A small Llama-like model by default, with the mechanism and positions of the ASEntmax paper."""

    embed_dim: int = 256
    ffn_dim: int = 1024
    num_layers: int = 4
    """Of the decoder."""
    mechanism: Spec = "asentmax"
    """A name, or a table with a name and arguments: {"name": "entmax", "alpha": 1.5}."""
    position: Spec = "nape"
    activation: str = "geglu"
    norm: str = "rmsnorm"
    bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_scale: float = 1.0
    """Multiplies embeddings, which start with a size of embed_dim^-0.5 a number, as Gemma does by embed_dim^0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "num_layers", largest=MOST_LAYERS)
        numbers(self, "embedding_scale", above=0.0)
        readable(self, read_mechanism, "mechanism")

    @property
    def depth(self) -> tuple[int, int]:
        return self.num_layers, self.num_layers


class CausalLM(PretrainedModel):
    """Tokens (B, L) to the logits of those that follow, (B, L, vocab_size)."""

    config_class: ClassVar[type[ModelConfig]] = CausalLMConfig
    config: CausalLMConfig

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position = config.build_position()
        self.layers = nn.ModuleList(
            build_layer(config, config.mechanism, self.position) for _ in range(config.num_layers)
        )
        last = config.arrangement != "post"
        self.norm = make_norm(config.norm, config.embed_dim, config.norm_eps) if last else nn.Identity()
        self.output, self.output_bias = build_output(config)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self, config.embed_dim, config.initial_spread)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """Logits.

        Args:
            tokens: (B, L); with a cache only the new ones.
            mask: (B, L), False for padding on either side.
            positions: (L,) or (B or 1, L); by default counted over real tokens, and from 0 in each packed document.
            cu_seqlens: (documents + 1,); documents packed end to end into (1, T), each seeing itself only.
        """
        caches = cache.of_depth(len(self.layers)) if cache is not None else None
        start = cache.length if cache is not None else 0
        if cache is not None:
            mask = cache.extended_mask(mask, tokens.shape[0], tokens.shape[1], tokens.device)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            options["cu_seqlens_q"] = cu_seqlens
        if positions is not None:
            positions = position_rows(positions, *tokens.shape)
        inner = positions  # what attention compares; None while its own defaults say the same
        if positions is None:
            positions = positions_of(mask, start, tokens.shape[1], tokens)
            if cu_seqlens is not None:
                starts = cu_seqlens.long()[(cu_seqlens.long()[1:, None] <= positions).sum(0)]
                positions = positions - starts
            inner = None if mask is None else positions
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        x = self.dropout(self.position.embed(x, positions))
        for number, layer in enumerate(self.layers):
            own = None if caches is None else caches[number]
            x = layer(x, is_causal=True, key_mask=mask, positions=inner, cache=own, **options)
        if cache is not None:
            cache.mask = mask
        x = self.norm(x)
        return F.linear(x, self.embedding.weight, self.output_bias) if self.output is None else self.output(x)

    def new_cache(self) -> ModelCache:
        return ModelCache(self.config.num_layers)
