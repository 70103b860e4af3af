"""The encoder-decoder Transformer, with a mechanism for each of its three kinds of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from tamis.mechanisms.registry import read_mechanism
from tamis.models.blocks import Embedding, build_layer, build_output, initialise, positions_of
from tamis.models.config import MOST_LAYERS, ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn.cache import ModelCache
from tamis.nn.layers import make_norm
from tamis.settings import Spec, at_least, optional_at_least, readable


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """The base model of the papers, but for its vocabulary.  `vocab_size` is that of the target."""

    source_vocab_size: int | None = None
    """None: source and target share one vocabulary and one embedding."""
    embed_dim: int = 512
    ffn_dim: int = 2048
    encoder_layers: int = 6
    """Layers of the encoder."""
    decoder_layers: int = 6
    """Layers of the decoder."""
    encoder_mechanism: Spec = "entmax"
    """A name, or a table with a name and arguments: {"name": "entmax", "alpha": 1.5}.  In a recipe `mechanism` stands
    for this and the two after it."""
    decoder_mechanism: Spec = "entmax"
    """The same for self-attention of the decoder."""
    cross_mechanism: Spec = "entmax"
    """The same for attention of the decoder to the source."""
    position: Spec = "sinusoidal"
    activation: str = "relu"
    norm: str = "layernorm"
    bias: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pad_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "encoder_layers", "decoder_layers", largest=MOST_LAYERS)
        at_least(self, 0, "pad_id")
        optional_at_least(self, 1, "source_vocab_size")
        readable(self, read_mechanism, "encoder_mechanism", "decoder_mechanism", "cross_mechanism")

    @property
    def depth(self) -> tuple[int, int]:
        return self.encoder_layers + 2 * self.decoder_layers, self.encoder_layers + self.decoder_layers

    def embedded(self) -> int:
        return super().embedded() + (self.source_vocab_size or 0) + (self.position_limit() or 0)


class Seq2Seq(PretrainedModel):
    """Tokens of a source (B, Ls) and of a target (B, Lt) to logits (B, Lt, vocab_size)."""

    config_class: ClassVar[type[ModelConfig]] = Seq2SeqConfig
    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config.vocab_size, config.embed_dim)
        own_source = config.source_vocab_size is not None
        self.source_embedding = Embedding(config.source_vocab_size or 0, config.embed_dim) if own_source else None
        self.encoder_position, self.decoder_position = config.build_position(), config.build_position()
        self.encoder = nn.ModuleList(
            build_layer(config, config.encoder_mechanism, self.encoder_position) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            build_layer(config, config.decoder_mechanism, self.decoder_position, config.cross_mechanism)
            for _ in range(config.decoder_layers)
        )
        last = config.arrangement != "post"  # post-norm layers end normalised
        self.encoder_norm = make_norm(config.norm, config.embed_dim, config.norm_eps) if last else nn.Identity()
        self.decoder_norm = make_norm(config.norm, config.embed_dim, config.norm_eps) if last else nn.Identity()
        self.output, self.output_bias = build_output(config)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self, config.embed_dim)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """(B, Ls) to (B, Ls, embed_dim).  `source_mask` is False for padding, by default where `pad_id` stands."""
        mask = self._mask(source, source_mask)
        x = self.embed_source(source, mask)
        compared = positions_of(mask, 0, source.shape[1], source) if self.encoder_position.inside else None
        for layer in self.encoder:
            x = layer(x, key_mask=mask, positions=compared)
        return self.encoder_norm(x)

    def embed_source(self, source: Tensor, mask: Tensor) -> Tensor:
        """Return what the first layer of the encoder reads, (B, Ls, embed_dim); `mask` is False for padding."""
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        return self._embed(embedding, source, self.encoder_position, positions_of(mask, 0, source.shape[1], source))

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        source_mask: Tensor | None = None,
        cache: ModelCache | None = None,
        target_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Logits of the tokens that follow each of `target`; with a cache, `target` holds only new tokens.

        Args:
            target_mask: (B, Lt), False for padding of the new tokens, on either side.
            positions: (B or 1, Lt) of the new tokens; by default they follow what is cached, counted over real tokens.
            visible: (B, Lt, cached + Lt), the tokens that each new one sees, itself included, in place of causality.
                So the beams of a sentence are one row that shares a source and a cache.  It needs `positions`.
        """
        if visible is not None and (positions is None or target_mask is not None):
            raise ValueError("visible goes with positions, and without target_mask: it says what is seen")
        caches = cache.of_depth(len(self.decoder)) if cache is not None else None
        start = cache.length if cache is not None else 0
        mask = target_mask
        if cache is not None:
            mask = cache.extended_mask(target_mask, target.shape[0], target.shape[1], target.device)
        given = positions is not None
        # Otherwise the defaults of attention say the same, or nobody asks.
        compared = mask is not None or (given and (visible is None or self.decoder_position.inside))
        if positions is None:
            positions = positions_of(mask, start, target.shape[1], target)
        x = self._embed(self.embedding, target, self.decoder_position, positions)
        for number, layer in enumerate(self.decoder):
            x = layer(
                x,
                memory,
                # One new token sees all there are, and attention without a mask may take a faster way.
                is_causal=visible is None and (given or target.shape[1] > 1),
                attn_mask=None if visible is None else visible.unsqueeze(1),
                key_mask=mask,
                memory_mask=source_mask,
                positions=positions if compared else None,
                cache=None if caches is None else caches[number],
            )
        if cache is not None:
            cache.mask = mask
        x = self.decoder_norm(x)
        return self.embedding.scores(x, self.output_bias) if self.output is None else self.output(x)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        mask = self._mask(source, source_mask)
        return self.decode(target, self.encode(source, mask), mask, target_mask=target_mask)

    def new_cache(self) -> ModelCache:
        return ModelCache(self.config.decoder_layers)

    def _mask(self, source: Tensor, mask: Tensor | None) -> Tensor:
        return source != self.config.pad_id if mask is None else mask

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, position: Any, positions: Tensor) -> Tensor:
        x = embedding(tokens) * math.sqrt(self.config.embed_dim)
        return self.dropout(position.embed(x, positions))
