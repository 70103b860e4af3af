"""Batches: every pair once an epoch, never over the budget, and the same wherever training is taken up again."""

import gc
import threading
import time
import traceback
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data import batching
from tamis.data.batching import Position, Prefetcher, Updates, collate, padded_share, split_batch, spread
from tamis.data.corpus import ParallelCorpus, build_corpus
from tamis.data.text import Pair, read_pairs
from tamis.data.vocabulary import Vocabulary

MULTI30K = Path(__file__).resolve().parents[3] / "shared" / "data" / "multi30k"
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)


def updates_of(lengths, **settings):
    source, target = np.array(lengths, np.int32).T
    return Updates(source, target, **settings)


def same(first, second):
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 300), st.integers(0, 5), st.integers(0, 5), st.none() | st.integers(1, 10))
def test_an_epoch_is_every_pair_once_within_the_budget(lengths, tokens, seed, number, max_sentences):
    updates = updates_of(lengths, tokens=tokens, seed=seed, max_sentences=max_sentences)
    batches = updates.epoch(number)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        longest = max(max(lengths[index]) + 1 for index in batch)
        assert len(batch) * longest <= tokens or len(batch) == 1
        assert max_sentences is None or len(batch) <= max_sentences
    assert same(batches, updates_of(lengths, tokens=tokens, seed=seed, max_sentences=max_sentences).epoch(number))


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(20, 300), st.integers(1, 30))
def test_pools_and_the_whole_hold_the_same_pairs(lengths, tokens, pool):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batching, "POOL", pool)
        batches = updates_of(lengths, tokens=tokens).epoch(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(20, 200), st.integers(0, 30))
def test_taking_up_again_is_going_on(lengths, tokens, done):
    updates = updates_of(lengths, tokens=tokens, seed=3)
    straight = list(islice(updates.iterate(), done + 10))
    position = straight[done - 1][0] if done else Position()
    position = Position.from_dict(position.to_dict())
    again = list(islice(updates_of(lengths, tokens=tokens, seed=3).iterate(position), 10))
    assert [after for after, _ in again] == [after for after, _ in straight[done:]]
    assert same([batch for _, batch in again], [batch for _, batch in straight[done:]])


def test_positions_count_batches_and_epochs():
    updates = updates_of([(5, 5)] * 10, tokens=24)
    positions = [after for after, _ in islice(updates.iterate(), 7)]
    assert positions == [Position(0, n) for n in (1, 2)] + [Position(1, n) for n in (0, 1, 2)] + [
        Position(2, 0),
        Position(2, 1),
    ]
    with pytest.raises(ValueError, match="3 batches, none at 5"):
        next(updates.iterate(Position(0, 5)))
    for wrong in ({"epoch": -1}, {"update": 1.5}, {"epoch": True}, {"epochs": 3}):
        with pytest.raises(ValueError, match=r"epoch|update"):
            Position.from_dict(wrong)


def test_epochs_and_seeds_differ():
    lengths = np.random.default_rng(0).integers(1, 30, (2000, 2))
    first = updates_of(lengths, tokens=500, seed=0)
    orders = [np.concatenate(batches).tolist() for batches in (first.epoch(0), first.epoch(1))]
    orders.append(np.concatenate(updates_of(lengths, tokens=500, seed=1).epoch(0)).tolist())
    assert len({tuple(order) for order in orders}) == 3
    # Not only the order of the batches: pairs that were together in one epoch are not all together in the next.
    groups = [{frozenset(batch.tolist()) for batch in first.epoch(number)} for number in (0, 1)]
    assert len(groups[0] & groups[1]) < 0.05 * len(groups[0])


def test_the_order_does_not_depend_on_the_version_of_numpy():
    # Written down once: an exact resume needs the same order for ever.
    batches = updates_of([(length % 7 + 1, length % 5 + 1) for length in range(20)], tokens=30, seed=1).epoch(2)
    written_down = [[3, 10, 8, 17, 18], [5, 19, 12], [6, 13], [14, 9, 4, 11], [0, 15, 1, 2, 16, 7]]
    assert [batch.tolist() for batch in batches] == written_down


