"""Heads that know words: those that merge the subwords of a word, and those that look for a question mark.

Adaptively Sparse Transformers, Correia et al. 2019, https://arxiv.org/abs/1909.00015

    score(C) = max over i in C of the sum over j in C, j != i, of p_ij;  p_ii if C is a single subword

for C the subwords of one word, averaged over words.  A head that only looks at the token itself scores high by it where
most words are a single subword, so heads are named by the same score over the others, `split_word_merging`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.analysis.rows import Rows, Sums, over_rows, ratio

NO_WORD = -1


def subword_merging(weights: Tensor, words: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return how much the subwords of a word attend to one another in self-attention, averaged over words.

    `words` (B, L) has the number of each token's word within its sentence, -1 for tokens of no word.  A word whose
    tokens all see nothing, such as padding, does not count.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(merging_sums(Rows.of(weights, visible), words))


def split_word_merging(weights: Tensor, words: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return how much the subwords of a word attend to one another, over words of two subwords or more.

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.
        words: as in :func:`subword_merging`.

    Returns:
        a tensor (H,).
    """
    return ratio(split_merging_sums(Rows.of(weights, visible), words))


def interrogation(weights: Tensor, interrogative: Tensor, question: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the mean weight on question marks from interrogative words that see one.

    `interrogative` (B, Lq) marks the queries such as "who" and "why", `question` (B, Lk) the keys that are "?".

    Args:
        weights: (B, H, Lq, Lk).
        visible: which keys each query sees; all by default.

    Returns:
        a tensor (H,).
    """
    return ratio(interrogation_sums(Rows.of(weights, visible), interrogative, question))


def merging_sums(rows: Rows, words: Tensor) -> Sums:
    best, found, _ = _best_of_words(rows, words)
    return over_rows(best, found)


def split_merging_sums(rows: Rows, words: Tensor) -> Sums:
    best, found, sizes = _best_of_words(rows, words)
    return over_rows(best, found & (sizes > 1)[:, None])


def _best_of_words(rows: Rows, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The score of each word (B, H, words), whether it has one (B, H, words), and its subwords (B, words)."""
    batch, heads, queries, keys = rows.p.shape
    if words.shape != (batch, queries) or queries != keys:
        shapes = f"{tuple(words.shape)} for weights {tuple(rows.p.shape)}"
        raise ValueError(f"words must be (B, L) of self-attention (B, H, L, L), got {shapes}")
    word = words >= 0
    together = (words[:, :, None] == words[:, None]) & word[:, :, None]  # (B, L, L)
    alone = together.sum(-1, keepdim=True) == 1
    itself = torch.eye(queries, dtype=torch.bool, device=words.device)
    gathered = (rows.p * (together & (alone | ~itself))[:, None]).sum(-1)  # (B, H, L)
    # The best subword of each word: one slot for each word of the batch, and the first for what is none.
    slots, slot = torch.unique(torch.where(word, words, NO_WORD), return_inverse=True)
    counted = word[:, None] & rows.seen
    value = torch.where(counted, gathered, -1.0)
    best = value.new_full((batch, heads, slots.numel()), -1.0)
    best.scatter_reduce_(2, slot[:, None].expand(value.shape), value, "amax")
    sizes = slot.new_zeros(batch, slots.numel()).scatter_add_(1, slot, word.long())
    return best, best >= 0.0, sizes


def interrogation_sums(rows: Rows, interrogative: Tensor, question: Tensor) -> Sums:
    batch, _, queries, keys = rows.p.shape
    for name, mask, length in (("interrogative", interrogative, queries), ("question", question, keys)):
        if mask.dtype != torch.bool or mask.shape != (batch, length):
            got = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"{name} must be boolean of shape ({batch}, {length}), got {got}")
    marks = question[:, None, None]
    asked = (rows.visible & marks).any(-1) & interrogative[:, None]  # (B, H, Lq)
    weight = (rows.p * marks).sum(-1)
    return over_rows(weight, asked)
