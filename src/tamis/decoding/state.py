"""A batch of sentences that are being decoded: the encoded sources, and one tree of cached tokens for each.

The hypotheses of a sentence share most of their tokens.  So they are not rows of a batch, each with a cache of its own
that has to be copied whenever beams change places, but *queries* of one row: the cache of a sentence holds every token
that some hypothesis has in its past, once, and a boolean mask says which of them each hypothesis sees.  Choosing among
beams is then a choice of rows of that mask, and no keys or values move; new tokens take the places of those that no
hypothesis has in its past any longer.  The source is read by all hypotheses of a sentence from one copy of its keys.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from tamis import functional
from tamis.decoding.settings import DecodingConfig
from tamis.models.seq2seq import Seq2Seq
from tamis.native import layers as native
from tamis.native import product
from tamis.settings import check_memory


class DecodingState:
    """What has been read and written so far, for B sentences with W hypotheses each.

    Args:
        model: in evaluation mode.
        source: (B, Ls), padded on either side with the model's pad_id.
    """

    def __init__(self, model: Seq2Seq, source: Tensor) -> None:
        self.model = model
        real = source != model.config.pad_id
        self.memory = model.encode(source, real)
        self.source_lengths = real.sum(-1)
        self.source_mask = None if bool(real.all()) else real
        """(B, Ls), False for padding; None where there is none, and nothing to hide at every step."""
        self.cache = model.new_cache()
        self.length = 0
        """Tokens that each hypothesis has read."""
        self.seen: Tensor | None = None
        """(B, W, cached): what each hypothesis has in its past; None as long as that is everything."""

    def step(self, tokens: Tensor) -> Tensor:
        """Let hypothesis w of sentence b read tokens[b, w]; the logits of what follows, (B, W, vocabulary)."""
        batch, width = tokens.shape
        if self.seen is None and width == 1:
            logits = self.model.decode(tokens, self.memory, self.source_mask, self.cache)
        else:
            self.seen = self._with_own(batch, width, tokens.device)
            positions = torch.full((1, width), self.length, device=tokens.device)
            logits = self.model.decode(
                tokens, self.memory, self.source_mask, self.cache, positions=positions, visible=self.seen
            )
        self.length += 1
        return logits

    def choose(self, parents: Tensor) -> None:
        """Let hypothesis w of sentence b continue what parents[b, w] was."""
        batch, width = parents.shape
        if self.seen is None:
            if width == 1:
                return
            self.seen = torch.ones(batch, 1, self.length, dtype=torch.bool, device=parents.device)
        self.seen = self.seen.gather(1, parents.unsqueeze(2).expand(-1, -1, self.seen.shape[2]))

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences (indices) only."""
        self.memory = self.memory.index_select(0, sentences)
        self.source_lengths = self.source_lengths.index_select(0, sentences)
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, sentences)
        self.cache.reorder(sentences)
        if self.seen is not None:
            self.seen = self.seen.index_select(0, sentences)

    def _with_own(self, batch: int, width: int, device: torch.device) -> Tensor:
        """What is seen, with a place for the new token of each hypothesis that it alone sees, (B, W, cached)."""
        own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
        if self.seen is None:
            return own
        needed = self.seen.any(1)  # (B, cached)
        if self.seen.shape[2] - int(needed.sum(-1).max()) < width:
            return torch.cat([self.seen, own], 2)
        slots = needed.byte().argsort(dim=-1, stable=True)[:, :width]
        self.cache.overwrite(slots)
        return self.seen.scatter(2, slots.unsqueeze(1).expand(-1, width, -1), own)


class State(Protocol):
    """What searches need of a :class:`DecodingState`, or of whatever does its work."""

    model: Seq2Seq
    source_lengths: Tensor

    def step(self, tokens: Tensor) -> Tensor: ...

    def choose(self, parents: Tensor) -> None: ...

    def keep(self, sentences: Tensor) -> None: ...