def test_the_sizes_of_batches_are_mixed():
    lengths = np.random.default_rng(0).integers(1, 60, (5000, 2))
    updates = updates_of(lengths, tokens=1000)
    sizes = [int(updates.sizes[batch].max()) for batch in updates.epoch(0)]
    halves = np.mean(sizes[: len(sizes) // 2]), np.mean(sizes[len(sizes) // 2 :])
    assert abs(halves[0] - halves[1]) < 6
    assert sizes != sorted(sizes)


def test_a_million_pairs_take_seconds():
    draw = np.random.default_rng(0)
    source = np.clip(draw.gamma(4.0, 7.0, 1_000_000), 1, 255).astype(np.int32)
    target = np.clip(source * draw.normal(1.0, 0.15, len(source)), 1, 255).astype(np.int32)
    updates = Updates(source, target, 25_000)
    start = time.perf_counter()
    batches = updates.epoch(0)
    assert time.perf_counter() - start < 5.0  # about 0.4 s where nothing else runs
    assert padded_share(batches, source, target) < 0.08


def test_arguments_are_checked():
    for wrong in ({"tokens": 0}, {"tokens": 5, "seed": -1}, {"tokens": 5, "max_sentences": 0}):
        with pytest.raises(ValueError, match="of at least"):
            updates_of([(1, 1)], **wrong)
    with pytest.raises(ValueError, match="as many sources as targets, got 2 and 1"):
        Updates(np.array([1, 2]), np.array([1]), 5)
    with pytest.raises(ValueError, match="got 0 and 0"):
        Updates(np.array([], int), np.array([], int), 5)
    for wrong in ((10, 2, 2), (10, -1, 1), (0, 0, 1)):
        with pytest.raises(ValueError, match="rank < world"):
            split_batch(np.array([0]), np.array([3]), *wrong)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.none() | st.integers(1, 300), st.integers(1, 6))
def test_micro_batches_are_the_batch(sizes, tokens, world):
    sizes = np.array([*sizes, 99, 99])
    batch = np.random.default_rng(0).permutation(len(sizes) - 2)
    parts = [split_batch(batch, sizes, tokens, rank, world) for rank in range(world)]
    assert len({len(own) for own in parts}) == 1
    together = [part for own in parts for part in own]
    assert sorted(np.concatenate(together).tolist()) == sorted(batch.tolist())
    for part in together:
        assert tokens is None or len(part) <= 1 or len(part) * sizes[part].max() <= tokens
    if len(batch) >= len(together):
        assert all(len(part) for part in together)
    if tokens is None:
        assert len(parts[0]) == 1


def test_micro_batches_are_few_and_alike():
    draw = np.random.default_rng(0)
    sizes = np.clip(draw.gamma(4.0, 5.0, 2000), 2, 80).astype(np.int64)
    for batch in Updates(sizes - 1, sizes - 1, 8000).epoch(0)[:4]:
        for world in (1, 2, 4):
            parts = [part for rank in range(world) for part in split_batch(batch, sizes, 2000, rank, world)]
            costs = [len(part) * int(sizes[part].max()) for part in parts]
            assert len(parts) <= -(-5 // world) * world
            assert max(costs) - min(costs) <= 0.15 * max(costs)
    assert [part.tolist() for part in split_batch(np.array([2, 0, 1]), sizes)] == [
        sorted([2, 0, 1], key=lambda index: sizes[index])
    ]
    assert [len(part) for part in split_batch(np.array([], np.int64), sizes, 10, 1, 2)] == [0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A corpus with a vocabulary for each side, whose specials differ."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdefgh "), draw.integers(1, 40))) + "a" for _ in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "t"), vocab_size=30, minloglevel=2, model_type="bpe"
    )
    source, target = Vocabulary.train(texts, 40, kind="bpe"), Vocabulary.load(folder / "t.model")
    pairs = [Pair(line, text, texts[-line]) for line, text in enumerate(texts, 1)]
    build_corpus(pairs, folder, "train", source, target)
    return ParallelCorpus.open(folder, "train"), source, target


