"""What an analysis found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from tamis.analysis.heads import OFFSETS
from tamis.analysis.histograms import DENSITY_BINS, SIZES
from tamis.analysis.learned import alpha_histograms
from tamis.analysis.metrics import FIGURES, SiteMetrics, plain, summarise
from tamis.analysis.scales import SiteScales
from tamis.analysis.shown import ShownSentence, shown_arrays
from tamis.analysis.sites import kind_of

MEANS = (
    *FIGURES, "support_size", "entropy", "normalised_entropy", "first_token", "one_hot", "subword_merging",
    "split_word_merging", "interrogation",
)  # fmt: skip
POSITIONS = {-1: "previous position", 0: "same position", 1: "next position"}


@dataclass(frozen=True, kw_only=True)
class SiteAnalysis(SiteMetrics):
    """All figures of one attention layer, each for every head; see docs/analysis.md for what they mean."""

    support_size: tuple[float, ...]
    entropy: tuple[float, ...]
    """In nats."""
    normalised_entropy: tuple[float, ...]
    """H / log n"""
    first_token: tuple[float, ...]
    one_hot: tuple[float, ...]
    confidence: tuple[tuple[float | None, ...], ...]
    """Head, offset; the offsets are `OFFSETS`.  None: no row sees that key."""
    subword_merging: tuple[float, ...] | None = None
    """The paper's score.  None: there is no word."""
    words: int | None = None
    """Over which it is averaged.  None: nobody said which tokens make a word, or it is cross-attention."""
    split_word_merging: tuple[float, ...] | None = None
    """The same over words of two subwords or more, by which heads are named.  None: no word is split."""
    split_words: int | None = None
    """Over which that is averaged."""
    interrogation: tuple[float, ...] | None = None
    """None: no word that asks sees a question mark."""
    questions: int | None = None
    """Queries over which it is averaged.  None: nobody said which words ask."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From which score on a head is named after what it does."""

    position: float = 0.8
    """Confidence at one offset."""
    subword_merging: float = 0.8
    """Over words of two subwords or more."""
    interrogation: float = 0.5
    first_token: float = 0.5
    one_hot: float = 0.9
    null: float = 0.9
    """Share of null rows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {value}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        reasons = (
            ("subword merging", "no word is split in the data", "split_words"),
            ("interrogation", "no question in the data", "questions"),
        )
        found = []
        for role, reason, size in reasons:
            counted = [count for site in self.sites.values() if (count := getattr(site, size)) is not None]
            if counted and not any(counted):
                found.append(f"{role}: {reason}")
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
        """For :func:`tamis.analysis.write_arrays`: histograms, and the non-zeros of the sentences to be shown."""
        return {**self.histograms, **shown_arrays(self.shown)}

    def to_dict(self) -> dict[str, Any]:
        """All but the arrays, as JSON has it."""
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


def _roles(figures: SiteAnalysis, thresholds: Thresholds) -> list[tuple[str, tuple[float | None, ...], float]]:
    """Each role with the score of every head and the score that it takes."""
    at_offset = zip(OFFSETS, zip(*figures.confidence, strict=True), strict=False)
    roles = [(POSITIONS.get(o, f"position {o:+d}"), tuple(scores), thresholds.position) for o, scores in at_offset]
    roles += [
        ("subword merging", figures.split_word_merging or (), thresholds.subword_merging),
        ("interrogation", figures.interrogation or (), thresholds.interrogation),
        ("first token", figures.first_token, thresholds.first_token),
        ("near one-hot", figures.one_hot, thresholds.one_hot),
        ("null", figures.null_share, thresholds.null),
    ]
    return roles
