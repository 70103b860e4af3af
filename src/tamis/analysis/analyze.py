"""Every analysis of the weights of a model, in one pass over some sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from tamis.analysis import histograms
from tamis.analysis.capture import capture
from tamis.analysis.figures import FIGURES
from tamis.analysis.learned import learned_alphas
from tamis.analysis.results import Analysis, SiteAnalysis, Thresholds
from tamis.analysis.rows import Rows, SumsBySite
from tamis.analysis.scales import ScaleMetrics
from tamis.analysis.shown import ShownSentence
from tamis.analysis.sites import device_of, kind_of
from tamis.analysis.tokens import Run, Sentences, Tokens, run_model
from tamis.attention.statistics import sparse_weights
from tamis.nn.modes import evaluating


def analyze(
    model: nn.Module,
    batches: Iterable[Sentences],
    *,
    shown: Collection[int] = (),
    thresholds: Thresholds | None = None,
    run: Run = run_model,
) -> Analysis:
    """Measure what every head of a model does on some sentences.  Only sums are kept, whatever their number.

    Args:
        model: any module with :class:`tamis.nn.Attention` or :class:`tamis.nn.MultiheadAttention` in it.
        batches: run on the model's device.
        shown: numbers of sentences whose tokens and non-zero weights to keep.
        thresholds: from which score on a head is named.
        run: calls the model on a batch; by default as `Seq2Seq` and `CausalLM` are called.

    Returns:
        figures of every site, as attributes and as JSON.
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
        self.scales, self.sums = ScaleMetrics(), SumsBySite()
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
        queries, keys = self.batch.sides(kind_of(site))
        measured = {figure.name: figure.sums(rows, queries, keys) for figure in FIGURES}
        self.sums.add(site, {name: sums for name, sums in measured.items() if sums is not None})
        counts = self.counts.setdefault(site, {})
        for name, table in _counts(rows).items():
            counts[name] = table.cpu() + counts.get(name, 0)
        for row, number in self._rows_to_show.items():
            real = weights[row][:, queries.real[row]][:, :, keys.real[row]]
            self.shown[number].weights[site] = sparse_weights(real[None].cpu().float())

    def sites(self) -> dict[str, SiteAnalysis]:
        return {site: SiteAnalysis.of(sums) for site, sums in self.sums.items()}


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
