"""What the page shows, as plain values: made from what the stages of runs wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tamis.report.packing import Array, pack

SPACES = ("\u2581", "\u0120")
"""What stands for a space before a word, in SentencePiece and in byte-level vocabularies."""
FROM_ANALYSIS = (
    "sentences", "data", "offsets", "density_bins", "thresholds", "summary", "density_histograms", "alphas",
    "trajectories", "named_heads", "sites", "support_by_length", "scales", "importance", "alignment", "null_signal",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run, or one model that was looked at."""

    name: str
    analysis: Mapping[str, Any]
    """As in analysis.json, with the `tokens` of the sentences to be shown."""
    arrays: Mapping[str, Array] = field(default_factory=dict)
    """As in analysis.npz."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """As in evaluation.json."""
    records: Sequence[Mapping[str, Any]] = ()
    """Those of metrics.jsonl."""
    mechanism: str | None = None

    def sentences(self) -> list[Sentence]:
        """Those to be shown, by their numbers."""
        tokens = self.analysis.get("tokens", {})
        return [
            Sentence(int(number), list(tokens[number]["source"]), list(tokens[number]["target"]), self._weights(number))
            for number in sorted(tokens, key=int)
        ]

    def _weights(self, number: str) -> dict[str, SiteWeights]:
        prefix = f"shown/{number}/"
        sites = [name for name in self.analysis["sites"] if f"{prefix}{name}/crow" in self.arrays]
        return {site: SiteWeights(*self._parts(prefix + site)) for site in sites}

    def _parts(self, prefix: str) -> list[Array]:
        return [self.arrays[f"{prefix}/{part}"] for part in ("crow", "col", "val", "shape")]


@dataclass(frozen=True)
class SiteWeights:
    """The non-zero weights of one attention layer on one sentence."""

    crow: Array
    col: Array
    val: Array
    sizes: Array
    """1, heads, queries, keys."""

    @property
    def shape(self) -> tuple[int, int, int]:
        _, heads, queries, keys = (int(size) for size in self.sizes)
        return heads, queries, keys

    def dense(self) -> Array:
        """(H, Lq, Lk)"""
        heads, queries, keys = self.shape
        found = np.zeros((heads * queries, keys), np.float32)
        found[np.repeat(np.arange(heads * queries), np.diff(self.crow)), self.col.astype(np.int64)] = self.val
        return found.reshape(heads, queries, keys)

    def looks_back(self) -> bool:
        """Whether no query has a weight on a key after it."""
        heads, queries, keys = self.shape
        row = np.repeat(np.arange(heads * queries) % max(1, queries), np.diff(self.crow))
        return queries == keys and bool((self.col <= row).all())


@dataclass(frozen=True)
class Sentence:
    """One sentence of a run with its weights."""

    number: int
    source: list[str]
    target: list[str]
    weights: dict[str, SiteWeights]

    @property
    def text(self) -> tuple[str, str]:
        """Both sides as one reads them, whatever pieces they were cut into."""
        return _text(self.source), _text(self.target)


def content(runs: Sequence[ReportRun], title: str = "Tamis report", *, overview: bool = True) -> dict[str, Any]:
    """All that the page shows.  Sentences with the same number and text are one: runs can be compared on them."""
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names):
        raise ValueError(f"a report is of one or more runs with names of their own, got {names}")
    known: dict[tuple[int, tuple[str, str]], int] = {}
    shown = []
    for run in runs:
        sentences = run.sentences()
        places = [known.setdefault((sentence.number, sentence.text), len(known)) for sentence in sentences]
        shown.append(_run(run, dict(zip(places, sentences, strict=True))))
    listed = [{"number": number, "source": source, "target": target} for number, (source, target) in known]
    return _finite({"title": title, "overview": overview, "sentences": listed, "runs": shown})


def _run(run: ReportRun, sentences: Mapping[int, Sentence]) -> dict[str, Any]:
    return {
        "name": run.name,
        "mechanism": run.mechanism,
        "figures": figures(run),
        "curves": curves(run.records),
        **{name: run.analysis[name] for name in FROM_ANALYSIS if name in run.analysis},
        "causal": _causal(run, list(sentences.values())),
        "shown": {str(place): _shown(sentence) for place, sentence in sentences.items()},
    }


def figures(run: ReportRun) -> dict[str, Any]:
    """What a run is worth in single numbers; those that nobody measured are not there."""
    evaluation, heads = run.evaluation, run.analysis["summary"]["all"]
    aligned = evaluation.get("alignment") or run.analysis.get("alignment")
    last = next((record for record in reversed(run.records) if record.get("seconds")), None)
    found = {
        "bleu": evaluation.get("translation", {}).get("bleu"),
        "chrf": evaluation.get("translation", {}).get("chrf"),
        "perplexity": evaluation.get("likelihood", {}).get("perplexity"),
        "aer": _with_interval(aligned["best"]) if aligned else None,
        "density": heads["density"],
        "diversity": heads["diversity"],
        "null_share": heads["null_share"],
        "tokens_per_second": last["tokens"] / last["seconds"] if last else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _with_interval(best: Mapping[str, Any]) -> dict[str, float]:
    """The lowest AER, as scores of translations are given; runs of before have no interval."""
    return {"score": best["aer"], **{name: best[name] for name in ("low", "high") if name in best}}


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """(step, value) of each figure that was noted while training; a step noted twice counts as it was noted last."""
    found = {}
    for name in ("loss", "valid_loss", "valid_bleu", "density"):
        by_step = {record["step"]: record[name] for record in records if record.get(name) is not None}
        if by_step:
            found[name] = [[step, by_step[step]] for step in sorted(by_step)]
    return found


def _causal(run: ReportRun, sentences: Sequence[Sentence]) -> list[str]:
    """Sites whose queries only see keys up to themselves, as far as the weights tell."""
    return [
        site
        for site, figures in run.analysis["sites"].items()
        if figures["kind"] == "decoder"
        and all(sentence.weights[site].looks_back() for sentence in sentences if site in sentence.weights)
    ]


def _shown(sentence: Sentence) -> dict[str, Any]:
    weights = {
        site: {"shape": found.shape, "data": pack(found.crow, found.col, found.val)}
        for site, found in sentence.weights.items()
    }
    return {"source": sentence.source, "target": sentence.target, "weights": weights}


def _text(pieces: Sequence[str]) -> str:
    words = [piece for piece in pieces if piece not in ("<s>", "</s>")]
    mark = next((mark for mark in SPACES if any(word.startswith(mark) for word in words)), None)
    return " ".join(words) if mark is None else "".join(words).replace(mark, " ").strip()


def _finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
