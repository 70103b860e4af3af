"""What an analysis found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from tamis.analysis.figures import FIGURES
from tamis.analysis.heads import OFFSETS
from tamis.analysis.histograms import DENSITY_BINS, SIZES
from tamis.analysis.learned import alpha_histograms
from tamis.analysis.metrics import plain, summarise
from tamis.analysis.rows import Sums, ratio
from tamis.analysis.scales import SiteScales
from tamis.analysis.shown import ShownSentence, shown_arrays
from tamis.analysis.sites import kind_of
from tamis.settings import choose

MEANS = tuple(figure.name for figure in FIGURES if not figure.offsets)


@dataclass(frozen=True)
class SiteAnalysis:
    """All figures of one attention layer, as attributes under the names of `tamis.analysis.figures.FIGURES`.

    A value for each head, but for diversity, which the layer has one of; None where a text has nothing to measure.
    Beside them stand the numbers of what was averaged over: `rows`, `compared`, `words`, `split_words`, `questions`,
    None where nobody said which tokens those are.
    """

    values: dict[str, Any]

    @classmethod
    def of(cls, sums: Mapping[str, Sums]) -> SiteAnalysis:
        found: dict[str, Any] = {}
        for figure in FIGURES:
            total, count = sums.get(figure.name, (None, None))
            if total is None or count is None:
                found[figure.name] = None
                if figure.counted:
                    found[figure.counted] = None
                continue
            found[figure.name] = _known(total, count) if figure.offsets else _per_head(ratio((total, count)))
            if figure.counted:
                # Every head sees the same tokens, but a mask may be of one head alone.
                found[figure.counted] = int(count.max()) if count.numel() else 0
                if figure.missing and not found[figure.counted]:
                    found[figure.name] = None
        return cls(found)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"a site has the figures {', '.join(MEANS)}, got {name!r}") from None

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in self.values.items()}


class Thresholds:
    """From which score on a head is named after what it does, by the names of `DEFAULTS`: `Thresholds(position=0.7)`.

    Those that are not given are as the figures declare them.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {
        figure.threshold_name: figure.threshold for figure in FIGURES if figure.threshold is not None
    }

    def __init__(self, **thresholds: float) -> None:
        for name, value in thresholds.items():
            choose("threshold", name, self.DEFAULTS)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {value}")
        self._values = {**self.DEFAULTS, **thresholds}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


@dataclass(frozen=True, kw_only=True)
class NamedHead:
    """A head that does something one can name."""

    site: str
    head: int
    role: str
    """Such as "previous position"."""
    score: float
    alpha: float | None = None
    """Where it is learned."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What the heads of a model do on some sentences."""

    sentences: int
    sites: dict[str, SiteAnalysis]
    alphas: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By site, those that are learned."""
    scales: dict[str, SiteScales] = field(default_factory=dict)
    """By site, those that depend on the length."""
    histograms: dict[str, Tensor] = field(default_factory=dict)
    """SITE/density (H, bins), SITE/support, SITE/support_sum and SITE/length (H, sizes)."""
    shown: dict[int, ShownSentence] = field(default_factory=dict)
    """The sentences that were asked for, by their number."""
    thresholds: Thresholds = field(default_factory=Thresholds)

    def named_heads(self) -> list[NamedHead]:
        """Heads above a threshold, by role and then from the highest score down."""
        found = [
            NamedHead(site=site, head=head, role=role, score=score, alpha=self._alpha(site, head))
            for site, figures in self.sites.items()
            for role, scores, threshold in _roles(figures, self.thresholds)
            for head, score in enumerate(scores)
            if score is not None and score >= threshold
        ]
        return sorted(found, key=lambda named: (named.role, -named.score))

    def without(self) -> list[str]:
        """Roles that no head can have because of the data, each with the reason."""
        found = []
        for figure in FIGURES:
            if figure.role is None or figure.missing is None or figure.counted is None:
                continue
            counts = [site.values[figure.counted] for site in self.sites.values()]
            counted = [count for count in counts if count is not None]
            if counted and not any(counted):
                found.append(f"{figure.role}: {figure.missing}")
        return found

    def summary(self) -> dict[str, dict[str, float]]:
        """Plain means over heads and layers, by kind of attention and for "all"."""
        return summarise(self.sites, MEANS)

    def density_histograms(self) -> dict[str, list[int]]:
        """Rows by density, for each kind of attention."""
        found: dict[str, Tensor] = {}
        for site in self.sites:
            rows = self.histograms[f"{site}/density"].sum(0)
            found[kind_of(site)] = found[kind_of(site)] + rows if kind_of(site) in found else rows
        return {kind: counts.tolist() for kind, counts in found.items()}

    def arrays(self) -> dict[str, Tensor]:
        """Return arrays for :func:`tamis.analysis.write_arrays`: histograms, and the non-zeros of the sentences to be
        shown."""
        return {**self.histograms, **shown_arrays(self.shown)}

    def to_dict(self) -> dict[str, Any]:
        """Return all but the arrays, as JSON has it."""
        return plain(
            {
                "sentences": self.sentences,
                "offsets": OFFSETS,
                "density_bins": [k / DENSITY_BINS for k in range(DENSITY_BINS + 1)],
                "sizes": SIZES,
                "thresholds": self.thresholds.to_dict(),
                "summary": self.summary(),
                "density_histograms": self.density_histograms(),
                "alphas": self.alphas,
                "alpha_histograms": alpha_histograms(self.alphas),
                "named_heads": [named.to_dict() for named in self.named_heads()],
                "sites": {site: {"kind": kind_of(site), **x.to_dict()} for site, x in self.sites.items()},
                "support_by_length": {site: self._support_by_length(site) for site in self.sites},
                "scales": {site: scales.to_dict() for site, scales in self.scales.items()},
                "shown": sorted(self.shown),
            }
        )

    def _alpha(self, site: str, head: int) -> float | None:
        alphas = self.alphas.get(site, ())
        return alphas[head] if len(alphas) == len(self.sites[site].density) else None

    def _support_by_length(self, site: str) -> dict[str, Any]:
        """The mean support of each head for each number of visible keys that came."""
        sums, rows = self.histograms[f"{site}/support_sum"], self.histograms[f"{site}/length"]
        came = rows.sum(0).nonzero().flatten()
        means = sums[:, came].double() / rows[:, came].clamp(min=1)
        return {"keys": [SIZES[place] for place in came.tolist()], "support": means.tolist()}


def _roles(site: SiteAnalysis, thresholds: Thresholds) -> Iterator[tuple[str, Sequence[float | None], float]]:
    """Each role with the score of every head and the score that it takes."""
    for figure in FIGURES:
        if figure.threshold is None:
            continue
        for column in figure.columns():
            scores = site.values[figure.name] or ()
            if figure.offsets:
                scores = [head[column["place"]] for head in scores]
            yield column["role"], scores, thresholds[figure.threshold_name]


def _per_head(values: Tensor) -> Any:
    """Return a list of one value for each head, or the value itself."""
    return tuple(values.tolist()) if values.ndim else float(values)


def _known(totals: Tensor, counts: Tensor) -> tuple[tuple[float | None, ...], ...]:
    """The means of every head, None where nothing was counted."""
    pairs = zip(totals.tolist(), counts.tolist(), strict=True)
    return tuple(tuple(x / n if n else None for x, n in zip(*pair, strict=True)) for pair in pairs)
