"""Every task against a slow answer in plain Python that shares nothing with it."""

import itertools

import pytest
import torch

from tamis.data.tasks import (
    MQMTAR,
    SPLITS,
    TASKS,
    Copy,
    FlipFlop,
    LocalCount,
    MaxRetrieval,
    Passkey,
    Reverse,
    Sort,
    TwoBack,
    build_task,
    distinct,
    stream,
)
from tamis.data.tasks.base import quarters


def sort(task, source):
    ordered = []
    for symbol in source:
        place = 0
        while place < len(ordered) and ordered[place] <= symbol:
            place += 1
        ordered.insert(place, symbol)
    return ordered


def mqmtar(task, source):
    context, queries = source[: source.index(2)], source[source.index(2) :]
    known, place = {}, 0
    while place < len(context):
        if context[place] == 0:
            place += 1
            continue
        first, second, mark, *value, end = context[place : place + 6]
        assert (mark, end) == (1, 0)
        assert (first, second) not in known
        known[first, second] = value
        place += 6
    assert len(known) == int(0.8 * len(context) / 6 + 1e-9)
    asked = [tuple(queries[place + 1 : place + 3]) for place in range(0, len(queries), 3)]
    assert len(set(asked)) == min(task.queries, len(known))
    assert queries[::3] == [2] * len(set(asked))
    return [token for key in asked for token in [2, *known[key]]]


def flip_flop(task, source):
    bit = None
    assert source[0] == 2
    assert source[-1] == 4
    for command, value in itertools.zip_longest(source[::2], source[1::2]):
        if command == 2:
            bit = value
        assert command in (2, 3, 4)
        assert command != 4 or value in (bit, None)
    return [bit]


def local_count(task, source):
    runs = [len(list(run)) for _, run in itertools.groupby(source)]
    assert all(task.shortest_run <= run <= task.longest_run for run in runs[:-1])
    assert runs[-1] <= task.longest_run
    return [task.symbols + place for run in runs for place in range(run)]


def max_retrieval(task, source):
    items = [tuple(source[place : place + 3]) for place in range(0, len(source), 3)]
    assert len({item[:2] for item in items}) == len(items)
    return [max(items)[2]]


def passkey(task, source):
    assert source[-1] == task.key_id
    start = source.index(task.key_id)
    text = source[:start] + source[start + 1 + task.digits : -1]
    assert text == [11 + place % task.sentence for place in range(len(text))]
    return source[start + 1 : start + 1 + task.digits]


ORACLES = {
    "mqmtar": mqmtar,
    "sort": sort,
    "reverse": lambda task, source: [source[-1 - place] for place in range(len(source))],
    "copy": lambda task, source: list(source),
    "flip_flop": flip_flop,
    "two_back": lambda task, source: [source[place - 2] for place in range(2, len(source))],
    "local_count": local_count,
    "max_retrieval": max_retrieval,
    "passkey": passkey,
}
SOURCE_LENGTHS = {
    "mqmtar": lambda n: n + 12,
    "flip_flop": lambda n: 2 * n - 1,
    "max_retrieval": lambda n: 3 * n,
}


def test_every_task_of_the_paper_is_there():
    assert set(ORACLES) <= set(TASKS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [30, 31, 64, 257])
@pytest.mark.parametrize("name", TASKS)
def test_rows_are_framed_and_answers_right(name, length, split):
    task = build_task(name)
    drawn = task.generate(20, length, stream("test", length), split)
    n = SOURCE_LENGTHS.get(name, lambda n: n)(length)
    assert drawn.prompt_length == n + 2
    assert drawn.tokens.shape == drawn.answer.shape == (20, n + 2 + task.answer_length(length))
    for tokens, answer in zip(drawn.tokens.tolist(), drawn.answer.tolist(), strict=True):
        assert answer == [False] * (n + 2) + [True] * task.answer_length(length)
        bos, source, sep, target, eos = tokens[0], tokens[1 : n + 1], tokens[n + 1], tokens[n + 2 : -1], tokens[-1]
        assert (bos, sep, eos) == (task.bos_id, task.sep_id, task.eos_id)
        assert target == ORACLES[name](task, source)
        assert all(0 <= symbol < task.num_symbols for symbol in source + target)
    assert task.vocab_size == task.num_symbols + 3


@pytest.mark.parametrize(("length", "queries"), [(8, 1), (14, 1), (15, 2), (22, 2), (23, 3), (29, 3), (30, 4)])
def test_a_short_context_is_asked_for_all_of_its_pairs(length, queries):
    for source, target in zip(*(rows.tolist() for rows in MQMTAR().pairs(20, length, stream(0))), strict=True):
        assert len(source) == length + 3 * queries
        assert target == mqmtar(MQMTAR(), source)


@pytest.mark.parametrize(
    ("task", "source", "target"),
    [
        (Copy(), [3, 1, 2, 5], [3, 1, 2, 5]),
        (Reverse(), [3, 1, 2, 5], [5, 2, 1, 3]),
        (Sort(), [3, 1, 3, 0], [0, 1, 3, 3]),
        (TwoBack(), [3, 1, 2, 5], [3, 1]),
    ],
)
def test_strings_by_hand(task, source, target):
    assert task.target(torch.tensor([source])).tolist() == [target]


