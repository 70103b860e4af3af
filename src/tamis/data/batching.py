"""The order of training and its batches.

Lengths are subwords with their eos.  The size of a pair is that of its longer side, and a batch of n pairs counts
n * (size of its largest pair) tokens: no tensor that is made of it holds more.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tamis.data.corpus import ParallelCorpus
from tamis.data.vocabulary import Vocabulary
from tamis.parallel import ContextParallel

POOL = 1 << 19  # pairs sorted by length together: enough that padding is small at any batch size

ROOM_ROWS, ROOM_LENGTH = 16, 8  # steps in which a batch's memory grows where it is kept: few shapes, little padding

IGNORED = -100
"""The label of a place that has none, where no token is padding."""

Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Some pairs as tensors of int64."""

    source: Tensor
    """(B, Ls): tokens, eos, padding."""
    target: Tensor
    """(B, Lt): bos, tokens, padding; what the decoder reads."""
    labels: Tensor
    """(B, Lt): tokens, eos, padding; what it should say."""
    indices: list[int]
    """Indices of the pairs in their corpus."""
    num_tokens: int
    """Labels that are not padding."""
    pad_id: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> Batch:
        """In pinned memory, from which a copy to the GPU need not wait."""
        return self._map(Tensor.pin_memory)

    def room_shape(self) -> tuple[int, ...]:
        """Rows and lengths rounded up: batches with the same fit into one room."""
        (rows, source), target = self.source.shape, self.target.shape[1]
        return rounded_up(rows, ROOM_ROWS), rounded_up(source, ROOM_LENGTH), rounded_up(target, ROOM_LENGTH)

    def room(self, device: torch.device | str) -> Batch:
        """Memory for batches of about this shape; see `fill`."""
        rows, source, target = self.room_shape()
        sides = (torch.full((rows, length), self.pad_id, device=device) for length in (source, target, target))
        return Batch(next(sides), next(sides), next(sides), [], 0, self.pad_id)

    def fill(self, batch: Batch) -> None:
        """Take over another batch.  Further places are padding, and further rows repeat its first without labels."""
        rows = batch.source.shape[0]
        for own, other in ((self.source, batch.source), (self.target, batch.target), (self.labels, batch.labels)):
            own.fill_(self.pad_id)
            own[:rows, : other.shape[1]].copy_(other, non_blocking=True)
        self.source[rows:] = self.source[:1]
        self.target[rows:] = self.target[:1]

    length: ClassVar[int | None] = None  # there are two, and both are filled up with padding

    def shared(self, context: ContextParallel) -> Batch:
        """This process's tokens of all pairs."""
        return self._map(lambda tensor: context.take(tensor, fill=self.pad_id))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(self, source=function(self.source), target=function(self.target), labels=function(self.labels))


def collate(
    corpus: ParallelCorpus,
    indices: Sequence[int] | Indices,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    *,
    pad_to_multiple: int = 1,
) -> Batch:
    """Make the batch of some pairs.  No pairs give a batch of no rows.

    Args:
        corpus, indices: the pairs.
        source_vocabulary, target_vocabulary: which know padding and ends.
        pad_to_multiple: what lengths are rounded up to.

    Returns:
        the batch.
    """
    chosen = np.asarray(indices, np.int64)
    source_lengths, target_lengths = corpus.source_lengths[chosen], corpus.target_lengths[chosen]
    source = _rows(source_lengths + 1, source_vocabulary.pad_id, pad_to_multiple)
    labels = _rows(target_lengths + 1, target_vocabulary.pad_id, pad_to_multiple)
    target = np.full_like(labels, target_vocabulary.pad_id)
    rows = np.arange(len(chosen))

    source[_filled(source, source_lengths)] = corpus.sources(chosen)
    source[rows, source_lengths] = source_vocabulary.eos_id
    tokens = corpus.targets(chosen)
    labels[_filled(labels, target_lengths)] = tokens
    labels[rows, target_lengths] = target_vocabulary.eos_id
    target[:, 0] = target_vocabulary.bos_id
    target[:, 1:][_filled(target[:, 1:], target_lengths)] = tokens
    return Batch(
        source=torch.from_numpy(source),
        target=torch.from_numpy(target),
        labels=torch.from_numpy(labels),
        indices=chosen.tolist(),
        num_tokens=int(target_lengths.sum()) + len(chosen),
        pad_id=target_vocabulary.pad_id,
    )