@pytest.mark.parametrize("multiple", [1, 8])
def test_collate_against_rows_written_one_by_one(small, multiple):
    corpus, source, target = small
    assert (source.pad_id, source.eos_id, target.pad_id, target.bos_id, target.eos_id) == (0, 2, 30, 1, 2)
    batch = collate(corpus, [5, 17, 3, 80], source, target, pad_to_multiple=multiple)
    assert batch.indices == [5, 17, 3, 80]
    assert {batch.source.dtype, batch.target.dtype, batch.labels.dtype} == {torch.int64}
    widths = [max(len(corpus[index][side]) for index in batch.indices) + 1 for side in (0, 1)]
    widths = [-(-width // multiple) * multiple for width in widths]
    count = 0
    for row, index in enumerate(batch.indices):
        s, t = (ids.tolist() for ids in corpus[index])
        assert batch.source[row].tolist() == (s + [2] + [0] * widths[0])[: widths[0]]
        assert batch.target[row].tolist() == ([1, *t] + [30] * widths[1])[: widths[1]]
        assert batch.labels[row].tolist() == (t + [2] + [30] * widths[1])[: widths[1]]
        count += len(t) + 1
    assert batch.num_tokens == count == int((batch.labels != 30).sum())


def test_collate_of_nothing(small):
    corpus, source, target = small
    batch = collate(corpus, np.array([], np.int64), source, target, pad_to_multiple=4)
    assert batch.source.shape == batch.target.shape == batch.labels.shape == (0, 4)
    assert (batch.num_tokens, batch.indices) == (0, [])


def test_batches_move(small):
    corpus, source, target = small
    batch = collate(corpus, [1, 2], source, target)
    moved = batch.to("meta")
    assert moved.source.device.type == moved.target.device.type == moved.labels.device.type == "meta"
    assert (moved.indices, moved.num_tokens) == (batch.indices, batch.num_tokens)
    assert torch.equal(batch.to("cpu", non_blocking=True).labels, batch.labels)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetching_keeps_the_order(depth):
    with Prefetcher(range(500), depth) as items:
        assert list(items) == list(range(500))
        assert list(items) == []
    assert prefetch_threads() == []


def test_prefetching_runs_ahead_no_further_than_its_depth():
    made = []
    with Prefetcher((made.append(number) or number for number in range(100)), depth=3) as items:
        wait_until(lambda: len(made) == 4)  # three wait, the fourth is in hand
        time.sleep(0.05)
        assert len(made) == 4
        assert next(items) == 0
        wait_until(lambda: len(made) == 5)


def fails_after(count):
    yield from range(count)
    raise KeyError("in the thread")


def test_errors_reach_the_consumer_after_what_came_before():
    with Prefetcher(fails_after(3)) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="in the thread") as caught:
            next(items)
        assert any(frame.name == "fails_after" for frame in traceback.extract_tb(caught.value.__traceback__))
        with pytest.raises(StopIteration):
            next(items)


def test_a_consumer_may_leave_early():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    for consumed in (0, 1, 10):
        closed.clear()
        start = time.monotonic()
        with Prefetcher(endless(), 2) as items:
            for _ in range(consumed):
                next(items)
        assert time.monotonic() - start < 2.0
        assert closed.wait(2.0)
        assert prefetch_threads() == []
        with pytest.raises(StopIteration):
            next(items)
        items.close()


def test_closing_does_not_wait_for_ever():
    release = threading.Event()
    items = Prefetcher(release.wait(30) for _ in range(2))
    start = time.monotonic()
    items.close(timeout=0.1)
    assert time.monotonic() - start < 2.0
    release.set()
    wait_until(lambda: prefetch_threads() == [])


def test_a_forgotten_prefetcher_ends_its_thread():
    items = Prefetcher(iter(int, 1), 2)
    assert next(items) == 0
    del items
    gc.collect()
    wait_until(lambda: prefetch_threads() == [])


def test_many_prefetchers_do_not_hang():
    for number in range(200):
        with Prefetcher(iter(range(number % 7)), 1 + number % 2) as items:
            assert len(list(islice(items, number % 5))) == min(number % 5, number % 7)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Prefetcher([], 0)


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="shared/data/multi30k is not here")
def test_multi30k_is_padded_little(tmp_path):
    pairs = list(islice(read_pairs([MULTI30K / "train.en.xz", MULTI30K / "train.de.xz"]), 10_000))
    vocabulary = Vocabulary.train((text for pair in pairs for text in pair[1:]), 4000, kind="bpe")
    build_corpus(pairs, tmp_path, "train", vocabulary, vocabulary)
    corpus = ParallelCorpus.open(tmp_path, "train")
    updates = Updates(corpus.source_lengths, corpus.target_lengths, 4000)
    batches = updates.epoch(0)
    assert padded_share(batches, corpus.source_lengths, corpus.target_lengths) < 0.10
    made = [collate(corpus, batch, vocabulary, vocabulary) for batch in batches[:20]]
    used = sum(int((t != vocabulary.pad_id).sum()) for batch in made for t in (batch.source, batch.labels))
    total = sum(t.numel() for batch in made for t in (batch.source, batch.labels))
    share = padded_share(batches[:20], corpus.source_lengths, corpus.target_lengths)
    assert 1.0 - used / total == pytest.approx(share)
    assert all(max(batch.source.numel(), batch.labels.numel()) <= 4000 for batch in made)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 2000))
def test_a_sample_is_as_long_as_all_are(sizes, tokens):
    sizes = np.array(sizes)
    chosen = spread(sizes, tokens)
    assert len(set(chosen.tolist())) == len(chosen) >= 1
    assert np.array_equal(chosen, spread(sizes, tokens))
    if tokens >= sizes.sum():
        assert sorted(chosen) == list(range(len(sizes)))
    # Of each stretch of ascending sizes one: the mean is off by less than the sizes of one stretch differ.
    assert abs(sizes[chosen].mean() - sizes.mean()) <= (sizes.max() - sizes.min()) / len(chosen) + 1e-9
    assert sizes[chosen].sum() <= max(sizes.max(), tokens + sizes.mean() + sizes.max())


def test_a_sample_by_hand():
    """Sizes 9 to 1, of 45 tokens in all: three of them are the second, fifth and eighth smallest."""
    assert spread(np.arange(9, 0, -1), 15).tolist() == [7, 4, 1]