def best_tokens(logits: Tensor, alpha: float, count: int, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens but the forbidden ones: log-probabilities (B, W, count), and the tokens.

    The output layer is softmax, or entmax, where tokens off the support have -inf.  Probabilities are those of the
    whole distribution; logarithms are taken of what is returned only.  `logits` is overwritten.
    """
    logits = logits.float()
    count = min(count, logits.shape[-1])
    if alpha == 1.0 and logits.device.type == "cpu" and product.obstacle() is None:
        return native.best(logits, count, forbidden)
    if alpha == 1.0:
        highest = logits.amax(-1, keepdim=True)
        total = (logits - highest).exp_().sum(-1, keepdim=True)
        top, tokens = _topk(logits.index_fill_(-1, forbidden, -math.inf), count)
        return top.sub_(highest).sub_(total.log_()), tokens
    top, tokens = _topk(functional.entmax(logits, alpha).index_fill_(-1, forbidden, 0.0), count)
    return top.log_(), tokens


_FOLDS = 16


def _topk(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`rows.topk(count)` of long rows (..., n), which takes the CPU several times as long as a look at every number.

    Let a row be folded into lines that stand under each other: its best numbers are in the columns that have the best
    maxima, so only those, and what is left over behind the last line, have to be compared.
    """
    width = rows.shape[-1] // _FOLDS
    if rows.device.type != "cpu" or width <= _FOLDS * count:
        plain = rows.topk(count)
        return plain.values, plain.indices
    lines = rows[..., : _FOLDS * width].unflatten(-1, (_FOLDS, width))
    columns = lines.amax(-2).topk(count).indices
    folded = columns.unsqueeze(-1) + torch.arange(0, _FOLDS * width, width)
    rest = torch.arange(_FOLDS * width, rows.shape[-1])
    candidates = torch.cat([folded.flatten(-2), rest.expand(*columns.shape[:-1], -1)], -1)
    top, index = rows.gather(-1, candidates).topk(count)
    return top, candidates.gather(-1, index)


def check_source(model: Seq2Seq, source: Tensor) -> None:
    """Raise unless these are tokens that the model can read."""
    if source.ndim != 2 or source.is_floating_point() or source.dtype == torch.bool:
        raise ValueError(f"source must be token ids (B, Ls), got {source.dtype} of shape {tuple(source.shape)}")
    if source.shape[1] == 0:
        raise ValueError("source must have at least one token, such as the end of the sentence")
    size = model.config.source_vocab_size or model.config.vocab_size
    if source.numel() and not 0 <= int(source.min()) <= int(source.max()) < size:
        raise ValueError(f"source ids must lie in [0, {size - 1}], got {int(source.min())} to {int(source.max())}")


def check_ids(model: Seq2Seq, **ids: int) -> None:
    for name, value in ids.items():
        if not 0 <= value < model.config.vocab_size:
            raise ValueError(f"{name} must lie in [0, {model.config.vocab_size - 1}], got {value}")


def bytes_of(hypotheses: int, vocab_size: int, limit: int) -> int:
    """What a search of a sentence surely needs: for each hypothesis scores of all tokens, the best of them, and what is
    written."""
    return hypotheses * (4 * vocab_size + 16 * min(hypotheses, vocab_size) + 16 * limit)


def check_room(state: State, limits: Tensor, hypotheses: int, setting: str) -> None:
    """Raise if a batch needs more memory than is free."""
    needed = limits.numel() * bytes_of(hypotheses, state.model.config.vocab_size, int(limits.max()))
    what = f"{hypotheses:,} hypotheses of {limits.numel():,} sentences of up to {int(limits.max()):,} tokens"
    check_memory(needed, limits.device, what, f"{setting}, max_length or the number of sentences")


def length_limits(state: State, config: DecodingConfig) -> Tensor:
    """The most tokens, end included, of each sentence's translation, (B,); at least 1."""
    limits = (state.source_lengths * config.max_ratio + config.max_extra).long().clamp(1, config.max_length)
    if (known := state.model.config.position_limit()) is not None:
        limits = limits.clamp(max=known)
    return limits