def _rows(lengths: Lengths, pad_id: int, multiple: int) -> npt.NDArray[np.int64]:
    return np.full((len(lengths), rounded_up(int(lengths.max(initial=1)), multiple)), pad_id, np.int64)


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _filled(rows: npt.NDArray[np.int64], lengths: Lengths) -> npt.NDArray[np.bool_]:
    """Where the first `lengths` places of each row are."""
    return np.arange(rows.shape[1]) < lengths[:, None]


@dataclass(frozen=True)
class Position:
    """How far training has come: batches of an epoch that are done."""

    epoch: int = 0
    update: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {value!r}")

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Self:
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"a position is an epoch and an update, got {values}") from error


class Updates:
    """The order of training: epochs of global batches, a function of the seed and the epoch alone.

    An epoch goes through every pair once.  The pairs are shuffled, sorted by size within large pools, cut into batches
    of at most `tokens` tokens and `max_sentences` pairs (a pair over `tokens` is a batch by itself), and the batches
    shuffled.
    """

    def __init__(
        self,
        source_lengths: Lengths,
        target_lengths: Lengths,
        tokens: int,
        *,
        seed: int = 0,
        max_sentences: int | None = None,
    ) -> None:
        """Lengths are those of a corpus, without eos."""
        if len(source_lengths) != len(target_lengths) or not len(source_lengths):
            raise ValueError(f"needs as many sources as targets, got {len(source_lengths)} and {len(target_lengths)}")
        if tokens < 1 or seed < 0 or (max_sentences is not None and max_sentences < 1):
            raise ValueError(
                f"needs tokens and max_sentences of at least 1 and a seed of at least 0, "
                f"got {tokens}, {max_sentences} and {seed}"
            )
        self.sizes: npt.NDArray[np.int64] = np.maximum(source_lengths, target_lengths).astype(np.int64) + 1
        self.tokens, self.seed, self.max_sentences = tokens, seed, max_sentences

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, each sorted by size."""
        order = shuffled(len(self.sizes), self.seed, number, 0)
        batches: list[Indices] = []
        for start in range(0, len(order), POOL):
            pool = order[start : start + POOL]
            # By size alone: a second key, the shorter side, saves no padding and puts the same pairs together again.
            pool = pool[np.argsort(self.sizes[pool], kind="stable")]
            ends = _cut(self.sizes[pool].tolist(), self.tokens, self.max_sentences)
            batches.extend(np.split(pool, ends[:-1]))
        return [batches[place] for place in shuffled(len(batches), self.seed, number, 1)]

    def iterate(self, position: Position | None = None) -> Iterator[tuple[Position, Indices]]:
        """Batches from a position on, without end, each with the position after it.

        Past the last batch of an epoch the position is the beginning of the next: its `update` is 0.
        """
        position = position or Position()
        number, start = position.epoch, position.update
        while True:
            batches = self.epoch(number)
            if start >= len(batches):
                raise ValueError(
                    f"an epoch has {len(batches)} batches, none at {start}: did the corpus or the batch size change?"
                )
            for update in range(start, len(batches)):
                last = update + 1 == len(batches)
                yield Position(number + last, 0 if last else update + 1), batches[update]
            number, start = number + 1, 0


def shuffled(count: int, *seeds: int) -> Indices:
    """A permutation, by raw draws: NumPy promises that these never change, and of its shuffles it does not."""
    generator = np.random.PCG64(np.random.SeedSequence(seeds))
    return np.argsort(generator.random_raw(count), kind="stable")


def _cut(sizes: list[int], tokens: int, max_sentences: int | None = None) -> list[int]:
    """Where to end batches of ascending sizes so that each is as large as may be, and at least one pair."""
    ends = []
    start = 0
    while start < len(sizes):
        most = min(tokens // sizes[start], max_sentences or len(sizes), len(sizes) - start)
        start += max(1, _fitting(sizes, start, most, tokens))
        ends.append(start)
    return ends


def _fitting(sizes: list[int], start: int, most: int, tokens: int) -> int:
    """How many pairs from `start` on fit: each one more means more tokens, so the answer is found by halving."""
    return bisect_right(range(1, most + 1), tokens, key=lambda count: count * sizes[start + count - 1])


def spread(sizes: Lengths, tokens: int) -> Indices:
    """Items that stand for all of them: evenly spaced from the smallest to the largest, of about `tokens` in all."""
    count = min(len(sizes), max(1, round(tokens * len(sizes) / max(1, int(sizes.sum())))))
    middles = (2 * np.arange(count) + 1) * len(sizes) // (2 * count)
    return np.argsort(sizes, kind="stable")[middles]


def padded_share(batches: Iterable[Indices], source_lengths: Lengths, target_lengths: Lengths) -> float:
    """Return how much of the tensors of some batches is padding.

    Args:
        batches: indices of pairs.
        source_lengths, target_lengths: of all pairs.

    Returns:
        a share from 0 to 1.
    """
    used = made = 0
    for batch in batches:
        for lengths in (source_lengths[batch], target_lengths[batch]):
            used += int(lengths.sum()) + len(batch)
            made += len(batch) * (int(lengths.max()) + 1)
    return 1.0 - used / made


def split_batch(
    indices: Indices, sizes: Lengths, tokens: int | None = None, rank: int = 0, world: int = 1
) -> list[Indices]:
    """Cut one global batch into the micro-batches of process `rank` out of `world`, each of at most `tokens` tokens.

    `sizes` are those of the corpus (`Updates.sizes`).  Every process gets the same number, the fewest that fit, and
    together they hold each pair once.  They are about equally large; a pair over `tokens` is one by itself, and one is
    empty only where there are fewer pairs than micro-batches.

    Args:
        indices, sizes: the pairs of the batch, and the sizes of all pairs.
        tokens: by default one micro-batch.
        rank, world: this process, and how many there are.

    Returns:
        indices of each micro-batch.
    """
    if not 0 <= rank < world or (tokens is not None and tokens < 1):
        raise ValueError(f"needs 0 <= rank < world and tokens of at least 1, got {rank}, {world} and {tokens}")
    chosen = indices[np.argsort(sizes[indices], kind="stable")]
    own: list[int] = sizes[chosen].tolist()
    if not own:
        return [chosen]
    most = tokens or len(own) * own[-1]
    count = -(-len(_cut(own, most)) // world) * world
    # The least budget that still gives no more than `count` parts makes them equally large.
    budgets = range(min(own[-1], most), most + 1)
    ends = _cut(own, budgets[bisect_left(budgets, -count, key=lambda budget: -len(_cut(own, budget)))])
    parts = np.split(chosen, ends[:-1])
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda place: len(parts[place]))
        half = (len(parts[largest]) + 1) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts[rank::world]


class Prefetcher(Generic[T]):
    """Runs an iterable ahead in a thread, up to `depth` items.

    What the iterable raises is raised by the consumer's `next`.  Leave by `close`, or use it in a `with` statement.
    """

    def __init__(self, items: Iterable[T], depth: int = 4) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._channel: _Channel[T] = _Channel(depth)
        # The thread knows the channel only, so that a prefetcher nobody holds any more can go, and ends its thread.
        self._thread = threading.Thread(target=self._channel.fill, args=(items,), name="prefetch", daemon=True)
        weakref.finalize(self, self._channel.stop)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._channel.take()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread; waits for the item that is being made, no longer than `timeout` seconds."""
        self._channel.stop()
        self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Channel(Generic[T]):
    """A bounded queue between one producer and its consumer."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def fill(self, items: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    break
        except BaseException as raised:  # whatever it is, the consumer must not wait for ever
            error = raised
        finally:
            with self._changed:
                if not self._ended:
                    self._ended, self._error = True, error
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Wait for room; False once the consumer is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ready) < self._depth)
            if not self._ended:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._ended

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._ready)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()
