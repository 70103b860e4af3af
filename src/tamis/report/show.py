"""The heads of a model to look into, inside a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tamis.analysis.analyze import analyze
from tamis.analysis.results import Analysis
from tamis.analysis.tokens import Run, Sentences, run_model
from tamis.report.content import ReportRun, content
from tamis.report.page import page

Pieces = Callable[[list[int]], Sequence[str]]
"""Ids to the text of each, such as `Vocabulary.pieces` or a tokenizer's `convert_ids_to_tokens`."""


@dataclass(frozen=True)
class Explorer:
    """A page that a notebook displays, and that can be saved."""

    html: str
    height: int

    def _repr_html_(self) -> str:
        # A frame of its own keeps the page's style and script apart from the notebook's.
        size = f'width="100%" height="{self.height}" style="border: 0"'
        return f'<iframe {size} sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(self.html)}"></iframe>'

    def save(self, path: str | Path) -> None:
        """As a file to open in a browser."""
        Path(path).write_text(self.html, encoding="utf-8")


def show(
    what: Analysis | Mapping[str, Analysis] | nn.Module,
    batches: Iterable[Sentences] | None = None,
    *,
    pieces: Pieces | tuple[Pieces, Pieces] | None = None,
    shown: int = 16,
    run: Run = run_model,
    height: int = 860,
) -> Explorer:
    """Look into heads, as in `tamis report`; the last expression of a notebook's cell is displayed.

    Args:
        what: an analysis that keeps sentences to be shown, several by name to compare them, or a model.
        batches: for a model: what to run it on.
        pieces: what tokens are called, on both sides or as (source, target); by default by their numbers.
        shown: for a model: how many sentences to keep.
        run: for a model: how it is called.
        height: of the frame, in pixels.
    """
    if isinstance(what, nn.Module):
        if batches is None:
            raise ValueError("a model needs batches to be run on")
        listed = list(batches)
        what = analyze(what, listed, shown=_numbers(listed)[:shown], run=run)
    named = {"model": what} if isinstance(what, Analysis) else what
    if not all(found.shown for found in named.values()):
        raise ValueError("the analysis keeps no sentence to look at: analyze(..., shown=[0, 1, 2])")
    runs = [_run(name, found, pieces) for name, found in named.items()]
    return Explorer(page(content(runs, "Heads", overview=False)), height)


def _run(name: str, found: Analysis, pieces: Pieces | tuple[Pieces, Pieces] | None) -> ReportRun:
    source, target = pieces if isinstance(pieces, tuple) else (pieces or _numerals, pieces or _numerals)
    tokens: dict[str, Any] = {
        str(number): {
            "source": [] if sentence.source is None else list(source(sentence.source.tolist())),
            "target": list(target(sentence.target.tolist())),
        }
        for number, sentence in found.shown.items()
    }
    return ReportRun(name=name, analysis={**found.to_dict(), "tokens": tokens}, shown=found.shown)


def _numerals(ids: list[int]) -> list[str]:
    return [str(number) for number in ids]


def _numbers(batches: Sequence[Sentences]) -> list[int]:
    """By which the sentences of batches are asked for, in order."""
    found: list[int] = []
    count = 0
    for batch in batches:
        found += batch.numbers or range(count, count + len(batch))
        count += len(batch)
    return sorted(found)
