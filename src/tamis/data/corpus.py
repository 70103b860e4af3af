"""Parallel text as subword ids, in files that are mapped into memory.

The form is that of `tamis.data.indexed`; a pair lies together: the ids are of source, target, source, target, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tamis.data.indexed import Ids, IndexedCorpus, Report, Writer, build_split
from tamis.data.text import BadLine, Pair
from tamis.data.vocabulary import Vocabulary

CHUNK = 8192  # lines encoded at a time
EMPTY_SOURCE, EMPTY_TARGET = "empty source", "empty target"
LONG_SOURCE, LONG_TARGET = "source too long", "target too long"
RATIO = "length ratio"
EXAMPLE = 60
"""Characters of a text that a report shows."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which pairs are worth training on, in subwords."""

    max_length: int = 256
    """Subwords of either side, with its eos, at most."""
    max_ratio: float = 4.0
    """The largest ratio of the longer side to the shorter."""
    ratio_from: int = 10
    """Pairs whose longer side is no longer than this may have any ratio: "Yes." is often a long word."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, a subword and eos, got {self.max_length}")
        if not self.max_ratio >= 1.0:
            raise ValueError(f"max_ratio must be at least 1, got {self.max_ratio}")


def build_corpus(
    pairs: Iterable[Pair | BadLine],
    folder: str | Path,
    split: str,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    limits: Limits | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Encode `pairs` into a split of the corpus in `folder`.

    A build that fails or is killed leaves what was there before or, in its last moments, nothing that opens.

    Args:
        pairs: what :func:`read_pairs` yields.
        folder, split: where to write, and the name of the split.
        source_vocabulary, target_vocabulary: how to encode.
        limits: which pairs to leave out.
        progress: told the number of lines read, now and then.

    Returns:
        what became of every line.
    """
    sides = _Sides(source_vocabulary, target_vocabulary, limits or Limits())

    def fill(writer: Writer) -> dict[str, Any]:
        iterator = iter(pairs)
        while chunk := list(islice(iterator, CHUNK)):
            sides.add(chunk, writer)
            if progress is not None:
                progress(writer.read)
        return {
            "format": ParallelCorpus.FORMAT,
            "source_vocabulary": source_vocabulary.fingerprint,
            "target_vocabulary": target_vocabulary.fingerprint,
            "limits": asdict(sides.limits),
        }

    return build_split(folder, split, max(len(source_vocabulary), len(target_vocabulary)), ParallelCorpus.ITEMS, fill)


class _Sides:
    """Encodes chunks of lines and sorts out those that the limits forbid."""

    def __init__(self, source: Vocabulary, target: Vocabulary, limits: Limits) -> None:
        self.vocabularies = (source, target)
        self.limits = limits

    def add(self, chunk: Sequence[Pair | BadLine], writer: Writer) -> None:
        writer.read += len(chunk)
        pairs = [item for item in chunk if isinstance(item, Pair)]
        sources = self.vocabularies[0].encode_batch([pair.source for pair in pairs])
        targets = self.vocabularies[1].encode_batch([pair.target for pair in pairs])
        reasons = iter([self._reason(*item) for item in zip(pairs, sources, targets, strict=True)])
        sides: list[Ids] = []
        lines: list[int] = []
        encoded = zip(sources, targets, strict=True)
        for item in chunk:
            if isinstance(item, BadLine):
                writer.skip(item.line, item.reason)
                continue
            both, reason = next(encoded), next(reasons)
            if reason is None:
                sides.extend(both)
                lines.append(item.line)
            else:
                writer.skip(item.line, reason, self._told(item, *both, reason))
        if lines:
            writer.write(sides, lines)

    def _told(self, pair: Pair, source: Ids, target: Ids, reason: str) -> str | None:
        """The limit that a pair is beyond, and its text."""
        settings = {
            RATIO: f"data.max_ratio = {self.limits.max_ratio:g}",
            LONG_SOURCE: f"data.max_length = {self.limits.max_length}",
            LONG_TARGET: f"data.max_length = {self.limits.max_length}",
        }
        if reason not in settings:
            return None
        sizes = f"{len(source)} and {len(target)} subwords"
        return f"{settings[reason]}; line {pair.line} has {sizes}: {_cut(pair.source)} | {_cut(pair.target)}"

    def _reason(self, pair: Pair, source: Ids, target: Ids) -> str | None:
        """Why a pair is left out, or None."""
        short, long = sorted((len(source), len(target)))
        if not len(source) or not pair.source.strip():
            return EMPTY_SOURCE
        if not len(target) or not pair.target.strip():
            return EMPTY_TARGET
        if long + 1 > self.limits.max_length:
            return LONG_SOURCE if len(source) + 1 > self.limits.max_length else LONG_TARGET
        if long > self.limits.ratio_from and long > self.limits.max_ratio * short:
            return RATIO
        return None


def _cut(text: str) -> str:
    return text if len(text) <= EXAMPLE else text[: EXAMPLE - 3] + "..."


class ParallelCorpus(IndexedCorpus):
    """Pairs of subword ids, mapped into memory.  Neither bos nor eos is stored."""

    FORMAT: ClassVar[str] = "tamis parallel corpus"
    ITEMS: ClassVar[str] = "pairs"
    PIECES: ClassVar[int] = 2
    VOCABULARIES: ClassVar[tuple[str, ...]] = ("source_vocabulary", "target_vocabulary")

    def __init__(self, folder: Path, split: str, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Use `open`."""
        super().__init__(folder, split, header, arrays)
        lengths = np.diff(self._offsets)
        self.source_lengths: npt.NDArray[np.int32] = lengths[0::2].astype(np.int32)
        self.target_lengths: npt.NDArray[np.int32] = lengths[1::2].astype(np.int32)

    def check_vocabularies(self, source: Vocabulary, target: Vocabulary) -> None:
        """Raise unless the corpus was encoded with these."""
        self.check_fingerprints(source.fingerprint, target.fingerprint)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        start = self._first_piece(index)
        begin, middle, end = self._offsets[start : start + 3]
        return self._tokens[begin:middle], self._tokens[middle:end]

    def __iter__(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        return (self[index] for index in range(len(self)))

    def sources(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the ids of the sources of some pairs, one after another."""
        return self._gather(2 * indices, self.source_lengths[indices])

    def targets(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the ids of the targets of some pairs, one after another."""
        return self._gather(2 * indices + 1, self.target_lengths[indices])

    def _gather(self, sides: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        ends = np.cumsum(lengths, dtype=np.int64)
        shifts = self._offsets[sides] - (ends - lengths)  # from a place in the result to the place in the file
        return self._tokens[np.arange(ends[-1] if len(ends) else 0) + np.repeat(shifts, lengths)]
