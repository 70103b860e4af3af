"""Preparing once: what is there is used if it is whole, and built by one process at a time."""

import dataclasses
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tamis.data.grammar import generate
from tamis.data.prepare import DataConfig, TextConfig, VocabularyConfig, prepare, prepare_text, untracked
from tamis.data.vocabulary import Vocabulary

SMALL = VocabularyConfig(size=150, kind="bpe")


def silent(text: str) -> None:
    pass


def text_files(folder: Path, twice: bool = False) -> DataConfig:
    """Some lines of the embedded corpus as files; if `twice`, the target is the source."""
    for split, count in (("train", 120), ("valid", 10)):
        examples = generate(count, split)
        sides = [example.source_text for example in examples], [example.target_text for example in examples]
        for name, lines in zip(("a", "b"), (sides[0], sides[0]) if twice else sides, strict=True):
            (folder / f"{split}.{name}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return DataConfig(
        train=[str(folder / "train.a"), str(folder / "train.b")],
        valid=[str(folder / "valid.a"), str(folder / "valid.b")],
    )


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return text_files(tmp_path)


def test_equal_vocabularies_are_one_at_every_call(tmp_path: Path):
    data = text_files(tmp_path, twice=True)
    for _ in range(2):
        found = prepare(data, VocabularyConfig(size=120, kind="bpe", shared=False), tmp_path / "data", silent)
        assert found.source_vocabulary is found.target_vocabulary


def test_of_many_at_the_same_time_one_builds(data: DataConfig, tmp_path: Path):
    said: list[str] = []
    found: list[str] = []

    def call() -> None:
        found.append(prepare(data, SMALL, tmp_path / "data", said.append).source_vocabulary.fingerprint)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sum("learning a vocabulary" in text for text in said) == 1


def foreign_id(folder: Path) -> None:
    """An id that the vocabulary has not, in a file of the right size."""
    tokens = np.memmap(folder / "train.tokens", "<u2", "r+")
    tokens[7] = 60_000
    tokens.flush()


def other_vocabulary(folder: Path) -> None:
    Vocabulary.train(["some other text"], 20, kind="bpe").save(folder / "vocabulary.model")


def changed(name: str, change: Callable[[np.ndarray], np.ndarray], dtype: str, folder: Path) -> None:
    """The same size, other contents."""
    path = folder / name
    path.write_bytes(change(np.frombuffer(path.read_bytes(), dtype)).astype(dtype).tobytes())


def moved_by_one(offsets: np.ndarray) -> np.ndarray:
    """Items of the same number that begin elsewhere."""
    widest = int(np.diff(offsets[:-1]).argmax())
    return np.concatenate([offsets[: widest + 1], offsets[widest + 1 : -1] - 1, offsets[-1:]])


