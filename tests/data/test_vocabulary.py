"""SentencePiece vocabularies: reproducible, with all specials, and with spans in the text as it was given."""

import gzip
import logging
import lzma
import random
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data.vocabulary import Vocabulary

SUBWORD = Path(__file__).resolve().parents[3] / "shared" / "data" / "subword"
BROUGHT = ("mistral-v1-32k.spm", "spm.de-en.bpe16k", "spm.ja-en.unigram16k")


def invented(count: int) -> list[str]:
    """Sentences of words made of syllables, and a few known ones."""
    draw = random.Random(0)
    syllables = [head + vowel + tail for head in "bdfgklmnrst" for vowel in "aeiou" for tail in ("", "l", "n", "s")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(400)]
    words += ["The", "the", "fine", "dog", "cat", "müller", "why", "Mexico", "jazz", "quiz", "house"]
    return [" ".join(draw.choices(words, k=draw.randint(3, 12))) + "." for _ in range(count)]


def wide(text: str) -> str:
    """The same in full-width letters, which NFKC makes narrow."""
    return "".join(chr(ord(character) + 0xFEE0) for character in text)


TEXTS = invented(200)
AWKWARD = [
    "the ﬁne dog",
    f"{wide('The')}\u3000{wide('dog')}",
    "two  spaces   and more",
    "   leading and trailing  ",
    "smile 🙂🙂 the 👩‍👩‍👧 dog",
    "e\u0301 ½ ﷺ \u2028 x\u00ad",
    "漢字 mixed 字",
    "",
    "   ",
    "\u0000\u0001 a",
]


@cache
def spelling() -> Vocabulary:
    """A vocabulary that can write any character, in bytes."""
    return Vocabulary.train(TEXTS, 370, byte_fallback=True)


@pytest.fixture(scope="module", params=["unigram", "bpe", "unigram-bytes", "bpe-bytes"])
def vocabulary(request):
    kind, _, fallback = request.param.partition("-")
    return Vocabulary.train(TEXTS, 370 if fallback else 90, kind=kind, byte_fallback=bool(fallback))


def brought(name):
    path = SUBWORD / f"{name}.model.xz"
    if not path.is_file():
        pytest.skip(f"shared/data/subword/{path.name} is not here")
    return path


