"""Language modelling as something to learn: rows of documents, and the next subword at every place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tamis.data.batching import IGNORED
from tamis.data.packing import PackedUpdates, Places, Row
from tamis.data.passkey import PasskeyText
from tamis.data.prepare import PreparedText, TextConfig
from tamis.parallel import ContextParallel
from tamis.training.distributed import Process
from tamis.training.objective import Measured, Objective
from tamis.training.protocol import Update
from tamis.training.settings import TrainingConfig
from tamis.training.tasks import Part, split_rows


@dataclass(frozen=True)
class PackedPart(Part):
    """Rows of documents that see only themselves."""

    bounds: Tensor | None = None
    """Where documents and rows begin when all rows are put end to end, and the end, which may be repeated:
    (pieces + 1,).  None where each row is a piece of one document: nothing has to be kept apart then."""

    @property
    def length(self) -> int:
        return self.inputs.shape[1] if self.bounds is None else self.inputs.numel()

    def shared(self, context: ContextParallel) -> Self:
        whole = self if self.bounds is None else replace(self, inputs=_flat(self.inputs), labels=_flat(self.labels))
        return super(PackedPart, whole).shared(context)

    def room_shape(self) -> tuple[int, ...]:
        return (*self.inputs.shape, 0 if self.bounds is None else 1 << (len(self.bounds) - 1).bit_length())

    def room(self, device: torch.device | str) -> PackedPart:
        *shape, bounds = self.room_shape()
        inputs, labels, kept = (torch.zeros(s, dtype=torch.long, device=device) for s in (shape, shape, bounds))
        return PackedPart(inputs, labels, kept if bounds else None)

    def fill(self, part: Part) -> None:
        super().fill(part)
        if self.bounds is not None:
            assert isinstance(part, PackedPart)
            assert part.bounds is not None
            self.bounds.fill_(part.inputs.numel())
            self.bounds[: len(part.bounds)].copy_(part.bounds, non_blocking=True)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        bounds = None if self.bounds is None else function(self.bounds)
        return replace(super()._map(function), bounds=bounds)


def _flat(rows: Tensor) -> Tensor:
    """All rows end to end, as one."""
    return rows.view(1, -1)


def pack(rows: Sequence[Row]) -> PackedPart:
    """Some rows as tensors."""
    inputs, labels = (torch.from_numpy(np.stack([row[side] for row in rows])) for side in (0, 1))
    length = inputs.shape[1]
    if not any(row.starts for row in rows):
        return PackedPart(inputs, labels)
    starts = [number * length + start for number, row in enumerate(rows) for start in (0, *row.starts)]
    return PackedPart(inputs, labels, torch.tensor([*starts, inputs.numel()]))


class LanguageTask:
    """The `Task` of prepared documents."""

    def __init__(self, prepared: PreparedText, text: TextConfig, config: TrainingConfig) -> None:
        self.text, self.config, self.vocabulary = text, config, prepared.vocabulary
        self.train, self.valid = prepared.corpus("train"), prepared.corpus("valid")
        self.rows = config.batch_tokens // text.length
        if not self.rows:
            raise ValueError(
                f"training.batch_tokens = {config.batch_tokens} holds no row of text.length = {text.length} tokens"
            )
        self.updates = PackedUpdates(
            self.train,
            self.vocabulary,
            text.length,
            self.rows,
            seed=config.seed,
            passkeys=self._passkeys() if text.passkey_share else None,
            share=text.passkey_share,
        )
        self.objective = Objective(config, IGNORED)

    def update(self, indices: np.ndarray, process: Process) -> Update:
        rows = [self.updates.row(number) for number in indices.tolist()]
        return Update(sum(map(self.updates.labels, indices.tolist())), self._parts(rows, process))

    def loss(self, model: Callable[..., Tensor], part: PackedPart) -> Tensor:
        return self.objective(*self._predicted(model, part))

    def validation(self, process: Process) -> Iterator[PackedPart]:
        """Return all of it in its own order; what the last rows lack is filled up with places that count for
        nothing."""
        places, length = Places(self.valid, self.vocabulary), self.text.length
        for first in range(0, len(places), self.rows * length):
            starts = range(first, first + self.rows * length, length)
            yield from self._parts([self._cut(places, start) for start in starts], process)

    def sample(self, tokens: int) -> Iterator[PackedPart]:
        """Rows that stand for the validation set, of about so many tokens; one by one, for those who look at weights,
        of which there are as many as pairs of places."""
        places, length = Places(self.valid, self.vocabulary), self.text.length
        starts = range(0, len(places), length)
        count = max(1, min(len(starts), tokens // length))
        for number in range(count):
            yield pack([self._cut(places, starts[len(starts) * number // count])])

    def measure(self, model: Callable[..., Tensor], part: PackedPart) -> Measured:
        return self.objective.measure(*self._predicted(model, part))

    def describe(self, part: PackedPart) -> str:
        rows, length = part.inputs.shape
        return f"{rows} rows of {length} tokens"

    def fingerprint(self) -> str:
        text = self.text
        return f"{self.train.fingerprint} {text.length} {text.passkey_share} {text.passkey_digits}"

    def _predicted(self, model: Callable[..., Tensor], part: PackedPart) -> tuple[Tensor, Tensor]:
        """Logits and labels."""
        if part.bounds is None:
            return model(part.inputs), part.labels
        return model(_flat(part.inputs), cu_seqlens=part.bounds), _flat(part.labels)

    def _parts(self, rows: list[Row], process: Process) -> list[PackedPart]:
        chosen = split_rows(len(rows), self.text.length, self.config.device_tokens, process)
        return [pack([rows[number] for number in some.tolist()] or [self._blank()]) for some in chosen]

    def _blank(self) -> Row:
        """For a process that has nothing to do while the others have, and must take part in their exchange."""
        length = self.text.length
        return Row(np.full(length, self.vocabulary.pad_id), np.full(length, IGNORED), [])

    def _cut(self, places: Places, start: int) -> Row:
        """A row of the validation set, without labels where that has ended."""
        row = places.row(start, self.text.length)
        row.labels[max(0, len(places) - start) :] = IGNORED
        return row

    def _passkeys(self) -> PasskeyText:
        passkeys = PasskeyText(self.vocabulary, self.text.passkey_digits)
        if passkeys.shortest > self.text.length + 1:
            raise ValueError(
                f"a pass key and its question take {passkeys.shortest - 1} tokens, more than "
                f"text.length = {self.text.length}"
            )
        return passkeys
