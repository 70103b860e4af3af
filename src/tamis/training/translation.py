"""Translation as something to learn: pairs of sentences, the next subword of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from tamis.data.batching import Batch, Updates, collate, split_batch, spread
from tamis.data.corpus import ParallelCorpus
from tamis.data.prepare import Prepared
from tamis.training.distributed import Process
from tamis.training.objective import Measured, Objective
from tamis.training.protocol import Update
from tamis.training.settings import TrainingConfig


class TranslationTask:
    """The `Task` of a prepared corpus."""

    def __init__(self, prepared: Prepared, config: TrainingConfig) -> None:
        self.prepared, self.config = prepared, config
        self.train, self.valid = prepared.corpus("train"), prepared.corpus("valid")
        self.updates = Updates(
            self.train.source_lengths, self.train.target_lengths, config.batch_tokens, seed=config.seed
        )
        self._valid_updates = Updates(self.valid.source_lengths, self.valid.target_lengths, config.batch_tokens)
        self.objective = Objective(config, prepared.target_vocabulary.pad_id)

    def update(self, indices: np.ndarray, process: Process) -> Update:
        tokens = int(self.train.target_lengths[indices].sum()) + len(indices)
        return Update(tokens, self._parts(self.train, self.updates, indices, process))

    def loss(self, model: Callable[..., Tensor], part: Batch) -> Tensor:
        return self.objective(model(part.source, part.target), part.labels)

    def validation(self, process: Process) -> Iterator[Batch]:
        for indices in self._valid_updates.epoch(0):
            yield from self._parts(self.valid, self._valid_updates, indices, process)

    def sample(self, tokens: int) -> Iterator[Batch]:
        """Pairs that stand for the validation set, of about so many tokens and in batches of no more."""
        sizes = self._valid_updates.sizes
        for part in split_batch(spread(sizes, tokens), sizes, min(tokens, self.config.device_tokens or tokens)):
            yield collate(self.valid, part, self.prepared.source_vocabulary, self.prepared.target_vocabulary)

    def measure(self, model: Callable[..., Tensor], part: Batch) -> Measured:
        return self.objective.measure(model(part.source, part.target), part.labels)

    def describe(self, part: Batch) -> str:
        (rows, source), target = part.source.shape, part.target.shape[1]
        return f"{rows} sentences of up to {source} source and {target} target subwords"

    def fingerprint(self) -> str:
        return self.train.fingerprint

    def _parts(self, corpus: ParallelCorpus, updates: Updates, indices: np.ndarray, process: Process) -> list[Batch]:
        tokens = self.config.device_tokens and self.config.device_tokens * process.per_row
        parts = split_batch(indices, updates.sizes, tokens, process.rank, process.world)
        vocabularies = self.prepared.source_vocabulary, self.prepared.target_vocabulary
        return [collate(corpus, part, *vocabularies) for part in parts]
