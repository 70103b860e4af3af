"""One look at a model: what it answers, what it makes of an answer, and the exact non-zeros of all its heads."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tamis.analysis.capture import capture_sparse, joined
from tamis.analysis.intervention import altered
from tamis.analysis.learned import learned_alphas
from tamis.analysis.sites import attention_sites, kind_of
from tamis.data.batching import IGNORED
from tamis.decoding.alignment import CrossAttention
from tamis.functional import SparseWeights
from tamis.nn.modes import evaluating
from tamis.report.content import looks_back
from tamis.report.live.codecs import writing
from tamis.report.live.subjects import Forced, Subject

ALIGNED = 512
"""Tokens up to which words are aligned."""
SHORT = 1024
"""Tokens up to which a model that is told what to write is also asked what it would write: of long texts that is the
most expensive part."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What somebody wants to see."""

    text: str
    answer: str | None = None
    """What the model is made to write; None: what it writes by itself."""
    silent: tuple[tuple[str, int], ...] = ()
    alphas: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return bool(self.silent or self.alphas)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one look may take."""

    tokens: int = 2048
    """The most tokens of a text, and of a text with its answer."""
    written: int = 128
    """Tokens of an answer."""
    seconds: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen."""

    forced: Forced
    answer: str
    own: str | None
    """What the model writes by itself, changed as it is; None where it was not asked: see `SHORT`."""
    before: dict[str, Any] | None
    """Without the change: its own answer, and how likely the shown one is."""
    weights: dict[str, SparseWeights]
    seconds: float

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(part.nbytes for weights in self.weights.values() for part in weights[:3])


def look(subject: Subject, wish: Wish, limits: Limits | None = None) -> Look:
    """Ask a model, force the answer and record its heads; an error if that is too long or takes too long."""
    limits = limits or Limits()
    began = time.monotonic()
    with _in_time(subject.model, began + limits.seconds, limits.seconds), evaluating(subject.model):
        sides = subject.encode(wish.text, wish.answer or "")
        subject.check(*sides, most=limits.tokens)
        with altered(subject.model, alphas=wish.alphas, silent=wish.silent):
            asked = wish.answer is None or max(len(side.ids) for side in sides if side) <= SHORT
            own = subject.write(wish.text, limits.written) if asked else None
            answer = wish.answer if wish.answer is not None else own or ""
            with capture_sparse(subject.model) as found:
                seen = subject.force(wish.text, answer)
        before = None
        if wish.changed:
            unchanged = subject.force(wish.text, answer)
            written = subject.write(wish.text, limits.written) if asked else None
            before = {"own": written, "score": score_of(unchanged)}
    return Look(
        forced=seen,
        answer=answer,
        own=own,
        before=before,
        weights={site: joined(parts) for site, parts in found.items()},
        seconds=time.monotonic() - began,
    )


def score_of(seen: Forced) -> float:
    """The log-probability of what was written."""
    return sum(seen.logs[max(0, seen.prompt - 1) :])


def described(subject: Subject, seen: Look) -> dict[str, Any]:
    """A look in plain values, but for its weights."""
    forced = seen.forced
    source = None if forced.source is None else writing(subject.source, forced.source)
    target = writing(subject.target, forced.target)
    asked = [place for place, label in enumerate(forced.labels) if label != IGNORED]
    best = subject.target.pieces([max(0, token) for token in forced.best])
    labels = subject.target.pieces([max(0, token) for token in forced.labels])
    return {
        "source": None if source is None else source.to_dict(),
        "target": target.to_dict(),
        "answer": seen.answer,
        "own": seen.own,
        "before": seen.before,
        "score": score_of(forced),
        "prompt": forced.prompt,
        "chances": [
            {"row": place, "token": labels[place], "chance": forced.chances[place], "best": best[place]}
            for place in asked
            if place >= forced.prompt - 1
        ],
        "links": alignment(subject, seen),
        "sites": {
            site: {"shape": weights.shape[1:], "kept": kept_by_head(weights)} for site, weights in seen.weights.items()
        },
        "causal": causal_sites(seen.weights),
        "seconds": seen.seconds,
    }


def kept_by_head(weights: SparseWeights) -> list[int]:
    """How many weights of each head are not zero."""
    _, heads, queries, _ = weights.shape
    ends = weights.crow[queries::queries] if queries else weights.crow.new_zeros(heads)
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def causal_sites(found: Mapping[str, SparseWeights]) -> list[str]:
    return [site for site, weights in found.items() if kind_of(site) == "decoder" and looks_back(weights)]


def alignment(subject: Subject, seen: Look) -> dict[str, Any] | None:
    """The words of both sides and the links between them that cross-attention has; None where there is none."""
    source, target = seen.forced.source, seen.forced.target
    crosses = [weights for site, weights in seen.weights.items() if kind_of(site) == "cross"]
    if source is None or not crosses or not source.text or max(len(source.ids), len(target.ids)) > ALIGNED:
        return None
    shape = crosses[0].shape
    if any(weights.shape != shape for weights in crosses):
        return None
    shown = CrossAttention(
        source=subject.source.pieces(source.ids),
        target=subject.target.pieces(target.ids),
        source_spans=[span or (0, 0) for span in source.spans[:-1]],
        target_spans=[span or (0, 0) for span in target.spans[1:]],
        weights=torch.stack([weights.to_dense()[0] for weights in crosses]),
    )
    return {
        "source": re.findall(r"\S+", source.text),
        "target": re.findall(r"\S+", target.text),
        "pairs": shown.links(source.text, target.text),
    }


def portrait(subject: Subject) -> dict[str, Any]:
    """What is known of a model before anybody asks it anything, as the page takes a run."""
    sites = attention_sites(subject.model)
    alphas = learned_alphas(subject.model)
    return {
        "name": subject.name,
        "writes": subject.writes,
        "sites": {
            site: {"kind": kind_of(site), "density": [None] * attention.num_heads} for site, attention in sites.items()
        },
        "alphas": {site: list(values) for site, values in alphas.items()},
        "adjustable": [site for site, attention in sites.items() if attention.mechanism.has_alphas],
        "causal": [],
        "shown": {},
    }


class TooLongError(ValueError):
    """A look ran out of time."""


@contextmanager
def _in_time(model: nn.Module, deadline: float, seconds: float) -> Iterator[None]:
    """Every layer of attention asks for the time: nothing else can stop what runs in a thread."""

    def watch(*_: Any) -> None:
        if time.monotonic() > deadline:
            raise TooLongError(f"this took longer than {seconds:g} seconds: try a shorter text")

    handles = [attention.register_forward_pre_hook(watch) for attention in attention_sites(model).values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
