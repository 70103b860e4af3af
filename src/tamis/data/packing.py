"""Rows of one length from documents that are put end to end, and the order in which training goes through them.

A document of n subwords has n + 1 *places*, each an input and the label that follows it:

    inputs   bos t1 t2 ... tn
    labels   t1  t2 ... tn eos

so that every label belongs to the document of its input, and none is lost where a row ends and another begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tamis.data.batching import IGNORED, Indices, Position, shuffled
from tamis.data.documents import DocumentCorpus
from tamis.data.passkey import PasskeyText
from tamis.data.tasks import stream
from tamis.data.vocabulary import Vocabulary


class Row(NamedTuple):
    """Places that lie together."""

    inputs: npt.NDArray[np.int64]
    """(L,)"""
    labels: npt.NDArray[np.int64]
    """(L,)"""
    starts: list[int]
    """Where documents begin in it, but for its own beginning."""


class Places:
    """Those of some documents, end to end in a given order, from anywhere in it: after the last comes the first."""

    def __init__(self, corpus: DocumentCorpus, vocabulary: Vocabulary, order: Indices | None = None) -> None:
        self.corpus, self.bos_id, self.eos_id = corpus, vocabulary.bos_id, vocabulary.eos_id
        self.order: Indices = np.arange(len(corpus)) if order is None else order
        self._ends = np.cumsum(corpus.lengths[self.order] + 1)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, start: int, length: int) -> Row:
        """`length` places from `start` on."""
        row = Row(np.empty(length, np.int64), np.empty(length, np.int64), [])
        start %= len(self)
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < length:
            tokens = self.corpus[int(self.order[number])]
            begin = start + filled - (int(self._ends[number]) - len(tokens) - 1)  # in this document
            if begin == 0 and filled:
                row.starts.append(filled)
            taken = min(length - filled, len(tokens) + 1 - begin)
            self._copy(tokens, begin, taken, row.inputs[filled:], row.labels[filled:])
            filled += taken
            number += 1
            if number == len(self.order):
                number, start = 0, start - len(self)
        return row

    def _copy(
        self,
        tokens: npt.NDArray[np.integer],
        begin: int,
        taken: int,
        inputs: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
    ) -> None:
        """Some places of a document."""
        end = begin + taken
        inputs[:taken] = tokens[begin - 1 : end - 1] if begin else np.append(self.bos_id, tokens[: end - 1])
        labels[:taken] = tokens[begin:end] if end <= len(tokens) else np.append(tokens[begin:], self.eos_id)


class PackedUpdates:
    """The order of training: epochs of updates of as many rows each, a function of the seed and the epoch alone.

    In every epoch the documents come in another order and are cut into rows elsewhere.  What is left over at its end,
    less than an update, is left for other epochs.  Rows are counted through all epochs, which makes a number all that
    there is to know about one.

    Args:
        rows: of one update.
        passkeys: rows of another kind, in which a number has to be remembered.
        share: of all rows that are such.
    """

    def __init__(
        self,
        corpus: DocumentCorpus,
        vocabulary: Vocabulary,
        length: int,
        rows: int,
        *,
        seed: int = 0,
        passkeys: PasskeyText | None = None,
        share: float = 0.0,
    ) -> None:
        self.corpus, self.vocabulary, self.length, self.rows = corpus, vocabulary, length, rows
        self.seed, self.passkeys = seed, passkeys
        self.places = int(corpus.lengths.sum()) + len(corpus)
        self.text_rows = self.places // length
        self.passkey_rows = 0 if passkeys is None else round(self.text_rows * share / (1.0 - share))
        self.rows_per_epoch = self.text_rows + self.passkey_rows
        if self.rows_per_epoch < rows:
            raise ValueError(
                f"an update has {rows} rows of {length} tokens, and the whole text only {self.text_rows}: "
                f"lower training.batch_tokens or text.length"
            )
        self._places = lru_cache(2)(self._shuffled_places)

    def iterate(self, position: Position) -> Iterator[tuple[Position, Indices]]:
        """Numbers of rows, from a position on, without end, each update with the position after it."""
        updates = self.rows_per_epoch // self.rows
        epoch, update = position.epoch, position.update
        if update >= updates:
            raise ValueError(
                f"an epoch has {updates} updates, none at {update}: did the text or the batch size change?"
            )
        while True:
            order = shuffled(self.rows_per_epoch, self.seed, epoch, 1) + epoch * self.rows_per_epoch
            for number in range(update, updates):
                last = number + 1 == updates
                after = Position(epoch + last, 0 if last else number + 1)
                yield after, order[number * self.rows : (number + 1) * self.rows]
            epoch, update = epoch + 1, 0

    def row(self, number: int) -> Row:
        """The row of that number."""
        epoch, place = divmod(number, self.rows_per_epoch)
        if place < self.text_rows:
            places, phase = self._places(epoch)
            return places.row(phase + place * self.length, self.length)
        assert self.passkeys is not None
        tokens = self.passkeys.document(self._passkey_length(number), stream("passkey", self.seed, number))
        row = Row(np.full(self.length, self.vocabulary.pad_id), np.full(self.length, IGNORED), [])
        row.inputs[: len(tokens) - 1], row.labels[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        return row

    def labels(self, number: int) -> int:
        """How many places of a row have a label."""
        text = number % self.rows_per_epoch < self.text_rows
        return self.length if text else self._passkey_length(number) - 1

    def _passkey_length(self, number: int) -> int:
        """Drawn anew for each, so that answers are not always as far from the beginning; with bos and eos."""
        assert self.passkeys is not None
        shortest = max(self.passkeys.shortest, self.length // 4)
        draw = np.random.PCG64(np.random.SeedSequence([self.seed, number, 2])).random_raw(1)[0]
        return shortest + int(draw) % (self.length + 2 - shortest)

    def _shuffled_places(self, epoch: int) -> tuple[Places, int]:
        """The documents of an epoch in their order, and where the first row begins."""
        order = shuffled(len(self.corpus), self.seed, epoch, 0)
        phase = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, 3])).random_raw(1)[0]
        return Places(self.corpus, self.vocabulary, order), int(phase) % self.places
