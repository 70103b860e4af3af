"""Words from pieces, and batches that say what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from analysis.cases import batches, tokens
from tamis.analysis import Sentences, Tokens, describe_tokens
from tamis.analysis.tokens import word_numbers
from tamis.data.batching import Batch
from tamis.data.vocabulary import Vocabulary

TEXTS = ["Why does the old dog bark?", "The dogs bark, the cat sleeps.", "Who is sleeping now?"] * 10


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(TEXTS, 60, kind="bpe")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ("▁the ▁do g s", [0, 1, 1, 1]),
        ("▁dog . ▁A", [0, 1, 2]),  # a full stop is no part of the word before it
        ("▁( a )", [0, 1, 2]),
        ("▁don ' t", [0, 1, 2]),
        ("▁a ... ? !", [0, 1, 1, 1]),  # punctuation together is one
        ("▁ dog ▁ ?", [0, 0, 1, 1]),  # a space alone belongs to what follows
        ("- ▁a - b", [-1, 0, -1, 1]),  # "-" stands for a special token here
        ("", []),
    ],
)
def test_words_of_pieces(pieces, expected):
    assert word_numbers([None if piece == "-" else piece for piece in pieces.split()]) == expected


def test_tokens_of_a_sentence(vocabulary):
    ids = vocabulary.encode("Who barks?")
    row = [vocabulary.bos_id, *ids, vocabulary.eos_id, vocabulary.pad_id]
    found = describe_tokens(torch.tensor([row]), vocabulary, "en")
    assert found.mask.tolist() == [[True] * (len(row) - 1) + [False]]
    words = found.words[0].tolist()
    assert words[0] == words[-1] == words[-2] == -1
    assert sorted(set(words)) == [-1, 0, 1, 2]
    assert found.interrogative[0].tolist() == [number == 0 for number in words]
    assert found.question[0].tolist() == [number == 2 for number in words]


def test_spelled_words_are_those_of_the_text(vocabulary):
    for text, count in (("The dogs bark, the cat sleeps.", 8), ("Why?", 2), ("", 0)):
        found = describe_tokens(torch.tensor([vocabulary.encode(text)], dtype=torch.long).reshape(1, -1), vocabulary)
        assert len(set(found.words[0].tolist())) == count
        assert found.interrogative is None  # no language was named


@pytest.mark.parametrize("language", [None, "source", "xx"])
def test_a_language_without_a_list_has_no_interrogatives(vocabulary, language):
    assert describe_tokens(torch.tensor([vocabulary.encode("Who?")]), vocabulary, language).interrogative is None


def test_padding_of_the_decoder_is_no_query(vocabulary):
    v = vocabulary
    made = Batch(
        source=torch.tensor([[5, v.eos_id], [v.eos_id, v.pad_id]]),
        target=torch.tensor([[v.bos_id, 5, 6], [v.bos_id, v.pad_id, v.pad_id]]),
        labels=torch.tensor([[5, 6, v.eos_id], [v.eos_id, v.pad_id, v.pad_id]]),
        indices=[7, 3],
        num_tokens=4,
    )
    found = Sentences.of_batch(made, v, v)
    assert found.numbers == (7, 3)
    assert found.source.mask.tolist() == [[True, True], [True, False]]
    assert found.target.mask.tolist() == [[True] * 3, [True, False, False]]


def test_shuffled_sources_are_others():
    (batch,) = batches(6)
    shuffled = batch.with_shuffled_sources()
    assert torch.equal(shuffled.source.ids, batch.source.ids[[5, 0, 1, 2, 3, 4]])
    assert torch.equal(shuffled.source.mask, batch.source.mask[[5, 0, 1, 2, 3, 4]])
    assert torch.equal(shuffled.target.ids, batch.target.ids)


def test_what_does_not_fit_is_refused():
    one, two = tokens([[1, 2]]), tokens([[1], [2]])
    with pytest.raises(ValueError, match=r"ids must be \(B, L\), got shape \(3,\)"):
        Tokens(ids=torch.ones(3))
    with pytest.raises(ValueError, match=r"words must be \(1, 2\) as ids are, got \(1, 3\)"):
        replace(one, words=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="mask must be boolean"):
        replace(one, mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="1 targets but 2 sources"):
        Sentences(target=one, source=two)
    with pytest.raises(ValueError, match="1 sentences but 2 numbers"):
        Sentences(target=one, numbers=(1, 2))
