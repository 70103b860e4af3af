"""Translation quality: sacreBLEU and chrF, with confidence intervals and paired significance by bootstrap.

Scores are sacreBLEU's, from its statistics per sentence, and resamples are drawn as sacreBLEU draws them: for single
runs, intervals and p-values are the ones that `sacrebleu --confidence` and `--paired-bs` print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 12345
"""SacreBLEU's own."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """A corpus score with the 95 % interval of its bootstrap."""

    score: float
    low: float
    high: float
    signature: str
    """Everything that has to be known to reproduce the score."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TranslationScore:
    """How good translations are."""

    sentences: int
    bleu: MetricScore
    chrf: MetricScore

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One system against the baseline, under one metric."""

    scores: tuple[float, ...]
    """The score of each run."""
    mean: float
    spread: float
    """Standard deviation over runs; 0 for one run."""
    difference: float
    """The difference of the means, system less baseline."""
    low: float
    """The 95 % interval of the difference."""
    high: float
    p_value: float
    """As sacreBLEU computes it; 1 for systems that never differ."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Systems against a baseline on the same sentences."""

    baseline: str
    sentences: int
    samples: int
    signatures: dict[str, str]
    """By metric."""
    systems: dict[str, dict[str, Difference]]
    """By system, then metric; the baseline is compared with itself."""

    def describe(self) -> str:
        """Return a table: mean and spread over runs, and the difference from the baseline with its interval."""
        width = max(8, *map(len, self.systems))
        lines = [f"{self.sentences} sentences, {self.samples} resamples, baseline {self.baseline}"]
        for metric, signature in self.signatures.items():
            lines += ["", f"{metric}  {signature}"]
            for name, found in self.systems.items():
                x = found[metric]
                line = f"{name:<{width}}  {x.mean:6.2f}"
                if len(x.scores) > 1:  # one run has no spread
                    line += f"  +- {x.spread:4.2f} over {len(x.scores)}"
                if name != self.baseline:
                    line += f"  {x.difference:+.2f} [{x.low:+.2f}, {x.high:+.2f}]  p = {x.p_value:.3f}"
                lines.append(line)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


References = Sequence[str] | Sequence[Sequence[str]]
"""One reference per sentence, or several whole sets of them."""


def score_translations(
    hypotheses: Sequence[str],
    references: References,
    *,
    samples: int = 1000,
    seed: int = SEED,
    tokenize: str | None = None,
    lowercase: bool = False,
    chrf_words: int = 0,
) -> TranslationScore:
    """Score a system's output by BLEU and chrF.

    Args:
        hypotheses: detokenised translations.
        references: as many, or several sets of as many.
        samples: how many bootstrap resamples make the intervals.
        tokenize: sacreBLEU's tokeniser, 13a by default.
        chrf_words: 2 makes chrF++.

    Returns:
        both scores with their intervals.
    """
    sets = _checked(references, [hypotheses], samples)
    draws = _draws(len(hypotheses), samples, seed)
    found = {}
    for name, metric in _metrics(tokenize, lowercase, chrf_words).items():
        scores, resampled = _runs(metric, [hypotheses], sets, draws)
        low, high = _interval(resampled[0])
        signature = _signature(metric, samples, seed)
        found[name] = MetricScore(score=float(scores[0]), low=low, high=high, signature=signature)
    return TranslationScore(sentences=len(hypotheses), bleu=found["bleu"], chrf=found["chrf"])


def compare(
    systems: Mapping[str, Sequence[Sequence[str]]],
    references: References,
    *,
    baseline: str | None = None,
    samples: int = 1000,
    seed: int = SEED,
    resample_runs: bool = False,
    tokenize: str | None = None,
    lowercase: bool = False,
    chrf_words: int = 0,
) -> Comparison:
    """Compare systems with a baseline by paired bootstrap, each with one or more runs, such as seeds.

    A system's score is the mean over its runs, on the whole set and on every resample of its sentences; all systems
    see the same resamples.

    Args:
        systems: name to runs, each a list of translations.
        baseline: the first system by default.
        resample_runs: draw runs with replacement as well: luck with seeds then widens the interval of the difference.

    Returns:
        scores of every system and differences from the baseline.
    """
    baseline = _baseline(systems, baseline)
    sets = _checked(references, [run for runs in systems.values() for run in runs], samples)
    draws = _draws(len(sets[0]), samples, seed)
    rng = np.random.default_rng(seed + 1)
    signatures: dict[str, str] = {}
    compared: dict[str, dict[str, Difference]] = {name: {} for name in systems}
    for label, metric in _metrics(tokenize, lowercase, chrf_words).items():
        scored = {}
        for name, runs in systems.items():
            scores, resampled = _runs(metric, runs, sets, draws)
            if resample_runs:
                resampled = np.take_along_axis(resampled, rng.integers(len(runs), size=resampled.shape), 0)
            scored[name] = (scores, resampled.mean(0))
        signatures[label] = _signature(metric, samples, seed)
        for name, mine in scored.items():
            compared[name][label] = _difference(*mine, *scored[baseline])
    sizes = {"sentences": len(sets[0]), "samples": samples}
    return Comparison(baseline=baseline, signatures=signatures, systems=compared, **sizes)


