"""Vocabularies of large alphabets: what is chosen, what is said, and where words stand in texts without spaces."""

import lzma
import random
from collections import Counter
from pathlib import Path

import pytest

from tamis.data.alphabet import alphabet_size, count_characters, scripts, scripts_differ
from tamis.data.prepare import DataConfig, TextConfig, VocabularyConfig, prepare, prepare_text
from tamis.decoding.alignment import words_of

KFTT = Path("/work/shared/data/align-gold")
GERMAN = ["Der alte Mann liest eine Zeitung.", "Über Größe läßt sich streiten: ja, nein, vielleicht!"]
RUSSIAN = ["Старик читает газету.", "Мы читаем книги."]


def characters(count, start=0x4E00):
    return [chr(start + number) for number in range(count)]


def test_the_size_of_an_alphabet_is_what_it_takes_to_cover_the_text():
    counts = Counter({"a": 9990, "b": 5, "c": 4, "x": 1})
    assert alphabet_size(counts) == 2
    assert alphabet_size(count_characters(GERMAN)) < 60
    assert alphabet_size(count_characters(["".join(characters(2000))])) == 1999
    assert alphabet_size(Counter()) == 0


def test_scripts():
    assert scripts(count_characters(["ab Жд 12.,"])) == {"LATIN": 0.5, "CYRILLIC": 0.5}
    assert scripts_differ(count_characters(GERMAN), count_characters(RUSSIAN))
    assert not scripts_differ(count_characters(GERMAN), count_characters(["The old man reads."]))
    assert not scripts_differ(count_characters(["1 2 3"]), count_characters(GERMAN))  # nothing to tell by


def parallel(folder, pairs):
    for side, name in enumerate(("source", "target")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    names = [str(folder / "source"), str(folder / "target")]
    return DataConfig(train=names, valid=names)


def test_german_and_english_have_what_they_always_had(tmp_path):
    said: list[str] = []
    data = parallel(tmp_path, [(text, text.lower()) for text in GERMAN] * 20)
    found = prepare(data, VocabularyConfig(size=50), tmp_path / "a", said.append)
    assert found.source_vocabulary is found.target_vocabulary
    same = VocabularyConfig(size=50, shared=True, character_coverage=1.0, byte_fallback=False)
    again = prepare(data, same, tmp_path / "b", lambda text: None)
    assert again.source_vocabulary.fingerprint == found.source_vocabulary.fingerprint
    assert said[0] == "learning a vocabulary of 50 subwords"


def test_a_large_alphabet_and_another_script(tmp_path):
    """Every character comes about as often as the others, but for one; no two stand together twice."""
    many = characters(600)
    draw = random.Random(0)
    pairs = [
        ("".join(draw.choices(many, k=4)), " ".join("".join(draw.choices("kmptsraeiou", k=5)) for _ in range(3)))
        for _ in range(1800)
    ]
    said: list[str] = []
    config = VocabularyConfig(size=900, kind="bpe")
    found = prepare(parallel(tmp_path, [*pairs, ("鬱", "x")]), config, tmp_path / "a", said.append)
    assert found.source_vocabulary is not found.target_vocabulary
    text = "\n".join(said)
    assert "different scripts: each has a vocabulary of its own (vocabulary.shared)" in text
    assert "vocabulary.character_coverage = 0.9995, byte_fallback = true" in text
    assert "are single characters, so sentences become long: raise vocabulary.size = 900" in text
    ids = found.source_vocabulary.encode("\U0001f642")
    assert found.source_vocabulary.unk_id not in ids  # spelled in bytes
    assert found.target_vocabulary.unk_id in found.target_vocabulary.encode("日")  # whose alphabet is small


def test_what_is_said_wins(tmp_path):
    many = characters(550)
    (tmp_path / "t.txt").write_text("\n".join(f"{a}{b}" for a, b in zip(many, reversed(many), strict=True)) * 3)
    text = TextConfig(train=str(tmp_path / "t.txt"), valid=str(tmp_path / "t.txt"), documents="line")
    said: list[str] = []
    config = VocabularyConfig(size=560, kind="bpe", character_coverage=1.0, byte_fallback=False)
    prepare_text(text, config, tmp_path / "a", said.append)
    assert said[0] == "learning a vocabulary of 560 subwords"
    assert "lower vocabulary.character_coverage = 1 with byte_fallback = true" in said[1]


def test_dropped_lines_name_threshold_setting_and_an_example(tmp_path):
    data = parallel(tmp_path, [("ab ab", "ab ab")] * 50 + [("ab " * 40, "ab")])
    said: list[str] = []
    prepare(data, VocabularyConfig(size=9), tmp_path / "a", said.append)
    (report,) = [text for text in said if text.startswith("train")]
    assert "1 left out, length ratio: line 51" in report
    assert "data.max_ratio = 4; line 51 has " in report
    assert "subwords: ab ab ab" in report
    assert "... | ab" in report


@pytest.mark.skipif(not KFTT.is_dir(), reason="the alignments of KFTT are not here")
def test_japanese_with_default_settings_keeps_its_pairs(tmp_path):
    rows = []
    for split in ("dev", "test"):
        with lzma.open(KFTT / f"ja-en.kftt.{split}.tsv.xz", "rt", encoding="utf-8") as file:
            rows += [line.split("\t")[:2] for line in file]
    data = parallel(tmp_path, [(source.replace(" ", ""), target) for source, target in rows])
    found = prepare(data, VocabularyConfig(size=3000), tmp_path / "a", lambda text: None)
    report = found.corpus("train").report
    assert report.kept / report.read > 0.99


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the old  man.", ["the", "old", "man."]),
        ("私は本を2冊 読んだ。", ["私", "は", "本", "を", "2", "冊", "読", "ん", "だ", "。"]),
        ("か\u3099き", ["か\u3099", "き"]),  # a mark belongs to what it marks
        ("ไปที่", ["ไ", "ป", "ที่"]),
        ("한국어 문장", ["한국어", "문장"]),  # Korean has spaces
        ("", []),
    ],
)
def test_where_words_stand(text, words):
    assert [text[begin:end] for begin, end in words_of(text)] == words
