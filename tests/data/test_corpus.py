"""The indexed corpus: what went in comes out, every other line is accounted for, and damage is noticed."""

import json
import os
import signal
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data import corpus as corpus_module
from tamis.data.corpus import Limits, ParallelCorpus, build_corpus
from tamis.data.indexed import Report
from tamis.data.text import BadLine, Pair, read_pairs
from tamis.data.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LETTERS = "abcdefghij"


@cache
def letters() -> Vocabulary:
    """Each letter is a piece of its own (and so is the leading space, unless it is merged with a letter)."""
    texts = [f"{first}{second}" for first in LETTERS for second in LETTERS]
    return Vocabulary.train(texts, len(LETTERS) + 5, kind="bpe")


def pairs_of(count):
    return [Pair(line, LETTERS[line % 10] * (line % 7 + 1), LETTERS[line % 9] * 3) for line in range(1, count + 1)]


def build(folder, pairs, split="train", **limits):
    return build_corpus(pairs, folder, split, letters(), letters(), Limits(**limits))


def test_what_went_in_comes_out(tmp_path):
    pairs = pairs_of(100)
    report = build(tmp_path, pairs)
    corpus = ParallelCorpus.open(tmp_path, "train")
    assert report == corpus.report == Report(100, 100, {}, {})
    assert len(corpus) == len(list(corpus)) == 100
    for pair, (source, target) in zip(pairs, corpus, strict=True):
        assert source.tolist() == letters().encode(pair.source)
        assert target.tolist() == letters().encode(pair.target)
    assert corpus.lines.tolist() == list(range(1, 101))
    assert corpus.source_lengths.tolist() == [len(source) for source, _ in corpus]
    assert corpus.target_lengths.tolist() == [len(target) for _, target in corpus]
    assert corpus[-1][0].tolist() == corpus[99][0].tolist()
    assert corpus[0][0].dtype == np.uint16
    for wrong in (100, -101):
        with pytest.raises(IndexError, match=f"no pair {wrong}"):
            corpus[wrong]
    corpus.verify()


def test_many_pairs_at_once(tmp_path):
    build(tmp_path, pairs_of(50))
    corpus = ParallelCorpus.open(tmp_path, "train")
    chosen = np.array([7, 3, 3, 49, 0])
    assert corpus.sources(chosen).tolist() == [number for index in chosen for number in corpus[index][0]]
    assert corpus.targets(chosen).tolist() == [number for index in chosen for number in corpus[index][1]]
    assert corpus.sources(chosen[:0]).tolist() == []


def test_a_large_vocabulary_needs_wider_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(Vocabulary, "__len__", lambda _: (1 << 16) + 1)
    build(tmp_path, pairs_of(5))
    corpus = ParallelCorpus.open(tmp_path, "train")
    assert corpus[0][0].dtype == np.uint32
    assert corpus[2][0].tolist() == letters().encode(pairs_of(5)[2].source)


def test_every_line_left_out_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK", 7)  # lines of one reason lie in several chunks
    items = [
        Pair(1, "a", "b"),
        Pair(2, "", "b"),
        Pair(3, "a", " \t "),
        BadLine(4, "source: invalid UTF-8"),
        Pair(5, "a" * 30, "b" * 30),
        Pair(6, "a" * 12, "b" * 30),
        Pair(7, "a" * 2, "b" * 12),
        Pair(8, "a", "b" * 8),
        Pair(9, "\u3000", ""),
        *(Pair(line, "", "b") for line in range(10, 40)),
        Pair(40, "c", "d"),
    ]
    seen = []
    report = build_corpus(items, tmp_path, "train", letters(), letters(), Limits(max_length=25), progress=seen.append)
    assert (report.read, report.kept) == (40, 3)
    assert report.skipped == {
        "empty source": 32, "empty target": 1, "source: invalid UTF-8": 1, "source too long": 1, "target too long": 1,
        "length ratio": 1,
    }  # fmt: skip
    assert report.lines["empty source"] == [2, 9, *range(10, 28)]
    assert [report.lines[reason] for reason in list(report.skipped)[1:]] == [[3], [4], [5], [6], [7]]
    listed = [row.split("\t") for row in (tmp_path / "train.skipped.tsv").read_text().splitlines()]
    assert listed[0] == ["line", "reason"]
    assert [int(line) for line, _ in listed[1:]] == [*range(2, 8), *range(9, 40)]
    assert sum(reason == "empty source" for _, reason in listed) == 32
    assert ParallelCorpus.open(tmp_path, "train").lines.tolist() == [1, 8, 40]
    assert seen == [7, 14, 21, 28, 35, 40]
    text = report.describe()
    assert text.startswith("3 of 40 pairs kept\n")
    assert "32 left out, empty source: lines 2, 9, 10, 11" in text
    assert "27, ..." in text
    assert "1 left out, target too long: line 6" in text
    assert Report(**json.loads(json.dumps(report.to_dict()))) == report


