"""What the page shows, as plain values: made from what the stages of runs wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch

from tamis.analysis.figures import page_columns
from tamis.analysis.shown import ShownSentence
from tamis.evaluation.dispersion import heads_with
from tamis.functional import SparseWeights
from tamis.report.packing import pack
from tamis.report.writing import Writing

FROM_ANALYSIS = (
    "sentences", "offsets", "density_bins", "thresholds", "summary", "density_histograms", "alphas",
    "trajectories", "named_heads", "sites", "support_by_length", "scales", "importance", "alignment", "null_signal",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run, or one model that was looked at."""

    name: str
    analysis: Mapping[str, Any]
    """As in analysis.json, with the `tokens` of the sentences to be shown: pieces, or a `Writing` for each side."""
    shown: Mapping[int, ShownSentence] = field(default_factory=dict)
    """The weights of those sentences, as `tamis.analysis.shown_sentences` reads them from analysis.npz."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """As in evaluation.json."""
    records: Sequence[Mapping[str, Any]] = ()
    """Those of metrics.jsonl."""
    mechanism: str | None = None

    def sentences(self) -> list[Sentence]:
        """Return the sentences to be shown, by their numbers."""
        tokens = self.analysis.get("tokens", {})
        return [
            Sentence(int(number), _writing(named, "source"), _writing(named, "target"), self._weights(int(number)))
            for number, named in sorted(tokens.items(), key=lambda item: int(item[0]))
        ]

    def _weights(self, number: int) -> dict[str, SparseWeights]:
        weights = self.shown[number].weights if number in self.shown else {}
        return {site: weights[site] for site in self.analysis["sites"] if site in weights}


@dataclass(frozen=True)
class Sentence:
    """One sentence of a run with its weights."""

    number: int
    source: Writing
    """Without tokens for a language model."""
    target: Writing
    weights: dict[str, SparseWeights]

    @property
    def text(self) -> tuple[str, str]:
        """Both sides as one reads them, whatever pieces they were cut into."""
        return self.source.text, self.target.text

    @property
    def size(self) -> int:
        """How many weights are not zero."""
        return sum(weights.val.numel() for weights in self.weights.values())

    def to_dict(self) -> dict[str, Any]:
        """With its weights if they are few enough to stand in a page."""
        shown = self.weights if self.size <= MOST_WEIGHTS else {}
        weights = {site: {"shape": found.shape[1:], "data": pack(found)} for site, found in shown.items()}
        too_large = {} if shown or not self.weights else {"too_large": self.size}
        return {"source": self.source.to_dict(), "target": self.target.to_dict(), "weights": weights, **too_large}


MOST_WEIGHTS = 8_000_000
"""The most weights of one sentence in a page: about 20 MB.  For more there is `tamis explore`."""


def content(runs: Sequence[ReportRun], title: str = "Tamis report", *, overview: bool = True) -> dict[str, Any]:
    """Gather all that the page shows.  Sentences with the same number and text are one: runs are compared on them.

    Args:
        runs: in their order on the page.
        title: of the page.
        overview: have the page begin with tables and pictures.

    Returns:
        plain values for :func:`tamis.report.page`.
    """
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
    columns = page_columns()
    return finite({"title": title, "overview": overview, "columns": columns, "sentences": listed, "runs": shown})


def _run(run: ReportRun, sentences: Mapping[int, Sentence]) -> dict[str, Any]:
    return {
        "name": run.name,
        "mechanism": run.mechanism,
        "figures": figures(run),
        "curves": curves(run.records),
        **{name: run.analysis[name] for name in FROM_ANALYSIS if name in run.analysis},
        "data": names_of_data(run.analysis.get("data")),
        "lengths": by_length(run.evaluation),
        "spread": spread_by_length(run.analysis.get("dispersion", ())),
        "causal": _causal(run, list(sentences.values())),
        "shown": {str(place): sentence.to_dict() for place, sentence in sentences.items()},
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


def by_length(evaluation: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """(length, value) of what a language model or a model of a task scores at each length of its evaluation."""
    found: dict[str, list[list[float]]] = {}
    perplexity, passkeys, scores = (evaluation.get(name) for name in ("perplexity", "passkeys", "scores"))
    for row in perplexity if isinstance(perplexity, list) else ():
        if row["mode"] == "full":
            found.setdefault("perplexity", []).append([row["length"], row["perplexity"]])
    hits: dict[int, list[float]] = {}
    for row in passkeys if isinstance(passkeys, list) else ():
        hits.setdefault(row["length"], []).append(row["accuracy"])
    if hits:
        found["passkeys"] = [[length, sum(shares) / len(shares)] for length, shares in sorted(hits.items())]
    for row in scores if isinstance(scores, list) else ():
        for share in ("exact_match", "token_accuracy"):
            found.setdefault(share, []).append([row["length"], row[share]])
    return found


def spread_by_length(dispersion: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[list[float]]]]:
    """(keys, mean over heads) of their entropy and support as texts grow, of heads with an ALiBi bias and without."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in dispersion:
        for kind, biased in (("without", False), ("with", True)):
            heads = heads_with(row, biased)
            for name in ("entropy", "support") if heads else ():
                mean = sum(head[name] for head in heads) / len(heads)
                found.setdefault(name, {}).setdefault(kind, []).append([row["keys"], mean])
    return found


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
        and all(looks_back(sentence.weights[site]) for sentence in sentences if site in sentence.weights)
    ]


def looks_back(weights: SparseWeights) -> bool:
    """Whether no query has a weight on a key after it."""
    _, heads, queries, keys = weights.shape
    row = (torch.arange(heads * queries) % max(1, queries)).repeat_interleave(weights.crow.diff())
    return queries == keys and bool((weights.col <= row).all())


def names_of_data(data: Any) -> list[str]:
    """What texts are called, without the folders they lie in: a page is sent to others."""
    listed = data if isinstance(data, list | tuple) else [] if data is None else [data]
    return [PurePath(str(name)).name if PurePath(str(name)).is_absolute() else str(name) for name in listed]


def _writing(named: Mapping[str, Any], side: str) -> Writing:
    return named[side] if isinstance(named[side], Writing) else Writing.of_analysis(named, side)


def finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