def test_special_ids(vocabulary):
    assert vocabulary.specials == {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
    assert vocabulary.pieces([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert len(vocabulary) in (90, 370)
    assert len(set(vocabulary.pieces(range(len(vocabulary))))) == len(vocabulary)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_training_is_reproducible(kind):
    first, second = (Vocabulary.train(iter(TEXTS), 80, kind=kind) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != Vocabulary.train(TEXTS[:150], 80, kind=kind).fingerprint


def test_a_sample_of_many_sentences_is_reproducible():
    texts = TEXTS * 3
    first, second = (Vocabulary.train(iter(texts), 60, kind="bpe", max_sentences=100) for _ in range(2))
    assert first.fingerprint == second.fingerprint


def test_training_and_loading_print_nothing(tmp_path):
    Vocabulary.train(TEXTS, 80).save(tmp_path / "v.model")
    code = f"""if True:
        from tamis.data.vocabulary import Vocabulary
        v = Vocabulary.train({TEXTS[:60]!r}, 60)
        Vocabulary.load({str(tmp_path / "v.model")!r}).encode("the dog")
        for action in (lambda: Vocabulary(b"garbage"), lambda: Vocabulary.train(["a"], 9000)):
            try:
                action()
            except ValueError:
                pass
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match=r"9000 pieces from 200 sentences: .*too high.*<= \d+"):
        Vocabulary.train(TEXTS, 9000)
    with pytest.raises(ValueError, match=r"bpe vocabulary of 10 pieces .*smaller than required_chars"):
        Vocabulary.train(TEXTS, 10, kind="bpe")
    with pytest.raises(ValueError, match="more than its 4 special pieces, got a size of 4"):
        Vocabulary.train(TEXTS, 4)
    with pytest.raises(ValueError, match="no text"):
        Vocabulary.train([], 10)
    with pytest.raises(ValueError, match="one of unigram, bpe, got 'word'"):
        Vocabulary.train(TEXTS, 80, kind="word")
    with pytest.raises(ValueError, match=r"\[0\.98, 1\], got 0\.5"):
        Vocabulary.train(TEXTS, 80, character_coverage=0.5)


@pytest.mark.parametrize("texts", [["  ", "\t"], ["\u200b", "\x01"]])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_blank_text_is_no_text(texts, kind):
    with pytest.raises(ValueError, match="no text: 2 lines, all of them blank"):
        Vocabulary.train(texts, 10, kind=kind)


@pytest.mark.parametrize("joint", ["", "\x1c"])  # which Python takes for a space, and SentencePiece for nothing
def test_texts_with_an_endless_word_are_left_out(joint, caplog):
    """With them SentencePiece would abort the process."""
    endless = joint.join("ab" * 32768)
    with caplog.at_level(logging.WARNING, "tamis"):
        found = Vocabulary.train([*TEXTS, endless, f"the {endless} dog"], 80, kind="bpe")
    assert found.fingerprint == Vocabulary.train(TEXTS, 80, kind="bpe").fingerprint
    assert "2 texts have a word of over 65535 characters" in caplog.text


def test_long_texts_of_short_words_are_used(caplog):
    longest = "ab" * 32767 + "a"
    found = Vocabulary.train([*TEXTS, "zyz " * 20000, longest], 80, kind="bpe")
    assert found.fingerprint != Vocabulary.train(TEXTS, 80, kind="bpe").fingerprint
    assert not caplog.text


def test_what_the_texts_raise_is_raised():
    def texts():
        yield from TEXTS
        raise KeyError("from the reader")

    with pytest.raises(KeyError, match="from the reader"):
        Vocabulary.train(texts(), 80)
    with pytest.raises(TypeError, match="strings, got bytes"):
        Vocabulary.train([b"bytes"], 80)


def test_save_and_load(tmp_path, vocabulary):
    path = tmp_path / "folder" / "v.model"
    vocabulary.save(path)
    vocabulary.save(path)
    loaded = Vocabulary.load(path)
    assert loaded.fingerprint == vocabulary.fingerprint
    assert loaded.encode(TEXTS[5]) == vocabulary.encode(TEXTS[5])
    assert [entry.name for entry in path.parent.iterdir()] == ["v.model"]


def test_a_failed_save_leaves_the_old_file(tmp_path, vocabulary, monkeypatch):
    path = tmp_path / "v.model"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        vocabulary.save(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["v.model"]


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "text"])
def test_loading_what_is_not_a_model(tmp_path, damage):
    path = tmp_path / "bad.model"
    Vocabulary.train(TEXTS, 80).save(path)
    whole = path.read_bytes()
    data = {"garbage": bytes(range(256)), "empty": b"", "cut": whole[: len(whole) // 2], "text": b"hello\n" * 9}[damage]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.model is not a SentencePiece model"):
        Vocabulary.load(path)
    with pytest.raises(FileNotFoundError, match=r"gone\.model"):
        Vocabulary.load(tmp_path / "gone.model")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_crash_the_loader(data):
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Vocabulary(data)


def test_decoding_gives_the_normalised_text(vocabulary):
    for text in TEXTS[::17]:
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.decode(vocabulary.encode("  The ﬁne   dog ")) == "The fine dog"
    assert vocabulary.decode(vocabulary.encode("")) == ""


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("The dogfinsrzabm ﬁ  é" + wide("TheM")), max_size=30))
def test_decoding_agrees_with_unicode_nfkc(text):
    assert spelling().decode(spelling().encode(text)) == " ".join(unicodedata.normalize("NFKC", text).split())


def test_specials_are_not_text(vocabulary):
    ids = vocabulary.encode(TEXTS[0])
    assert vocabulary.decode([1, *ids, 2, 0, 0]) == TEXTS[0]
    assert not set(vocabulary.encode("<pad> <s> </s>")) & {0, 1, 2}
    for wrong in (-1, len(vocabulary)):
        with pytest.raises(ValueError, match=f"no id {wrong}"):
            vocabulary.decode([wrong])


def test_encode_batch_is_encode(vocabulary):
    texts = [*TEXTS[:20], *AWKWARD]
    assert [list(ids) for ids in vocabulary.encode_batch(texts)] == [vocabulary.encode(text) for text in texts]
    assert vocabulary.encode_batch([]) == []


def test_half_a_surrogate_pair_is_an_error(vocabulary):
    for action in (vocabulary.encode, vocabulary.spans, lambda text: vocabulary.encode_batch(["a", text])):
        with pytest.raises(ValueError, match="surrogate"):
            action("\ud83d")


def check_spans(vocabulary, text):
    ids, spans = vocabulary.spans(text)
    assert ids == vocabulary.encode(text)
    assert len(ids) == len(spans)
    position, covered = 0, set()
    for begin, end in spans:
        assert 0 <= begin <= end <= len(text)
        assert begin >= position
        position = begin
        assert text[begin:end] == text[begin:end].strip()
        covered.update(range(begin, end))
    return covered


@pytest.mark.parametrize("text", [*AWKWARD, *TEXTS[::50]])
def test_spans_lie_in_the_original_text(vocabulary, text):
    covered = check_spans(vocabulary, text)
    for place, character in enumerate(text):
        if not character.isspace() and unicodedata.category(character) not in ("Cc", "Cf"):
            assert place in covered, f"{character!r} belongs to no piece"


def test_spans_of_known_pieces(vocabulary):
    # Every word is found as the characters between the first and the last of its pieces, whatever normalisation did.
    for text, words in [
        ("the ﬁne  dog", [(0, 3), (4, 7), (9, 12)]),
        (f"  {wide('The')}\u3000dog ", [(2, 5), (6, 9)]),
        ("a 🙂 cat", [(0, 1), (2, 3), (4, 7)]),
    ]:
        ids, spans = vocabulary.spans(text)
        found: list[list[int]] = []
        for piece, (begin, end) in zip(vocabulary.pieces(ids), spans, strict=True):
            if piece.startswith("▁") or not found:
                found.append([begin, end])
            found[-1][1] = max(found[-1][1], end)
        assert [tuple(word) for word in found] == words


def test_every_byte_of_a_character_has_the_character():
    ids, spans = spelling().spans("x🙂🙃y")
    by_bytes = [span for piece, span in zip(spelling().pieces(ids), spans, strict=True) if piece.startswith("<0x")]
    assert by_bytes[-8:] == [(1, 2)] * 4 + [(2, 3)] * 4


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_spans_of_any_text(text):
    check_spans(spelling(), text)


@pytest.mark.parametrize("name", BROUGHT)
def test_brought_models_keep_their_ids(name, tmp_path):
    path = brought(name)
    vocabulary = Vocabulary.load(path)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=lzma.decompress(path.read_bytes()))
    for special, number in vocabulary.specials.items():
        assert number == getattr(oracle, f"{special}_id")() or number >= oracle.vocab_size()
    assert len(set(vocabulary.specials.values())) == 4
    for text in (*TEXTS[:3], *AWKWARD):
        assert vocabulary.encode(text) == oracle.encode(text)
        assert vocabulary.decode(oracle.encode(text)) == oracle.decode(oracle.encode(text))
        check_spans(vocabulary, text)


def test_a_model_without_padding_gets_it_after_its_pieces(tmp_path):
    vocabulary = Vocabulary.load(brought("mistral-v1-32k.spm"))
    assert vocabulary.specials == {"pad": 32000, "bos": 1, "eos": 2, "unk": 0}
    assert len(vocabulary) == 32001
    assert vocabulary.pieces([32000]) == ["<pad>"]
    assert vocabulary.decode([1, *vocabulary.encode("the dog"), 2, 32000]) == "the dog"


def test_a_model_without_any_specials(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "bare"), vocab_size=60, minloglevel=2,
        bos_id=-1, eos_id=-1, unk_id=0,
    )  # fmt: skip
    vocabulary = Vocabulary.load(tmp_path / "bare.model")
    assert vocabulary.specials == {"pad": 60, "bos": 61, "eos": 62, "unk": 0}
    assert len(vocabulary) == 63
    assert vocabulary.pieces([60, 61, 62]) == ["<pad>", "<s>", "</s>"]
    assert vocabulary.decode([61, *vocabulary.encode("the dog"), 62, 60]) == "the dog"


def test_a_file_too_large_for_a_vocabulary_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.data.vocabulary.LARGEST", 1 << 20)
    with gzip.open(tmp_path / "x.model.gz", "wb") as file:  # a few kilobytes that become more
        file.write(bytes((1 << 20) + 1))
    with pytest.raises(ValueError, match=r"x\.model\.gz is no vocabulary: it holds more than 1 MB"):
        Vocabulary.load(tmp_path / "x.model.gz")


def test_words_beyond_what_can_be_learned_are_the_reason():
    with pytest.raises(ValueError, match="no text: not a line without a word of over 65,535 characters"):
        Vocabulary.train(["x" * 70_000], 20)
