"""What is measured of every head, declared once: how it adds up, what it is called, and which role a high value means.

analysis.json, the tables of the report, `tamis plot` and the table of docs/analysis.md are made from `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tamis.analysis import heads, metrics, words
from tamis.analysis.rows import Rows, Sums
from tamis.analysis.tokens import Tokens

Measure = Callable[[Rows, Tokens, Tokens], Sums | None]
"""Totals and counts (H,) of rows whose queries and keys are these tokens; None where what it takes is not known."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of every head."""

    name: str
    """In analysis.json, and of the attribute of `SiteAnalysis`."""
    title: str
    """Title of a column."""
    about: str
    """What it is, in a few words."""
    sums: Measure
    digits: int = 3
    """Behind the point, in a table."""
    role: str | None = None
    """What a head with a high value is called."""
    threshold: float | None = None
    """From which value on it is called so."""
    setting: str | None = None
    """What `Thresholds` calls the threshold; by default the name."""
    counted: str | None = None
    """What the number of what was averaged over is called, where it is kept."""
    missing: str | None = None
    """Why there is no value where nothing was counted; None: there it is 0."""
    offsets: tuple[int, ...] = ()
    """Distances of the key, if there is a value for each of them: (H, offsets)."""
    per_head: bool = True
    """False: one value for a layer."""

    @property
    def threshold_name(self) -> str:
        return self.setting or self.name

    def columns(self) -> Iterator[dict[str, Any]]:
        """Return what the page takes: one column, or one for each distance, in plain values."""
        own = {"name": self.name, "digits": self.digits, "threshold": self.threshold_name}
        if not self.offsets:
            counts = {"counted": self.counted, "missing": self.missing} if self.missing else {}
            yield {**own, "title": self.title, "about": self.about, "role": self.role, **counts}
        for place, offset in enumerate(self.offsets):
            title, role = POSITIONS.get(offset, (f"{self.title} {offset:+d}", f"position {offset:+d}"))
            about = f"{self.about} {offset:+d}" if offset else "mean weight on the token itself"
            shown = {"place": place, "listed": offset in POSITIONS, "self_only": True}
            yield {**own, "title": title, "about": about, "role": role, **shown}


POSITIONS = {-1: ("before", "previous position"), 0: ("itself", "same position"), 1: ("after", "next position")}
"""Columns and roles of the distances that have words of their own."""


def _of_rows(sums: Callable[[Rows], Sums]) -> Measure:
    return lambda rows, queries, keys: sums(rows)


def _of_words(sums: Callable[..., Sums]) -> Measure:
    """Self-attention alone: words of the queries are those of the keys."""
    return lambda rows, queries, keys: (
        sums(rows, queries.words) if queries is keys and queries.words is not None else None
    )


def _interrogation(rows: Rows, queries: Tokens, keys: Tokens) -> Sums | None:
    if queries.interrogative is None or keys.question is None:
        return None
    return words.interrogation_sums(rows, queries.interrogative, keys.question)


FIGURES = (
    Figure(
        name="density", title="density", about="share of visible keys with a weight, per row, averaged over rows",
        sums=_of_rows(metrics.density_sums), counted="rows",
    ),
    Figure(
        name="sparsity_rate", title="exact zeros", about="share of all visible weights that are exactly 0",
        sums=_of_rows(metrics.zero_sums),
    ),
    Figure(
        name="null_share", title="null rows", about="share of rows in which every weight is 0",
        sums=_of_rows(metrics.null_sums), role="null", threshold=0.9, setting="null",
    ),
    Figure(
        name="diversity", title="diversity", about="how differently the heads of a layer attend, from 0 to 1",
        sums=_of_rows(metrics.diversity_sums), counted="compared", per_head=False,
    ),
    Figure(
        name="support_size", title="keys kept", about="weights of a row that are not zero", digits=1,
        sums=_of_rows(heads.support_sums),
    ),
    Figure(name="entropy", title="entropy, nats", about="of a row, in nats", sums=_of_rows(heads.entropy_sums)),
    Figure(
        name="normalised_entropy", title="H / log n", about="entropy of a row of n keys: 0 one-hot, 1 uniform",
        sums=_of_rows(heads.normalised_entropy_sums),
    ),
    Figure(
        name="first_token", title="first", about="mean weight on the first key that is seen",
        sums=_of_rows(heads.first_token_sums), role="first token", threshold=0.5,
    ),
    Figure(
        name="one_hot", title="one-hot", about=f"share of rows with a weight above {heads.ONE_HOT}",
        sums=_of_rows(heads.one_hot_sums), role="near one-hot", threshold=0.9,
    ),
    Figure(
        name="confidence", title="at", about="mean weight on the key at distance", sums=_of_rows(heads.confidence_sums),
        offsets=heads.OFFSETS, threshold=0.8, setting="position",
    ),
    Figure(
        name="subword_merging", title="merging, all words",
        about="weight of a word's pieces on one another; a word of one piece counts what it gives itself",
        sums=_of_words(words.merging_sums), counted="words", missing="there is no word in the data",
    ),
    Figure(
        name="split_word_merging", title="merging", about="weight of a split word's pieces on one another",
        sums=_of_words(words.split_merging_sums), counted="split_words", missing="no word is split in the data",
        role="subword merging", threshold=0.8, setting="subword_merging",
    ),
    Figure(
        name="interrogation", title="asking", about="mean weight on \u201c?\u201d from words that ask",
        sums=_interrogation, counted="questions", missing="no question in the data",
        role="interrogation", threshold=0.5,
    ),
)  # fmt: skip


def page_columns() -> list[dict[str, Any]]:
    """All columns of figures of heads, for the page."""
    return [column for figure in FIGURES if figure.per_head for column in figure.columns()]


def describe() -> str:
    """The table of docs/analysis.md: every figure with its name, its meaning and the role that it gives."""
    rows = [("Figure", "Name", "Meaning", "A head is called"), ("---",) * 4]
    for figure in FIGURES:
        roles = ", ".join(
            column["role"] for column in figure.columns() if column["role"] and column.get("listed", True)
        )
        called = f"{roles}, from {figure.threshold:g}" if figure.threshold is not None else ""
        rows.append((figure.title if not figure.offsets else "confidence", f"`{figure.name}`", figure.about, called))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
