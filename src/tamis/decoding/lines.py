"""Translating a stream of lines, as `tamis translate` does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TextIO

from tamis.decoding.translator import Translation, Translator

AT_A_TIME = 2000
"""Lines that are read before they are translated: enough to find some of like length."""


def translate_lines(
    translator: Translator,
    lines: Iterable[str],
    out: TextIO,
    settings: dict[str, Any],
    *,
    alignments: bool = False,
    scores: bool = False,
    at_a_time: int = AT_A_TIME,
) -> None:
    """Write the `n_best` translations of each line as SCORE tab TEXT tab ALIGNMENT, of which TEXT is always there.

    Alignments are pairs of words, source-target, counted from 0.
    """
    stream = iter(lines)
    while chunk := list(itertools.islice(stream, at_a_time)):
        found = [
            (source, translation)
            for source, translations in zip(chunk, translator.translate(chunk, **settings), strict=True)
            for translation in translations
        ]
        links: list[list[tuple[int, int]]] = [[] for _ in found]
        if alignments:
            links = translator.align([source for source, _ in found], [best.text for _, best in found])
        for (_, translation), pairs in zip(found, links, strict=True):
            out.write("\t".join(_columns(translation, pairs, alignments, scores)) + "\n")
        out.flush()


def _columns(translation: Translation, links: list[tuple[int, int]], alignments: bool, scores: bool) -> list[str]:
    columns = [translation.text]
    if scores:
        columns.insert(0, f"{translation.normalised:.4f}")
    if alignments:
        columns.append(" ".join(f"{source}-{target}" for source, target in links))
    return columns
