"""Decoding by the C++ kernels: what a `DecodingState` does, a step in one call (cpp/decode.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.decoding.prepared import Prepared
from tamis.models.seq2seq import Seq2Seq
from tamis.native.layers import Decoding, encode, starts_of

ROWS = 64
"""Positions whose embeddings are computed at once."""


class NativeState:
    """What has been read and written so far, for B sentences with W hypotheses each.

    Args:
        model: in evaluation mode, without an obstacle.
        source: (B, Ls), padded on either side with the model's pad_id.
    """

    def __init__(self, model: Seq2Seq, source: Tensor, weights: Prepared) -> None:
        self.model = model
        self._weights = weights  # the kernels read them
        real = source != model.config.pad_id
        self.source_lengths = real.sum(-1)
        starts = starts_of(self.source_lengths.tolist())
        memory = model.embed_source(source, real)[real].contiguous()
        encode(weights.encoder, memory, starts)
        self._decoding = Decoding(weights.decoder, memory, starts)
        self._width, self.length = 1, 0
        self._positions = torch.empty(0, model.config.embed_dim)

    def step(self, tokens: Tensor) -> Tensor:
        """Let hypothesis w of sentence b read tokens[b, w]; the logits of what follows, (B, W, vocabulary)."""
        if self.length == self._positions.shape[0]:
            self._positions = torch.cat([self._positions, self._embedded(self.length)])
        logits = self._decoding.step(tokens, self._positions[self.length])
        self.length += 1
        return logits

    def choose(self, parents: Tensor) -> None:
        """Let hypothesis w of sentence b continue what parents[b, w] was."""
        self._decoding.choose(parents)

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences (indices) only."""
        self.source_lengths = self.source_lengths.index_select(0, sentences)
        self._decoding.keep(sentences)

    def _embedded(self, start: int) -> Tensor:
        """What the next positions add to embeddings, (positions, embed_dim)."""
        limit = self.model.config.position_limit()
        positions = torch.arange(start, start + ROWS if limit is None else min(start + ROWS, limit))
        nothing = torch.zeros(1, positions.numel(), self.model.config.embed_dim)
        return self.model.decoder_position.embed(nothing, positions[None])[0]