def one_bit(content: np.ndarray) -> np.ndarray:
    content = content.copy()
    content[len(content) // 2] ^= 4
    return content


def another_fingerprint(folder: Path) -> None:
    """A header in which one digit of a hash is another: what it says of its content is not true."""
    path = folder / "train.json"
    header = json.loads(path.read_text())
    first = header["files"]["tokens"]["sha256"]
    header["files"]["tokens"]["sha256"] = ("1" if first[0] == "0" else "0") + first[1:]
    path.write_text(json.dumps(header))


@pytest.mark.parametrize(
    "damage",
    [
        foreign_id,
        other_vocabulary,
        lambda folder: (folder / "vocabulary.model").write_bytes(b"garbage"),
        lambda folder: (folder / "vocabulary.model").unlink(),
        lambda folder: (folder / "valid.json").unlink(),
        lambda folder: (folder / "train.json").write_text("[" * 100_000),
        lambda folder: (folder / "train.tokens").write_bytes(b""),
        lambda folder: (folder / "valid.offsets").unlink(),
        partial(changed, "train.tokens", lambda tokens: tokens * 0 + 7, "<u2"),
        partial(changed, "train.offsets", moved_by_one, "<i8"),
        partial(changed, "valid.lines", lambda lines: lines + 1, "<i8"),
        *(partial(changed, f"train.{part}", one_bit, "u1") for part in ("tokens", "lines")),
        another_fingerprint,
    ],
    ids=[
        *("id", "other vocabulary", "vocabulary", "no vocabulary", "no header", "header", "tokens", "no offsets"),
        *("one token", "offsets", "lines", "a bit of the tokens", "a bit of the lines"),
        "a digit of the header",
    ],
)
def test_what_is_damaged_is_built_again(data: DataConfig, tmp_path: Path, damage):
    folder = tmp_path / "data"
    before = prepare(data, SMALL, folder, silent)
    expected = [ids.tolist() for pair in before.corpus("train") for ids in pair]
    damage(folder)
    said: list[str] = []
    after = prepare(data, SMALL, folder, said.append)
    assert said[0].startswith(f"{folder} is damaged and is built again: ")
    assert [ids.tolist() for pair in after.corpus("train") for ids in pair] == expected
    assert (
        prepare(data, SMALL, folder, pytest.fail).source_vocabulary.fingerprint == after.source_vocabulary.fingerprint
    )


def test_a_missing_text_costs_nothing_that_is_there(data: DataConfig, tmp_path: Path):
    folder = tmp_path / "data"
    prepare(data, SMALL, folder, silent)
    text = Path(data.valid[1]).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"valid\.b does not exist"):
        prepare(data, SMALL, folder, silent)
    text.rename(data.valid[1])
    with pytest.raises(FileNotFoundError, match=r"none\.model does not exist"):
        prepare(data, VocabularyConfig(model=str(tmp_path / "none.model")), folder, silent)
    with pytest.raises(ValueError, match=r"named \*\.tsv or \*\.jsonl"):
        prepare(dataclasses.replace(data, valid="valid.a"), SMALL, folder, silent)
    prepare(data, SMALL, folder, pytest.fail)


def test_a_corpus_of_other_vocabularies_does_not_open(data: DataConfig, tmp_path: Path):
    prepared = prepare(data, SMALL, tmp_path / "data", silent)
    prepare(data, VocabularyConfig(size=140, kind="bpe"), tmp_path / "data", silent)
    with pytest.raises(ValueError, match="encoded with other vocabularies"):
        prepared.corpus("train")


def test_texts_that_cannot_be_read_are_told_with_the_reason(data: DataConfig, tmp_path: Path):
    for name in ("train.a", "train.b"):
        (tmp_path / name).write_bytes(b"\xff\xfe\n" * 7)
    with pytest.raises(ValueError, match=r"train\.a.* can be read: 7 times source: invalid UTF-8, in line 1 first"):
        prepare(data, SMALL, tmp_path / "data", silent)


def test_documents_that_cannot_be_read_are_told_with_the_reason(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\nnot JSON\nnor this\n')
    text = TextConfig(train=str(tmp_path / "rows.jsonl"), valid="grammar:valid:10", length=40)
    reasons = r"rows\.jsonl: no text under 'text', in line 1 first; 2 times .*rows\.jsonl: not JSON, in line 2 first"
    with pytest.raises(ValueError, match=f"rows.jsonl can be read: 1 times .*{reasons}"):
        prepare_text(text, SMALL, tmp_path / "data", silent)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.txt can be read: it is empty"):
        prepare_text(dataclasses.replace(text, train=str(tmp_path / "empty.txt")), SMALL, tmp_path / "data", silent)


@pytest.mark.parametrize("change", [{"train": ["/dev/zero", "/dev/zero"]}, {"model": "/dev/zero"}])
def test_what_has_no_end_is_refused(data: DataConfig, tmp_path: Path, change):
    named = VocabularyConfig(**change) if "model" in change else SMALL
    with pytest.raises(ValueError, match="/dev/zero is a device, not a file"):
        prepare(data if "model" in change else dataclasses.replace(data, **change), named, tmp_path / "data", silent)


def test_a_vocabulary_has_a_largest_size():
    with pytest.raises(ValueError, match="size must be an int of at most 16777216, got 2000000000"):
        VocabularyConfig(size=2_000_000_000)


def test_encoding_knows_how_much_there_is_once_a_vocabulary_was_learned(data: DataConfig, tmp_path: Path):
    found: dict[str, int | None] = {}

    def track(what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        found[what] = total
        return untracked(what, total)

    made = prepare(data, SMALL, tmp_path / "data", silent, track)
    assert found == {"encoding train": made.corpus("train").report.read, "encoding valid": None}
