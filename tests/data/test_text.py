"""Every line comes out once, as a pair or as a line that could not be read."""

import gzip
import lzma
import sys
import tracemalloc
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data.text import LONGEST_LINE, BadLine, Pair, read_lines, read_pairs

MULTI30K = Path(__file__).resolve().parents[3] / "shared" / "data" / "multi30k"
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](data))
    return path


@pytest.mark.parametrize("packing", PACK)
def test_two_files(tmp_path, packing):
    source = write(tmp_path, "a.en" + packing, b"one\ntwo\n\nfour")
    target = write(tmp_path, "a.de" + packing, b"eins\nzwei\ndrei\nvier\n")
    expected = [Pair(1, "one", "eins"), Pair(2, "two", "zwei"), Pair(3, "", "drei"), Pair(4, "four", "vier")]
    assert list(read_pairs([str(source), target])) == expected


@pytest.mark.parametrize("packing", PACK)
def test_tsv(tmp_path, packing):
    path = write(tmp_path, "a.tsv" + packing, b'a\tb\n"q\tr"\textra\nalone\n\t\n')
    pairs = list(read_pairs(path))
    assert pairs == [Pair(1, "a", "b"), Pair(2, '"q', 'r"'), BadLine(3, "fewer than two columns"), Pair(4, "", "")]
    assert pairs == list(read_pairs([path]))


@pytest.mark.parametrize("packing", PACK)
def test_jsonl(tmp_path, packing):
    rows = [
        '{"en": "a\\nb", "de": "ü"}',
        '{"translation": {"en": "c", "de": "d"}, "id": 3}',
        '{"en": "only"}',
        '{"en": 3, "de": "x"}',
        "[1]",
        "{",
        '{"en": "\\ud800", "de": "x"}',
        "[" * 100_000,
    ]
    path = write(tmp_path, "a.jsonl" + packing, "\n".join(rows).encode())
    assert list(read_pairs(path, "en", "de")) == [
        Pair(1, "a\nb", "ü"),
        Pair(2, "c", "d"),
        BadLine(3, "no text under 'de'"),
        BadLine(4, "no text under 'en'"),
        BadLine(5, "no text under 'en'"),
        BadLine(6, "not JSON"),
        BadLine(7, "invalid UTF-8"),
        BadLine(8, "not JSON"),
    ]


def test_only_newlines_end_lines(tmp_path):
    text = "a\u2028b\n\x0bc\x0c\x1c\x85\nd\re\n"
    path = write(tmp_path, "a.txt", text.encode())
    assert list(read_lines(path)) == ["a\u2028b", "\x0bc\x0c\x1c\x85", "d\re"]


def test_byte_order_mark_and_carriage_returns(tmp_path):
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\xef\xbb\xbfthree\r\n")
    assert list(read_lines(path)) == ["one", "two", "\ufeffthree"]
    assert list(read_lines(write(tmp_path, "b.txt", b"\xef\xbb\xbf"))) == [""]


def test_bad_lines_are_numbered_and_the_others_survive(tmp_path):
    source = write(tmp_path, "a.en", b"one\n\xff\xfe\nthree\nfour\n")
    target = write(tmp_path, "a.de", b"eins\nzwei\n\xc3\nvier\n")
    assert list(read_pairs([source, target])) == [
        Pair(1, "one", "eins"),
        BadLine(2, "source: invalid UTF-8"),
        BadLine(3, "target: invalid UTF-8"),
        Pair(4, "four", "vier"),
    ]
    with pytest.raises(ValueError, match=r"a\.en, line 2: invalid UTF-8"):
        list(read_lines(source))