def test_oracles_by_hand():
    assert flip_flop(FlipFlop(), [2, 1, 3, 0, 2, 0, 4, 0, 3, 1, 4]) == [0]
    assert local_count(LocalCount(symbols=8), [1, 1, 1, 2, 2]) == [8, 9, 10, 8, 9]
    assert max_retrieval(MaxRetrieval(base=10), [2, 7, 10, 5, 0, 11, 4, 9, 10]) == [11]
    text = [0, 9, 8, 1, 7, 6, 0, 0, 5, 4, 1, 3, 3, 0, 0]
    assert mqmtar(MQMTAR(queries=2), [*text, 2, 5, 4, 2, 9, 8]) == [2, 3, 3, 2, 7, 6]
    assert passkey(Passkey(digits=2), [11, 12, 10, 4, 7, 13, 10]) == [4, 7]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_rows(name):
    task = build_task(name)
    first, second, other = (task.generate(8, 40, stream(seed)).tokens for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("task", [Reverse(symbols=2), Copy(symbols=4), FlipFlop(ignored=0.5)], ids=str)
def test_splits_of_a_small_space_share_no_source_and_leave_none_out(task):
    """All sources of six places or four commands are drawn many times over."""
    length = 6 if not isinstance(task, FlipFlop) else 4
    found = {
        split: {tuple(row) for row in task.generate(20_000, length, stream(split), split).tokens.tolist()}
        for split in SPLITS
    }
    everything = {tuple(row) for row in task._framed(*task.pairs(80_000, length, stream("all"))).tokens.tolist()}
    assert set().union(*found.values()) == everything
    assert sum(map(len, found.values())) == len(everything)


@pytest.mark.parametrize("name", TASKS)
def test_half_of_all_sources_are_for_training(name):
    source, _ = build_task(name).pairs(8000, 40, stream("quarters"))
    shares = quarters(source).bincount(minlength=4) / 8000
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.03)


def test_a_split_without_sources_is_an_error():
    task = Copy(symbols=1)  # one source
    kinds = [split for split in SPLITS if quarters(torch.zeros(1, 3, dtype=torch.long)).item() not in SPLITS[split]]
    with pytest.raises(ValueError, match=f"too few {kinds[0]} sources of length 3"):
        task.generate(2, 3, stream(0), kinds[0])


@pytest.mark.parametrize(("number", "size"), [(4, 4), (3, 40), (300, 2000), (0, 5)])
def test_distinct_integers(number, size):
    drawn = distinct(50, number, size, stream("distinct"))
    assert drawn.shape == (50, number)
    assert all(len(set(row)) == number and all(0 <= x < size for x in row) for row in drawn.tolist())


@pytest.mark.parametrize(("number", "size"), [(2, 3), (2, 9)])
def test_distinct_rows_are_equally_likely(number, size):
    drawn = distinct(90_000, number, size, stream("even")).tolist()
    rows = [drawn.count(list(row)) for row in itertools.permutations(range(size), number)]
    expected = 90_000 / len(rows)
    assert sum((count - expected) ** 2 / expected for count in rows) < 2.5 * len(rows)


def test_shares_of_commands_and_depths_of_keys():
    source, _ = FlipFlop().pairs(500, 200, stream("shares"))
    shares = source[:, 2:-1:2].flatten().bincount(minlength=5) / source[:, 2:-1:2].numel()
    assert shares.tolist() == pytest.approx([0, 0, 0.1, 0.8, 0.1], abs=0.01)
    source, _ = Passkey().pairs(20_000, 24, stream("depths"))
    depths = (source == 10).long().argmax(1).bincount() / 20_000
    assert depths.tolist() == pytest.approx([1 / 18] * 18, abs=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_task("revers"), "did you mean 'reverse'"),
        (lambda: build_task("reverse", queries=3), "task 'reverse' has no option 'queries'; it has symbols"),
        (lambda: Reverse().generate(2, 0, stream(0)), "length of at least 1, got 2 and 0"),
        (lambda: Reverse().generate(0, 5, stream(0)), "count of at least 1"),
        (lambda: Reverse().generate(2, 5, stream(0), "tset"), "did you mean 'test'"),
        (lambda: MQMTAR().generate(2, 7, stream(0)), "length of at least 8, got 2 and 7"),
        (lambda: distinct(1, 5, 4, stream(0)), "no 5 different integers below 4"),
        (lambda: LocalCount(symbols=1), "symbols must be an int of at least 2"),
        (lambda: LocalCount(shortest_run=9, longest_run=8), "longest_run must be an int of at least 9"),
        (lambda: Passkey(digits=0), "digits must be an int of at least 1"),
        (lambda: Passkey(digits=15), "digits must be an int of at most 14"),
        (lambda: MQMTAR(queries=0), "queries must be an int of at least 1"),
        (lambda: MQMTAR(queries="1"), "queries must be an int"),
        (lambda: MaxRetrieval(base=[1]), "base must be an int"),
        (lambda: Reverse(symbols=0), "symbols must be an int of at least 1"),
        (lambda: FlipFlop(ignored=1.5), "ignored must lie in"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_on_a_gpu(name):
    task = build_task(name)
    drawn = task.generate(50, 64, stream(0, device="cuda"), "test")
    n = drawn.prompt_length
    assert drawn.tokens.is_cuda
    for tokens in drawn.tokens.tolist():
        assert tokens[n:-1] == ORACLES[name](task, tokens[1 : n - 1])
    source = drawn.tokens[:, 1 : n - 1]
    assert torch.equal(quarters(source).cpu(), quarters(source.cpu()))


def test_more_sequences_than_fit_are_refused(monkeypatch):
    monkeypatch.setattr("tamis.settings.free_bytes", lambda device: 10**9)
    with pytest.raises(
        ValueError, match=r"2,000,000,000 rows of length 64 would take 2,048.0 GB of memory, and 1.0 GB are free"
    ):
        build_task("copy").generate(2_000_000_000, 64, stream(0))