def _baseline(systems: Mapping[str, Sequence[Sequence[str]]], chosen: str | None) -> str:
    """The name of the baseline among systems that are what they should be."""
    if not systems:
        raise ValueError("there is no system to compare")
    for name, runs in systems.items():
        if isinstance(runs, str) or not runs or any(isinstance(run, str) for run in runs):
            raise ValueError(f"system {name!r} must be a list of runs, each a list of translations")
    if chosen is not None and chosen not in systems:
        raise ValueError(f"baseline must be one of {list(systems)}, got {chosen!r}")
    return next(iter(systems)) if chosen is None else chosen


def _runs(
    metric: Any, runs: Sequence[Sequence[str]], references: list[list[str]], draws: Floats
) -> tuple[Floats, Floats]:
    """The score of each run, (runs,), and of each resample of it, (runs, samples)."""
    statistics = [_statistics(metric, run, references) for run in runs]
    scores = np.array([_score(metric, each.sum(0)) for each in statistics])
    return scores, np.stack([_resampled(metric, each, draws) for each in statistics])


def _difference(scores: Floats, resampled: Floats, base_scores: Floats, base_resampled: Floats) -> Difference:
    difference = float(scores.mean() - base_scores.mean())
    sampled = resampled - base_resampled
    low, high = _interval(sampled)
    magnitudes = np.abs(sampled)
    beyond = magnitudes - magnitudes.mean() > abs(difference)
    if not magnitudes.any():  # the formula would call a system significantly different from itself
        beyond = np.ones_like(beyond)
    return Difference(
        scores=tuple(scores.tolist()),
        mean=float(scores.mean()),
        spread=float(scores.std(ddof=1)) if len(scores) > 1 else 0.0,
        difference=difference,
        low=low,
        high=high,
        p_value=float((beyond.sum() + 1) / (len(beyond) + 1)),
    )


def _checked(references: References, runs: Sequence[Sequence[str]], samples: int) -> list[list[str]]:
    """Sets of references, all as long as the runs."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be an int of at least 1, got {samples!r}")
    if isinstance(references, str) or not references:
        raise ValueError(f"references must be a list with a text for each sentence, got {references!r}")
    several = not isinstance(references[0], str)
    sets = [list(each) for each in references] if several else [list(references)]
    for run in runs:
        if isinstance(run, str):
            raise ValueError("hypotheses must be a list of texts, got one text")
        for each in sets:
            if len(run) != len(each):
                raise ValueError(f"there are {len(run)} translations but {len(each)} references")
    for text in (text for each in (*sets, *runs) for text in each):
        if not isinstance(text, str):
            raise TypeError(f"translations and references must be texts, got {type(text).__name__}")
    return sets  # type: ignore[return-value]


def _metrics(tokenize: str | None, lowercase: bool, chrf_words: int) -> dict[str, Any]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return {
        # force only silences a warning about tokenised text, which a test set can look like by chance.
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenize, force=True),
        "chrf": CHRF(word_order=chrf_words, lowercase=lowercase),
    }


def _statistics(metric: Any, hypotheses: Sequence[str], references: list[list[str]]) -> Floats:
    """Counts per sentence, (sentences, k), of which the score of any sum is defined."""
    return np.array(metric._extract_corpus_statistics(hypotheses, references), dtype=np.float64)


def _score(metric: Any, counts: Floats) -> float:
    return float(metric._compute_score_from_stats(counts).score)


def _draws(sentences: int, samples: int, seed: int) -> Floats:
    """How often each sentence is in each resample, (samples, sentences); the draws are sacreBLEU's."""
    index = np.random.default_rng(seed).choice(sentences, size=(samples, sentences), replace=True)
    counts = np.zeros((samples, sentences))
    np.add.at(counts, (np.arange(samples)[:, None], index), 1.0)
    return counts


def _resampled(metric: Any, statistics: Floats, draws: Floats) -> Floats:
    return np.array([_score(metric, counts) for counts in draws @ statistics])


def _interval(values: Floats) -> tuple[float, float]:
    """The middle 95 %, as sacreBLEU cuts it."""
    ordered = np.sort(values)
    cut = len(ordered) // 40
    return float(ordered[cut]), float(ordered[len(ordered) - cut - 1])


def _signature(metric: Any, samples: int, seed: int) -> str:
    signature = metric.get_signature()
    signature.update("bs", samples)
    signature.update("seed", seed)
    return str(signature.format())
