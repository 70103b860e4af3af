"""Every analysis of the weights of a model, in one pass over some sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from tamis.analysis import heads, histograms, words
from tamis.analysis.capture import capture
from tamis.analysis.learned import learned_alphas
from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.results import Analysis, SiteAnalysis, Thresholds
from tamis.analysis.rows import Rows, Sums, ratio
from tamis.analysis.scales import ScaleMetrics
from tamis.analysis.shown import ShownSentence, non_zeros
from tamis.analysis.sites import device_of, kind_of
from tamis.analysis.tokens import Run, Sentences, Tokens, run_model
from tamis.nn.modes import evaluating

_ALWAYS = {
    "support_size": heads.support_sums,
    "entropy": heads.entropy_sums,
    "normalised_entropy": heads.normalised_entropy_sums,
    "first_token": heads.first_token_sums,
    "one_hot": heads.one_hot_sums,
    "confidence": heads.confidence_sums,
}
_COUNTED = {"subword_merging": "words", "split_word_merging": "split_words", "interrogation": "questions"}
"""Figures that not every text has, and over what they are averaged."""


def analyze(
    model: nn.Module,
    batches: Iterable[Sentences],
    *,
    shown: Collection[int] = (),
    thresholds: Thresholds | None = None,
    run: Run = run_model,
) -> Analysis:
    """What every head of a model does on some sentences.  Only sums are kept, whatever their number.

    Args:
        model: any module with :class:`tamis.nn.Attention` or :class:`tamis.nn.MultiheadAttention` in it.
        batches: run on the model's device.
        shown: numbers of sentences whose tokens and non-zero weights to keep.
        thresholds: from which score on a head is named.
        run: calls the model on a batch; by default as `Seq2Seq` and `CausalLM` are called.
    """
    stream = _Stream(frozenset(shown))
    device = device_of(model)
    with evaluating(model), capture(model, stream, inputs=stream.scales):
        for batch in batches:
            if len(batch):
                stream.begin(batch.to(device))
                run(model, stream.batch)
    if not stream.sentences:
        raise ValueError("there is no sentence to analyse")
    if missing := stream.wanted - set(stream.shown):
        raise ValueError(f"there is no sentence with the number {', '.join(map(str, sorted(missing)))}")
    return Analysis(
        sentences=stream.sentences,
        sites=stream.sites(),
        alphas=learned_alphas(model),
        scales=stream.scales.results(),
        histograms={f"{site}/{name}": x for site, own in stream.counts.items() for name, x in own.items()},
        shown=stream.shown,
        thresholds=thresholds or Thresholds(),
    )


class _Stream:
    """The consumer of weights: adds each site's to its sums, knowing what batch they are of."""

    batch: Sentences

    def __init__(self, wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self.sentences = 0
        self.metrics, self.scales = AttentionMetrics(), ScaleMetrics()
        self.sums: dict[str, dict[str, Sums]] = {}
        self.counts: dict[str, dict[str, Tensor]] = {}
        self.shown: dict[int, ShownSentence] = {}
        self._rows_to_show: dict[int, int] = {}

    def begin(self, batch: Sentences) -> None:
        """What comes next are the weights of this batch."""
        self.batch = batch
        numbers = batch.numbers or range(self.sentences, self.sentences + len(batch))
        self.sentences += len(batch)
        self._rows_to_show = {row: number for row, number in enumerate(numbers) if number in self.wanted}
        for row, number in self._rows_to_show.items():
            target, source = (_ids(side, row) for side in (batch.target, batch.source))
            assert target is not None
            self.shown[number] = ShownSentence(target=target, source=source)

    def __call__(self, site: str, weights: Tensor, visible: Tensor) -> None:
        rows = Rows.of(weights, visible)
        self.metrics.add(site, rows)
        queries, keys = self.batch.sides(kind_of(site))
        own = self.sums.setdefault(site, {})
        for name, (total, count) in _figures(rows, queries, keys).items():
            before = own.get(name, (0.0, 0.0))
            own[name] = (total.cpu() + before[0], count.cpu() + before[1])
        counts = self.counts.setdefault(site, {})
        for name, table in _counts(rows).items():
            counts[name] = table.cpu() + counts.get(name, 0)
        for row, number in self._rows_to_show.items():
            real = weights[row][:, queries.real[row]][:, :, keys.real[row]]
            self.shown[number].weights[site] = non_zeros(real[None].cpu())

    def sites(self) -> dict[str, SiteAnalysis]:
        return {site: self._site(site, vars(base)) for site, base in self.metrics.results().items()}

    def _site(self, site: str, base: dict[str, Any]) -> SiteAnalysis:
        sums = self.sums[site]
        found: dict[str, Any] = {name: tuple(ratio(own).tolist()) for name, own in sums.items() if name != "confidence"}
        found["confidence"] = _known(*sums["confidence"])
        for name, size in _COUNTED.items():
            if name in sums:
                # Every head sees the same tokens, but a mask may be of one head alone.
                found[size] = int(sums[name][1].max()) if sums[name][1].numel() else 0
                if not found[size]:
                    found[name] = None
        return SiteAnalysis(**base, **found)


def _figures(rows: Rows, queries: Tokens, keys: Tokens) -> dict[str, Sums]:
    found = {name: figure(rows) for name, figure in _ALWAYS.items()}
    if queries is keys and queries.words is not None:
        found["subword_merging"] = words.merging_sums(rows, queries.words)
        found["split_word_merging"] = words.split_merging_sums(rows, queries.words)
    if queries.interrogative is not None and keys.question is not None:
        found["interrogation"] = words.interrogation_sums(rows, queries.interrogative, keys.question)
    return found


def _counts(rows: Rows) -> dict[str, Tensor]:
    support_sum, length = histograms.support_length_sums(rows)
    return {
        "density": histograms.density_counts(rows),
        "support": histograms.support_counts(rows),
        "support_sum": support_sum,
        "length": length,
    }


def _ids(side: Tokens | None, row: int) -> Tensor | None:
    return None if side is None else side.ids[row][side.real[row]].cpu()


def _known(totals: Tensor, counts: Tensor) -> tuple[tuple[float | None, ...], ...]:
    """The means of every head, None where nothing was counted."""
    pairs = zip(totals.tolist(), counts.tolist(), strict=True)
    return tuple(tuple(x / n if n else None for x, n in zip(*pair, strict=True)) for pair in pairs)
