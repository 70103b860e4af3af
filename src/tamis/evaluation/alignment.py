"""Word alignments: how good they are, and those that a translation model's attention makes.

Sparse Attention with Linear Units, Zhang et al. 2021, section on alignment, https://arxiv.org/abs/2104.07012

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|)      A links, S sure and P possible gold links, S within P

The reference is force-decoded; each target subword is linked to the source subword with the largest weight, at the step
where it is the output ("normal") or where it is the input ("shifted").  A null row makes no link.  Words are linked if
any of their subwords are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.analysis.capture import capture
from tamis.data.vocabulary import Vocabulary
from tamis.evaluation.gold import GoldPair, Link, Span
from tamis.models import Seq2Seq
from tamis.nn.modes import evaluating

MODES = ("normal", "shifted")
END = ("drop", "ignore")
SAMPLES, SEED = 1000, 12345
"""Resamples of the pairs, for the interval."""


@dataclass(frozen=True, kw_only=True)
class AlignmentScore:
    """Links against gold, over a corpus."""

    aer: float
    precision: float
    """The share of the links that is possible: ``|A & P| / |A|``."""
    recall: float
    """The share of the sure links that was found: ``|A & S| / |S|``."""
    f1: float
    links: int
    """How many links were proposed, ``|A|``."""

    @classmethod
    def from_counts(cls, links: int, sure: int, hit_sure: int, hit_possible: int) -> AlignmentScore:
        """Make a score from ``|A|``, ``|S|``, ``|A & S|`` and ``|A & P|``; a share of nothing is 0."""
        precision, recall = hit_possible / max(1, links), hit_sure / max(1, sure)
        return cls(
            aer=1.0 - (hit_sure + hit_possible) / (links + sure) if links + sure else 0.0,
            precision=precision,
            recall=recall,
            f1=2.0 * precision * recall / (precision + recall) if precision + recall else 0.0,
            links=links,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def aer(links: Iterable[Link], sure: Iterable[Link], possible: Iterable[Link]) -> float:
    """Return the alignment error rate of one sentence.

    Args:
        links: those to score.
        sure, possible: gold links; the sure ones count as possible too.

    Returns:
        a share from 0 to 1.
    """
    return _score([(set(links), set(sure), set(possible) | set(sure))]).aer


def score_links(links: Sequence[Iterable[Link]], gold: Sequence[GoldPair]) -> AlignmentScore:
    """Score the links of each sentence against its gold; counts are summed over the corpus.

    Args:
        links: those of each sentence.
        gold: as many pairs.

    Returns:
        alignment error rate, precision and recall.
    """
    if len(links) != len(gold):
        raise ValueError(f"there are links for {len(links)} sentences but gold for {len(gold)}")
    return _score([(set(found), pair.sure, pair.possible) for found, pair in zip(links, gold, strict=True)])


def _score(sentences: list[tuple[set[Link], Iterable[Link], Iterable[Link]]]) -> AlignmentScore:
    counts = [0, 0, 0, 0]
    for found, sure, possible in sentences:
        sure, possible = set(sure), set(possible)
        sizes = (len(found), len(sure), len(found & sure), len(found & possible))
        counts = [total + size for total, size in zip(counts, sizes, strict=True)]
    return AlignmentScore.from_counts(*counts)


class Cell(NamedTuple):
    """One figure of a report."""

    mode: str
    layer: int
    head: int | None
    """None: the average of all heads."""
    score: AlignmentScore


@dataclass(frozen=True, kw_only=True)
class LayerAlignment:
    """The heads of one layer's cross-attention, and the average of their weights."""

    heads: tuple[AlignmentScore, ...]
    average: AlignmentScore
    normalised: AlignmentScore
    """The average of weights that were first divided by the sum of their row: where nothing is normalised, as in ReLA,
    a head with large weights outvotes the others.  It is no candidate for the best."""

    @property
    def best_head(self) -> int:
        return min(range(len(self.heads)), key=lambda head: self.heads[head].aer)

    def to_dict(self) -> dict[str, Any]:
        return {
            "heads": [score.to_dict() for score in self.heads],
            "best_head": self.best_head,
            "average": self.average.to_dict(),
            "normalised": self.normalised.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    """AER of a model's attention: mode, layer, and head or average of heads."""

    pairs: int
    normal: tuple[LayerAlignment, ...]
    """By layer: the step where a word is the output."""
    shifted: tuple[LayerAlignment, ...]
    """By layer: the step where a word is the input."""
    interval: tuple[float, float]
    """The middle 95 % of the lowest AER over resamples of the pairs."""

    @property
    def best(self) -> Cell:
        """The lowest AER of all: chosen on these very sentences, and so a little too good."""
        return min(self.cells(), key=lambda cell: cell.score.aer)

    def cells(self) -> Iterator[Cell]:
        """List every figure there is."""
        for mode in MODES:
            for number, layer in enumerate(getattr(self, mode)):
                yield from (Cell(mode, number, head, score) for head, score in enumerate(layer.heads))
                yield Cell(mode, number, None, layer.average)

    def to_dict(self) -> dict[str, Any]:
        best = self.best
        low, high = self.interval
        place = {"mode": best.mode, "layer": best.layer, "head": best.head}
        return {
            "pairs": self.pairs,
            "best": {**place, **best.score.to_dict(), "low": low, "high": high},
            **{mode: [layer.to_dict() for layer in getattr(self, mode)] for mode in MODES},
        }

    def describe(self) -> str:
        """Return a table of AER in percent: layers across, best head and average of heads down."""
        title = f"AER % on {self.pairs} pairs, layer"
        lines = [f"{title:<26}" + " ".join(f"{number:>5}" for number in range(len(self.normal)))]
        for mode in MODES:
            layers = getattr(self, mode)
            rows = {"best head": [x.heads[x.best_head] for x in layers], "average": [x.average for x in layers]}
            for label, scores in rows.items():
                lines.append(f"{mode + ', ' + label:<26}" + " ".join(f"{100 * x.aer:>5.1f}" for x in scores))
        return "\n".join(lines)


def attention_alignment(
    model: Seq2Seq,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    gold: Sequence[GoldPair],
    *,
    end: str = "drop",
    batch_tokens: int = 4096,
) -> AlignmentReport:
    """Align gold pairs by the cross-attention of every layer and head, and score the links.

    Args:
        end: what a target word does whose largest weight is on the end of the source: "drop" makes no link, "ignore"
            takes the largest among words.
        batch_tokens: padded source tokens, or target tokens if those are more, in one batch.

    Returns:
        scores of every layer, head and average of heads.
    """
    if end not in END:
        raise ValueError(f"end must be one of {', '.join(END)}, got {end!r}")
    if not model.config.decoder_layers:
        raise ValueError("a model without decoder layers has no cross-attention to align by")
    if not gold:
        raise ValueError("there is no gold pair to align")
    sentences = [_Sentence.of(pair, source_vocabulary, target_vocabulary) for pair in gold]
    counts = []
    with evaluating(model):
        for batch in _batches(sentences, batch_tokens):
            found = _aligned(model, batch, source_vocabulary, target_vocabulary, end)
            counts += [sentence.counts(index) for sentence, index in zip(batch, found, strict=True)]
    return _report(torch.stack(counts))


class _Sentence(NamedTuple):
    """A gold pair in subwords."""

    source: list[int]
    target: list[int]
    source_words: Tensor
    """(subwords, words): whether a subword is part of a word."""
    target_words: Tensor
    sure: Tensor
    """(target words, source words)"""
    possible: Tensor

    @classmethod
    def of(cls, pair: GoldPair, source_vocabulary: Vocabulary, target_vocabulary: Vocabulary) -> _Sentence:
        source, source_spans = source_vocabulary.spans(pair.source)
        target, target_spans = target_vocabulary.spans(pair.target)
        shape = len(pair.target_spans), len(pair.source_spans)
        return cls(
            source,
            target,
            membership(source_spans, pair.source_spans),
            membership(target_spans, pair.target_spans),
            _table(pair.sure, shape),
            _table(pair.possible, shape),
        )

    def counts(self, index: Tensor) -> Tensor:
        """|A|, |S|, |A & S|, |A & P| for links (..., target subwords) to source subwords, -1 for none."""
        subwords = torch.arange(len(self.source))
        chosen = (index.unsqueeze(-1) == subwords).float()  # (..., target subwords, source subwords)
        linked = self.target_words.T.float() @ chosen @ self.source_words.float() > 0.5
        sizes = (linked, self.sure.expand(linked.shape), linked & self.sure, linked & self.possible)
        return torch.stack([size.sum((-2, -1)) for size in sizes])


def membership(subwords: Sequence[Span], words: Sequence[Span]) -> Tensor:
    """(subwords, words), whether their characters overlap; a subword of only a space belongs to the word after it."""
    pieces = torch.tensor(subwords, dtype=torch.long).reshape(-1, 2)
    wholes = torch.tensor(words, dtype=torch.long).reshape(-1, 2)
    end = torch.maximum(pieces[:, 1], pieces[:, 0] + 1)  # the span of a space is empty, where the next piece begins
    begin = torch.maximum(pieces[:, None, 0], wholes[None, :, 0])
    return begin < torch.minimum(end[:, None], wholes[None, :, 1])


def strongest(weights: Tensor, allowed: Tensor) -> Tensor:
    """The key with the largest weight, (..., Lq) from (..., Lq, Lk), among those allowed; -1 where none is positive."""
    top, index = torch.where(allowed, weights, 0.0).max(-1)
    return torch.where(top > 0.0, index, -1)


def _aligned(
    model: Seq2Seq, batch: list[_Sentence], source_vocabulary: Vocabulary, target_vocabulary: Vocabulary, end: str
) -> Iterator[Tensor]:
    """For each sentence the source subwords that its target subwords are linked to, (modes, layers, heads + 2, n)."""
    device = next(model.parameters()).device
    eos, bos = source_vocabulary.eos_id, target_vocabulary.bos_id
    source = _padded([[*sentence.source, eos] for sentence in batch], model.config.pad_id, device)
    target = _padded([[bos, *sentence.target] for sentence in batch], target_vocabulary.pad_id, device)
    lengths = torch.tensor([len(sentence.source) for sentence in batch], device=device)
    # The end of the source, at index `length`, is a candidate if links to it are to be dropped.
    candidates = torch.arange(source.shape[1], device=device) < lengths[:, None, None, None] + (end == "drop")
    layers = []

    def consume(site: str, weights: Tensor, visible: Tensor) -> None:
        sums = weights.sum(-1, keepdim=True)
        normalised = weights / torch.where(sums > 0.0, sums, 1.0)
        averages = [of.mean(1, keepdim=True) for of in (weights, normalised)]
        everything = torch.cat([weights, *averages], 1)  # (B, H + 2, Lt, Ls)
        layers.append(strongest(everything, candidates))

    with capture(model, consume, sites=lambda site: site.endswith("cross")):
        model(source, target)
    index = torch.stack(layers, 1).cpu()  # (B, layers, H + 2, Lt)
    for sentence, rows in zip(batch, index, strict=True):
        rows = torch.where(rows < len(sentence.source), rows, -1)
        count = len(sentence.target)
        # Row i predicts target word i and has read word i - 1.
        yield torch.stack([rows[..., :count], rows[..., 1 : count + 1]])


def _batches(sentences: list[_Sentence], batch_tokens: int) -> Iterator[list[_Sentence]]:
    """Sentences of like length together, each batch of at most `batch_tokens` or of one sentence."""
    ordered = sorted(sentences, key=lambda sentence: max(len(sentence.source), len(sentence.target)))
    batch: list[_Sentence] = []
    for sentence in ordered:
        longest = max(len(sentence.source), len(sentence.target)) + 1
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(sentence)
    yield batch


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)


