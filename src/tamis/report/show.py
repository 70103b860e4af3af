"""The heads of a model to look into, inside a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tamis.analysis.analyze import analyze
from tamis.analysis.figures import page_columns
from tamis.analysis.results import Analysis
from tamis.analysis.tokens import Run, Sentences, run_model
from tamis.decoding.generator import TextGenerator
from tamis.decoding.translator import Translator
from tamis.report.content import MOST_WEIGHTS, ReportRun, content, finite
from tamis.report.live.looking import Limits, Wish, described, look, portrait
from tamis.report.live.models import subject_of
from tamis.report.live.subjects import Subject
from tamis.report.packing import pack
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
        size = f'width="100%" height="{self.height}" style="border: 0" title="Heads"'
        return f'<iframe {size} sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(self.html)}"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page as a file to open in a browser."""
        Path(path).write_text(self.html, encoding="utf-8")


def show(
    what: Any,
    inputs: Iterable[Sentences] | Sequence[str] | Mapping[str, Tensor] | Tensor | None = None,
    *,
    tokenizer: Any = None,
    pieces: Pieces | tuple[Pieces, Pieces] | None = None,
    shown: int = 16,
    run: Run = run_model,
    height: int = 860,
    limits: Limits | None = None,
) -> Explorer:
    """Look into heads, as in `tamis report`; the last expression of a notebook's cell is displayed.

        show(translator, ["A sentence."])               a Translator or a TextGenerator, on texts
        show(model, ["A text."], tokenizer=tokenizer)   a model of transformers
        show(model, tokenizer(["A text."], return_tensors="pt"))
        show(model, [batch])                            any model of ours, on `Sentences`
        show(found)                                     an Analysis that keeps sentences, or several by name

    Args:
        what: a model, or what was found out about one.
        inputs: for a model: what to run it on.
        tokenizer: of a model of transformers.
        pieces: of batches: what tokens are called, on both sides or as (source, target); by default by their numbers.
        shown: of batches: how many sentences to keep.
        run: of batches: how the model is called.
        height: of the frame, in pixels.
        limits: of texts: how long they may be.

    Returns:
        the page, to display or to save.
    """
    if _are_texts(inputs) or isinstance(inputs, Tensor | Mapping):
        subject = subject_of(what, "model", tokenizer)
        return Explorer(page(texts_content([subject], _texts(inputs), limits)), height)
    if isinstance(what, Translator | TextGenerator):
        raise ValueError('a translator needs texts to be run on: show(translator, ["A sentence."])')
    if isinstance(what, nn.Module):
        if inputs is None:
            raise ValueError("a model needs batches to be run on")
        listed: list[Any] = list(inputs)
        what = analyze(what, listed, shown=_numbers(listed)[:shown], run=run)
    named = {"model": what} if isinstance(what, Analysis) else what
    if not all(found.shown for found in named.values()):
        raise ValueError("the analysis keeps no sentence to look at: analyze(..., shown=[0, 1, 2])")
    runs = [_run(name, found, pieces) for name, found in named.items()]
    return Explorer(page(content(runs, "Heads", overview=False)), height)


def texts_content(subjects: Sequence[Subject], texts: Sequence[str], limits: Limits | None = None) -> dict[str, Any]:
    """What a page shows of models on some texts: what the live page would, once and without a server."""
    runs = [portrait(subject) for subject in subjects]
    for number, text in enumerate(texts):
        for run, subject in zip(runs, subjects, strict=True):
            seen = look(subject, Wish(text=text), limits)
            found = described(subject, seen)
            size = sum(weights.val.numel() for weights in seen.weights.values())
            if size > MOST_WEIGHTS:
                found.update(weights={}, too_large=size)
            else:
                found["weights"] = {
                    site: {"shape": weights.shape[1:], "data": pack(weights)} for site, weights in seen.weights.items()
                }
            run["causal"] = sorted({*run["causal"], *found["causal"]})
            run["shown"][str(number)] = found
    listed = [{"number": number, "source": text, "target": ""} for number, text in enumerate(texts)]
    made = {"title": "Heads", "overview": False, "columns": page_columns(), "sentences": listed, "runs": runs}
    return finite(made)


def _are_texts(inputs: Any) -> bool:
    return isinstance(inputs, list | tuple) and bool(inputs) and all(isinstance(text, str) for text in inputs)


def _texts(inputs: Any) -> list[str]:
    """Texts, or rows of ids as the numbers that one would type; padding is left out where a mask says so."""
    if not isinstance(inputs, Tensor | Mapping):
        return list(inputs)
    ids = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
    mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    rows = ids if mask is None else [row[own.bool()] for row, own in zip(ids, mask, strict=True)]
    return [" ".join(map(str, row.tolist())) for row in rows]


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
