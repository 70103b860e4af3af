"""Figures of several systems at growing lengths, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Table:
    """Figures of systems at several lengths: means, with the least and the greatest of several runs."""

    title: str
    systems: Mapping[str, Mapping[float, Sequence[float]]]
    digits: int = 1
    unit: str = ""
    """Behind each length."""

    @classmethod
    def of(cls, title: str, systems: Mapping[str, Iterable[tuple[float, float | None]]], **options: Any) -> Table:
        """From (length, figure) of all runs of each system; None is no figure."""
        found: dict[str, dict[float, list[float]]] = {}
        for name, points in systems.items():
            own = found.setdefault(name, {})
            for length, value in points:
                if value is not None:
                    own.setdefault(length, []).append(value)
        return cls(title, found, **options)

    def describe(self) -> str:
        """A table of Markdown."""
        lengths = sorted({length for own in self.systems.values() for length in own})
        rows = [[self.title, *(f"{length:,g}{self.unit}" for length in lengths)]]
        rows += [[name, *(self._cell(own.get(length, ())) for length in lengths)] for name, own in self.systems.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
        )

    def _cell(self, values: Sequence[float]) -> str:
        if not values:
            return ""
        low, high = f"{min(values):.{self.digits}f}", f"{max(values):.{self.digits}f}"
        return low if low == high else f"{fmean(values):.{self.digits}f} ({low} to {high})"