def _table(links: Iterable[Link], shape: tuple[int, int]) -> Tensor:
    table = torch.zeros(shape, dtype=torch.bool)
    for source, target in links:
        table[target, source] = True
    return table


def _report(counts: Tensor) -> AlignmentReport:
    """From counts (pairs, 4, modes, layers, heads + 2)."""
    by_mode = {}
    for number, mode in enumerate(MODES):
        layers = []
        for layer in counts.sum(0)[:, number].unbind(1):
            *heads, average, normalised = (AlignmentScore.from_counts(*cell) for cell in layer.T.tolist())
            layers.append(LayerAlignment(heads=tuple(heads), average=average, normalised=normalised))
        by_mode[mode] = tuple(layers)
    return AlignmentReport(
        pairs=len(counts),
        normal=by_mode["normal"],
        shifted=by_mode["shifted"],
        interval=_interval(counts[..., :-1]),
    )


def _interval(counts: Tensor) -> tuple[float, float]:
    """The middle 95 % of the lowest AER, chosen anew in every resample of the pairs."""
    pairs = len(counts)
    drawn = torch.randint(pairs, (SAMPLES, pairs), generator=torch.Generator().manual_seed(SEED))
    times = torch.zeros(SAMPLES, pairs).scatter_add_(1, drawn, torch.ones(SAMPLES, pairs))
    links, sure, hit_sure, hit_possible = (times @ counts.flatten(2).transpose(0, 1).float()).unbind()
    lowest = (1.0 - (hit_sure + hit_possible) / (links + sure).clamp(min=1.0)).amin(-1)
    low, high = lowest.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