def test_an_overlong_line_is_one_bad_line(tmp_path):
    exact = b"x" * (LONGEST_LINE - 1)
    data = b"a\n" + exact + b"\n" + b"y" * (3 * LONGEST_LINE) + b"\nb\n" + b"z" * LONGEST_LINE
    path = write(tmp_path, "a.tsv", data.replace(b"a\n", b"a\tb\n").replace(b"\nb\n", b"\nc\td\n"))
    bad = f"line over {LONGEST_LINE} bytes"
    few = "fewer than two columns"
    assert list(read_pairs(path)) == [
        Pair(1, "a", "b"), BadLine(2, few), BadLine(3, bad), Pair(4, "c", "d"), BadLine(5, bad)
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [(2, 5), (5, 2), (0, 1)])
def test_unequal_files_are_an_error_with_both_counts(tmp_path, counts):
    paths = [write(tmp_path, f"a.{side}.gz", b"x\n" * count) for side, count in zip("st", counts, strict=True)]
    with pytest.raises(ValueError, match=rf"a\.s\.gz has {counts[0]} lines and .*a\.t\.gz has {counts[1]}"):
        list(read_pairs(paths))


def test_missing_files_and_folders(tmp_path):
    there = write(tmp_path, "a", b"x\n")
    with pytest.raises(FileNotFoundError, match=r"gone\.de does not exist"):
        read_pairs([there, tmp_path / "gone.de"])
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_pairs([there, tmp_path])
    with pytest.raises(ValueError, match=r"\*\.tsv or \*\.jsonl"):
        read_pairs(there)
    with pytest.raises(ValueError, match="one path or two, got 3"):
        read_pairs([there] * 3)


@pytest.mark.parametrize("packing", [".gz", ".xz"])
def test_a_damaged_archive_is_named(tmp_path, packing):
    text = "".join(f"line {number * 7919 % 1000}\n" for number in range(2000)).encode()
    whole = PACK[packing](text)
    damaged = [whole[:cut] for cut in (0, 1, 5, 20, len(whole) // 2, len(whole) - 1)]
    damaged += [b"garbage" * 10, whole[:40] + bytes(8) + whole[48:]]
    for data in damaged:
        path = tmp_path / f"a{packing}"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"a\{packing} is"):
            list(read_lines(path))


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = write(tmp_path, "a.gz", b"some words in a line of text\n" * 100_000)
    tracemalloc.start()
    count = sum(1 for _ in read_pairs([path, path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 100_000
    assert peak < 4 << 20


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_without_loss(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.jsonl").write_bytes(data)
    (folder / "a.tsv").write_bytes(data)
    count = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    for spec in (folder / "a.tsv", folder / "a.jsonl", [folder / "a.tsv", folder / "a.jsonl"]):
        assert [item.line for item in read_pairs(spec)] == list(range(1, count + 1))


def test_hugging_face_datasets(monkeypatch):
    calls = []

    def load_dataset(*names, split, streaming):
        calls.append((names, split, streaming))
        return iter([{"translation": {"en": "a", "de": "b"}}, {"en": "c", "de": "d"}, {"en": None, "de": "d"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    expected = [Pair(1, "a", "b"), Pair(2, "c", "d"), BadLine(3, "no text under 'en'")]
    assert list(read_pairs("hf:owner/name:train", "en", "de")) == expected
    assert list(read_pairs("hf:wmt14:de-en:test", "en", "de")) == expected
    assert calls == [(("owner/name",), "train", True), (("wmt14", "de-en"), "test", True)]
    with pytest.raises(ValueError, match="hf:NAME:SPLIT"):
        read_pairs("hf:wmt14")


def test_hugging_face_datasets_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        read_pairs("hf:wmt14:de-en:test", "en", "de")


def test_the_embedded_corpus():
    pairs = list(read_pairs("grammar:train:20"))
    assert [pair.line for pair in pairs] == list(range(1, 21))
    assert all(pair.source and pair.target for pair in pairs)
    assert pairs == list(read_pairs("grammar:train:20:0")) != list(read_pairs("grammar:train:20:1"))
    for spec in ("grammar:train", "grammar:train:many", "grammar:train:3:1:2"):
        with pytest.raises(ValueError, match="grammar:SPLIT:COUNT"):
            read_pairs(spec)


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="shared/data/multi30k is not here")
def test_multi30k():
    pairs = list(read_pairs([MULTI30K / "val.en.xz", MULTI30K / "val.de.xz"]))
    assert len(pairs) == 1014
    assert all(isinstance(pair, Pair) and pair.source and pair.target for pair in pairs)
    assert pairs[0].source == "A group of men are loading cotton onto a truck"