def test_limits_count_the_end_of_the_sentence(tmp_path):
    length = len(letters().encode("a" * 20)) + 1
    pairs = [Pair(1, "a" * 20, "b" * 20)]
    assert build(tmp_path, pairs, max_length=length).kept == 1
    with pytest.raises(ValueError, match="source too long: line 1"):
        build(tmp_path, pairs, max_length=length - 1)
    for wrong in ({"max_length": 1}, {"max_ratio": 0.5}, {"max_ratio": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least"):
            Limits(**wrong)


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing is left for the split 'train': 0 of 1 pairs kept"):
        build(tmp_path, [Pair(1, "", "")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"letters, digits.*got '\.\./up'"):
        build(tmp_path, pairs_of(2), split="../up")


def test_a_failed_build_leaves_the_old_corpus(tmp_path):
    build(tmp_path, pairs_of(10))
    before = sorted(entry.name for entry in tmp_path.iterdir())

    def broken():
        yield from pairs_of(20_000)
        raise ValueError("unequal files")

    with pytest.raises(ValueError, match="unequal files"):
        build(tmp_path, broken())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    corpus = ParallelCorpus.open(tmp_path, "train")
    corpus.verify()
    assert len(corpus) == 10


@pytest.mark.parametrize("step", range(5))
def test_a_build_that_dies_at_the_end_leaves_nothing_that_opens(tmp_path, monkeypatch, step):
    build(tmp_path, pairs_of(10))
    replace, calls = os.replace, []

    def dying(*paths):
        if len(calls) == step:
            raise KeyboardInterrupt
        calls.append(paths)
        replace(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, pairs_of(12))
    with pytest.raises(FileNotFoundError, match=r"no corpus 'train': train\.json is missing"):
        ParallelCorpus.open(tmp_path, "train")
    build(tmp_path, pairs_of(12))
    ParallelCorpus.open(tmp_path, "train").verify()


def test_a_killed_build(tmp_path):
    code = f"""if True:
        import sys, time
        from tamis.data import Pair, Vocabulary, build_corpus
        def pairs():
            for line in range(1, 10_000):
                yield Pair(line, "abc", "def")
            print("half", flush=True)
            time.sleep(60)
        vocabulary = Vocabulary.load({str(tmp_path / "v.model")!r})
        build_corpus(pairs(), {str(tmp_path / "corpus")!r}, "train", vocabulary, vocabulary)
    """
    letters().save(tmp_path / "v.model")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    with pytest.raises(FileNotFoundError, match=r"train\.json is missing"):
        ParallelCorpus.open(tmp_path / "corpus", "train")
    assert len(list((tmp_path / "corpus").iterdir())) == 1
    build(tmp_path / "corpus", pairs_of(10))
    assert len(ParallelCorpus.open(tmp_path / "corpus", "train")) == 10
    assert len(list((tmp_path / "corpus").iterdir())) == 5


def test_an_open_corpus_outlives_a_new_build(tmp_path):
    build(tmp_path, pairs_of(30))
    corpus = ParallelCorpus.open(tmp_path, "train")
    expected = [source.tolist() for source, _ in corpus]
    build(tmp_path, pairs_of(5))
    assert [source.tolist() for source, _ in corpus] == expected


@pytest.mark.parametrize("part", ["tokens", "offsets", "lines"])
def test_torn_files(tmp_path, part):
    build(tmp_path, pairs_of(20))
    path = tmp_path / f"train.{part}"
    whole = path.read_bytes()
    for torn in (b"", whole[:1], whole[:-1], whole[: len(whole) // 2], whole + b"x"):
        path.write_bytes(torn)
        with pytest.raises(
            ValueError, match=rf"train\.json cannot be opened: train\.{part} must have {len(whole)} bytes"
        ):
            ParallelCorpus.open(tmp_path, "train")
    path.unlink()
    with pytest.raises(ValueError, match=rf"train\.{part} must have .*is missing"):
        ParallelCorpus.open(tmp_path, "train")


def test_changed_bytes_are_found(tmp_path):
    build(tmp_path, pairs_of(20))
    for part in ("tokens", "lines"):
        path = tmp_path / f"train.{part}"
        whole = path.read_bytes()
        path.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
        with pytest.raises(ValueError, match=rf"train\.{part} is not as it was written"):
            ParallelCorpus.open(tmp_path, "train").verify()
        path.write_bytes(whole)
    path = tmp_path / "train.offsets"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ValueError, match=r"train\.offsets does not cut"):
        ParallelCorpus.open(tmp_path, "train")


def test_headers_that_are_not(tmp_path):
    build(tmp_path, pairs_of(20))
    path = tmp_path / "train.json"
    header = json.loads(path.read_text())
    del header["sha256"]  # so that each is told by what it says
    wrong = ["", "{", "[]", "null", "{}", "[" * 100_000, '{"format": 3}', "\ud800".encode("utf-8", "surrogatepass")]
    wrong += [json.dumps({key: value for key, value in header.items() if key != left_out}) for left_out in header]
    wrong += [json.dumps({**header, key: None}) for key in ("dtype", "pairs", "files", "report", "version")]
    wrong += [json.dumps({**header, "dtype": "object"}), json.dumps({**header, "pairs": 19})]
    accepted = []
    for text in wrong:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            ParallelCorpus.open(tmp_path, "train")
        except ValueError as error:
            assert "train.json cannot be opened" in str(error)  # noqa: PT017
        else:
            accepted.append(text)
    assert accepted == [json.dumps({key: value for key, value in header.items() if key != "limits"})]
    path.write_text(json.dumps({**header, "version": 2}))
    with pytest.raises(ValueError, match="version 2, and this reads version 1: build the corpus again"):
        ParallelCorpus.open(tmp_path, "train")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_damage_never_goes_unnoticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("corpus")
    build(folder, pairs_of(6))
    expected = [source.tolist() for source, _ in ParallelCorpus.open(folder, "train")]
    path = folder / f"train.{data.draw(st.sampled_from(['tokens', 'offsets', 'lines', 'json']))}"
    whole = path.read_bytes()
    begin = data.draw(st.integers(0, len(whole)))
    path.write_bytes(
        whole[:begin] + data.draw(st.binary(max_size=8)) + whole[data.draw(st.integers(begin, len(whole))) :]
    )
    try:
        corpus = ParallelCorpus.open(folder, "train")
        corpus.verify()
    except ValueError:
        return
    assert [source.tolist() for source, _ in corpus] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=12))
def test_random_bytes_as_text(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("text")
    lines = [(source.replace(b"\n", b" "), target.replace(b"\n", b" ")) for source, target in lines]
    for side, name in enumerate(("a.s", "a.t")):
        (folder / name).write_bytes(b"".join(line[side] + b"\n" for line in lines))
    pairs = read_pairs([folder / "a.s", folder / "a.t"])
    try:
        report = build(folder, pairs)
    except ValueError as error:
        assert "nothing is left" in str(error)  # noqa: PT017
        return
    assert report.read == len(lines) == report.kept + sum(report.skipped.values())
    corpus = ParallelCorpus.open(folder, "train")
    for line, (source, target) in zip(corpus.lines, corpus, strict=True):
        texts = [side.decode().removesuffix("\r") for side in lines[line - 1]]
        texts = [text.removeprefix("\ufeff") if line == 1 else text for text in texts]
        assert [source.tolist(), target.tolist()] == [letters().encode(text) for text in texts]


def test_other_vocabularies_are_noticed(tmp_path):
    build(tmp_path, pairs_of(5))
    corpus = ParallelCorpus.open(tmp_path, "train")
    corpus.check_vocabularies(letters(), letters())
    other = Vocabulary.train(["ab ba"] * 5, 9, kind="bpe")
    for vocabularies in ((other, letters()), (letters(), other)):
        with pytest.raises(ValueError, match="other vocabularies"):
            corpus.check_vocabularies(*vocabularies)


@pytest.mark.skipif(not (DATA / "multi30k").is_dir(), reason="shared/data/multi30k is not here")
def test_multi30k(tmp_path):
    names = [DATA / "multi30k" / f"val.{language}.xz" for language in ("en", "de")]
    pairs = list(read_pairs(names))
    vocabulary = Vocabulary.train((text for pair in pairs for text in pair[1:]), 1000, kind="bpe")
    report = build_corpus(pairs, tmp_path, "valid", vocabulary, vocabulary)
    assert report.kept == report.read == 1014
    corpus = ParallelCorpus.open(tmp_path, "valid")
    corpus.verify()
    for index in (0, 500, 1013):
        assert vocabulary.decode(corpus[index][0].tolist()) == pairs[index].source.strip()
        assert vocabulary.decode(corpus[index][1].tolist()) == pairs[index].target.strip()


def test_checksums_of_blocks_are_those_of_the_file(tmp_path, monkeypatch):
    for module in ("files", "data.indexed"):  # many blocks, and items that lie across them
        monkeypatch.setattr(f"tamis.{module}.BLOCK", 64)
    build(tmp_path, pairs_of(50))
    corpus = ParallelCorpus.open(tmp_path, "train")
    corpus.verify()
    tokens = (tmp_path / "train.tokens").read_bytes()
    header = json.loads((tmp_path / "train.json").read_text())
    expected = [zlib.crc32(tokens[start : start + 64]) for start in range(0, len(tokens), 64)]
    assert len(expected) > 5
    assert header["files"]["tokens"]["crc32"] == expected
    del header["files"]["tokens"]["crc32"], header["sha256"]  # as a corpus of before has it
    (tmp_path / "train.json").write_text(json.dumps(header))
    ParallelCorpus.open(tmp_path, "train").verify()
    (tmp_path / "train.tokens").write_bytes(tokens[:-1] + bytes([tokens[-1] ^ 1]))
    with pytest.raises(ValueError, match="is not as it was written"):
        ParallelCorpus.open(tmp_path, "train").verify()
