import pytest
import torch

from tamis.data.passkey import FILLER, NEEDLE, QUESTION, PasskeyText
from tamis.data.tasks import stream
from tamis.data.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([FILLER, QUESTION, *NEEDLE, "0 1 2 3 4 5 6 7 8 9"] * 5, 100, kind="bpe")


@pytest.fixture(scope="module")
def passkeys(vocabulary):
    return PasskeyText(vocabulary, 5)


def test_it_reads_as_it_should(passkeys, vocabulary):
    text = vocabulary.decode(passkeys.prompt(150, [4, 0, 7, 1, 3], 0.5))
    assert "The pass key is 4 0 7 1 3" in text
    assert "4 0 7 1 3 is the pass key." in text
    assert text.startswith("The grass is green. The sky is blue.")
    assert text.endswith("What is the pass key? The pass key is")


@pytest.mark.parametrize("length", [120, 121, 500])
def test_lengths_are_exact_and_depth_is_where_the_number_stands(passkeys, vocabulary, length):
    places = []
    for depth in (0.0, 0.3, 1.0):
        prompt = passkeys.prompt(length, [9, 9, 8, 7, 6], depth)
        assert len(prompt) == length
        assert prompt[0] == vocabulary.bos_id
        answer = passkeys.answer([9, 9, 8, 7, 6])
        places.append(next(i for i in range(length) if prompt[i : i + len(answer)] == answer))
    assert places[0] < places[1] < places[2]
    assert places[1] == pytest.approx(0.7 * places[0] + 0.3 * places[2], abs=1)


def test_documents_are_drawn_from_their_stream(passkeys, vocabulary):
    first, again, other = (passkeys.document(200, stream("x", seed)) for seed in (1, 1, 2))
    assert first == again != other
    for document in (first, other):
        assert len(document) == 200
        assert document[-1] == vocabulary.eos_id
        answer = document[-passkeys.longest_answer - 1 : -1]
        assert sum(document[i : i + len(answer)] == answer for i in range(200)) == 3
    assert len(passkeys.document(passkeys.shortest, stream("x", 3))) == passkeys.shortest


def test_no_number_of_a_test_was_trained_on(vocabulary):
    passkeys = PasskeyText(vocabulary, 2)
    generator = torch.Generator().manual_seed(0)
    found = {
        split: {tuple(key) for _ in range(60) for key in passkeys.draw(generator, split, 5)}
        for split in ("train", "test")
    }
    assert not found["train"] & found["test"]
    assert len(found["train"]) > 30
    assert len(found["test"]) > 15


def test_candidates_differ(passkeys):
    keys = passkeys.draw(stream(0), "test", 10)
    assert len({tuple(key) for key in keys}) == 10


def test_too_few_numbers(vocabulary):
    with pytest.raises(ValueError, match="no 10 different numbers of 1 digits for test"):
        PasskeyText(vocabulary, 1).draw(stream(0), "test", 10)


def test_too_short_a_text(passkeys):
    with pytest.raises(ValueError, match="a pass key and its question take"):
        passkeys.prompt(10, [1, 2, 3, 4, 5], 0.5)


def test_a_vocabulary_without_digits():
    words = Vocabulary.train([FILLER] * 5, 40, kind="bpe")
    with pytest.raises(ValueError, match=r"cannot spell 0, 1, 2.*byte_fallback = true"):
        PasskeyText(words)
