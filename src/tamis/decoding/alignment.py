"""What a model attends to while it is made to write given translations, and the word alignments in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.analysis.capture import capture
from tamis.data.alphabet import is_unspaced
from tamis.models.seq2seq import Seq2Seq
from tamis.nn.modes import evaluating

Span = tuple[int, int]
"""Characters [begin, end) of a text."""


@dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """The cross-attention of one sentence pair."""

    source: list[str]
    """Subwords and the end."""
    target: list[str]
    """Subwords and the end: what is predicted at each step."""
    source_spans: list[Span]
    """The characters that each subword stands for, without the end."""
    target_spans: list[Span]
    weights: Tensor
    """(layers, heads, target, source), on the CPU."""

    def links(
        self, source: str, target: str, *, layer: int | None = None, shifted: bool = False
    ) -> list[tuple[int, int]]:
        """Pairs (source word, target word), counted from 0, in order.  Words stand between white space; of scripts that
        write none each character counts as a word: see `words_of`.

        Each target subword is linked to the source subword with the largest weight, averaged over heads; to none if
        that is the end of the source or no weight is positive.  Words are linked if any of their subwords are.

        Args:
            source, target: the texts that the subwords are of.
            layer: of the decoder, negative from the last; the last but one by default, which aligns best as a rule.
            shifted: look at the step where a subword is the input, and not at the one where it is the output.
        """
        weights = self.weights[_layer(layer, self.weights.shape[0])].mean(0)
        top, best = weights.max(-1)
        source_words, target_words = words_of(source), words_of(target)
        found: set[tuple[int, int]] = set()
        for number, span in enumerate(self.target_spans):
            row = number + shifted
            if top[row] > 0.0 and best[row] < len(self.source_spans):
                for i in _overlapping(self.source_spans[int(best[row])], source_words):
                    found.update((i, j) for j in _overlapping(span, target_words))
        return sorted(found)


def forced_attention(
    model: Seq2Seq, sources: Sequence[list[int]], targets: Sequence[list[int]], bos_id: int, target_pad_id: int
) -> list[Tensor]:
    """Cross-attention (layers, heads, Lt, Ls) of each pair, for sources with their end and targets with theirs."""
    device = next(model.parameters()).device
    source = padded(sources, model.config.pad_id, device)
    target = padded([[bos_id, *tokens[:-1]] for tokens in targets], target_pad_id, device)
    with evaluating(model), capture(model, sites=lambda site: site.endswith("cross")) as captured:
        model(source, target)
        layers = [captured[f"decoder.{number}.cross"].float().cpu() for number in range(model.config.decoder_layers)]
    return [
        torch.stack([layer[i, :, : len(own), : len(read)] for layer in layers])
        for i, (read, own) in enumerate(zip(sources, targets, strict=True))
    ]


def padded(rows: Sequence[list[int]], pad_id: int, device: torch.device) -> Tensor:
    """(B, longest), padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=device)


def _layer(layer: int | None, count: int) -> int:
    if layer is None:
        return max(0, count - 2)
    if not -count <= layer < count:
        raise ValueError(f"layer must lie in [{-count}, {count - 1}], got {layer}")
    return layer


def words_of(text: str) -> list[Span]:
    """Where words stand: between white space; in scripts that write none each character is one, with its marks."""
    spans: list[Span] = []
    for match in re.finditer(r"\S+", text):
        begin = match.start()
        for place in range(match.start() + 1, match.end()):
            apart = is_unspaced(text[place]) or is_unspaced(text[place - 1])
            if apart and not unicodedata.category(text[place]).startswith("M"):
                spans.append((begin, place))
                begin = place
        spans.append((begin, match.end()))
    return spans


def _overlapping(span: Span, words: list[Span]) -> list[int]:
    """Words that share characters with a subword; one that stands for a space only belongs to the word after it."""
    begin, end = span[0], max(span[1], span[0] + 1)
    return [number for number, word in enumerate(words) if begin < word[1] and word[0] < end]
