"""Documents from files of every kind, and their indexed form."""

import gzip
import json
import lzma

import pytest

from tamis.data.corpus import ParallelCorpus
from tamis.data.documents import (
    EMPTY,
    GRAMMAR_SENTENCES,
    Document,
    DocumentCorpus,
    build_documents,
    check_division,
    read_documents,
    text_files,
)
from tamis.data.text import LONGEST_LINE, BadLine
from tamis.data.vocabulary import Vocabulary

TEXT = "one a\none b\n\ntwo a\n\n\n two b\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text(TEXT)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zero\r\n"))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress("drei\nü\n".encode()))
    return tmp_path


def lines(*arguments, **options):
    return [document.lines for document in read_documents(*arguments, **options)]


@pytest.mark.parametrize(
    ("division", "expected"),
    [
        ("file", [["one a", "one b", "", "two a", "", "", " two b"]]),
        ("blank", [["one a", "one b"], ["two a"], [" two b"]]),
        ("line", [["one a"], ["one b"], ["two a"], [" two b"]]),
        ("start:a$", [["one a", "one b", ""], ["two a", "", "", " two b"]]),
    ],
)
def test_plain_text_is_divided(folder, division, expected):
    found = lines(str(folder / "b.txt"), division)
    assert [[line for line in document if line] for document in found] == [
        [line for line in document if line] for document in expected
    ]


def test_a_file_a_document_from_a_pattern_a_folder_or_a_list(folder):
    expected = ["zero", "one a", "drei"]
    names = [str(folder / name) for name in ("a.txt.gz", "b.txt", "c.txt.xz")]
    for spec in (str(folder), f"{folder}/*.txt*", names):
        found = list(read_documents(spec))
        assert [document.number for document in found] == [1, 2, 3]
        assert [document.lines[0] for document in found] == expected


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_json_lines(tmp_path, suffix):
    novel = "word " * (LONGEST_LINE // 2)  # longer than any line of plain text may be
    rows = [{"body": "a\nb"}, {"text": "other"}, {"body": novel}]
    raw = ("".join(json.dumps(row) + "\n" for row in rows) + "no json\n").encode()
    packed = {"": lambda x: x, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](raw)
    path = tmp_path / f"d.jsonl{suffix}"
    path.write_bytes(packed)
    found = list(read_documents(str(path), key="body"))
    assert found[0] == Document(1, ["a", "b"])
    assert found[2] == Document(2, [novel])
    assert [(item.line, item.reason.split(": ")[-1]) for item in found if isinstance(item, BadLine)] == [
        (2, "no text under 'body'"), (4, "not JSON"),
    ]  # fmt: skip
    assert str(path) in found[1].reason


def test_a_bad_line_costs_one_line(tmp_path):
    (tmp_path / "x").write_bytes(b"a\n\xff\nb\n")
    bad, document = read_documents(str(tmp_path / "x"))
    assert document.lines == ["a", "b"]
    assert bad == BadLine(2, f"{tmp_path / 'x'}: invalid UTF-8")


def test_the_embedded_corpus(tmp_path):
    found = list(read_documents("grammar:train:20"))
    assert [len(document.lines) for document in found] == [GRAMMAR_SENTENCES, GRAMMAR_SENTENCES, 4]


@pytest.mark.parametrize(
    ("spec", "message"),
    [("none", "none does not exist"), ("none/*.txt", "no file matches none/*.txt"), ([], "got none")],
)
def test_what_is_not_there(spec, message):
    with pytest.raises(FileNotFoundError, match=message.replace("*", r"\*")):
        text_files(spec)


def test_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no files"):
        read_documents(str(tmp_path))


@pytest.mark.parametrize(
    ("division", "message"),
    [("page", 'one of "file", "blank", "line"'), ("start:(", "no regular expression"), (3, "3")],
)
def test_bad_divisions(division, message):
    with pytest.raises(ValueError, match=message):
        check_division(division)


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(["one two three", "a b c d e"] * 3, 24, kind="bpe")


def test_the_indexed_form_holds_the_ids(vocabulary, tmp_path):
    documents = [
        Document(1, ["one two", "", "three"]),
        BadLine(7, "torn"),
        Document(2, [" ", ""]),
        Document(3, ["a b"]),
    ]
    report = build_documents(iter(documents), tmp_path, "train", vocabulary)
    assert (report.read, report.kept, report.skipped) == (3, 2, {"torn": 1, EMPTY: 1})
    assert "2 of 3 documents kept" in report.describe()
    corpus = DocumentCorpus.open(tmp_path, "train")
    assert corpus.lines.tolist() == [1, 3]
    assert corpus[0].tolist() == vocabulary.encode("one two") + vocabulary.encode("three")
    assert corpus[-1].tolist() == vocabulary.encode("a b")
    assert corpus.lengths.tolist() == [len(corpus[0]), len(corpus[1])]
    corpus.verify()
    corpus.check_fingerprints(vocabulary.fingerprint)
    with pytest.raises(ValueError, match="other vocabularies"):
        corpus.check_fingerprints("another")
    with pytest.raises(IndexError, match="2 documents has no document 2"):
        corpus[2]
    with pytest.raises(ValueError, match="not the header of a parallel corpus"):
        ParallelCorpus.open(tmp_path, "train")


def test_many_documents_are_encoded_in_chunks(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.data.documents.CHUNK", 3)
    texts = [["a"] * (1 + number % 4) for number in range(10)]
    build_documents((Document(n, text) for n, text in enumerate(texts, 1)), tmp_path, "x", vocabulary)
    corpus = DocumentCorpus.open(tmp_path, "x")
    assert [corpus[n].tolist() for n in range(10)] == [vocabulary.encode("a") * len(text) for text in texts]


def test_nothing_is_left(vocabulary, tmp_path):
    with pytest.raises(ValueError, match="nothing is left for the split 'x': 0 of 1 documents kept"):
        build_documents([Document(1, [""])], tmp_path, "x", vocabulary)
