"""Rows from documents: nothing is lost, nothing crosses, and a number is all that there is to know about a row."""

import numpy as np
import pytest

from tamis.data.batching import IGNORED, Position
from tamis.data.documents import Document, DocumentCorpus, build_documents
from tamis.data.packing import PackedUpdates, Places
from tamis.data.passkey import FILLER, NEEDLE, QUESTION, PasskeyText
from tamis.data.vocabulary import Vocabulary

WORDS = [1, 30, 2, 7, 64, 3]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([FILLER, QUESTION, *NEEDLE, "0 1 2 3 4 5 6 7 8 9"] * 5, 100, kind="bpe")


@pytest.fixture(scope="module")
def corpus(vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(str((n * 7 + k) % 10) for k in range(words)) for n, words in enumerate(WORDS)]
    build_documents((Document(n, [text]) for n, text in enumerate(texts, 1)), folder, "train", vocabulary)
    return DocumentCorpus.open(folder, "train")


def laid_out(corpus, vocabulary, order):
    """All inputs, labels and beginnings, written down plainly."""
    inputs, labels, starts = [], [], []
    for number in order:
        starts.append(len(inputs))
        inputs += [vocabulary.bos_id, *corpus[number].tolist()]
        labels += [*corpus[number].tolist(), vocabulary.eos_id]
    return inputs, labels, starts


@pytest.mark.parametrize("length", [1, 2, 5, 16, 40, 1000])
def test_rows_are_pieces_of_all_documents_end_to_end(corpus, vocabulary, length):
    order = np.array([3, 0, 5, 4, 1, 2])
    places = Places(corpus, vocabulary, order)
    inputs, labels, starts = laid_out(corpus, vocabulary, order)
    total = len(inputs)
    assert len(places) == total
    for start in range(0, total, 3):
        row = places.row(start, length)
        around = [(start + k) % total for k in range(length)]
        assert row.inputs.tolist() == [inputs[k] for k in around]
        assert row.labels.tolist() == [labels[k] for k in around]
        assert row.starts == [k for k in range(1, length) if around[k] in starts]


def updates(corpus, vocabulary, **options):
    return PackedUpdates(corpus, vocabulary, **({"length": 8, "rows": 3, "seed": 1} | options))


def take(order, count, position=None):
    stream = order.iterate(position or Position())
    return [next(stream) for _ in range(count)]


def test_an_epoch_has_each_place_once(corpus, vocabulary):
    order = updates(corpus, vocabulary, rows=1)
    total = order.places
    count = total // 8
    found = take(order, count)
    assert found[-1][0] == Position(1, 0)
    inputs = sorted(x for _, (number,) in found for x in order.row(number).inputs.tolist())
    everything = sorted(laid_out(corpus, vocabulary, range(len(corpus)))[0])
    assert len(inputs) == count * 8
    left = list(everything)
    for token in inputs:
        left.remove(token)  # an error were it there more often
    assert len(left) == total % 8


def test_epochs_cut_elsewhere(corpus, vocabulary):
    order = updates(corpus, vocabulary, rows=1)
    count = order.rows_per_epoch
    first, second = ({tuple(order.row(n).inputs.tolist()) for n in range(e * count, (e + 1) * count)} for e in (0, 1))
    assert first != second


def test_the_order_goes_on_from_any_position(corpus, vocabulary):
    whole = take(updates(corpus, vocabulary), 12)
    for done in (1, 4, 7):
        after = take(updates(corpus, vocabulary), 12 - done, whole[done - 1][0])
        assert [(p, n.tolist()) for p, n in after] == [(p, n.tolist()) for p, n in whole[done:]]
    other = take(updates(corpus, vocabulary, seed=2), 12)
    assert [n.tolist() for _, n in other] != [n.tolist() for _, n in whole]
    with pytest.raises(ValueError, match="none at 99: did the text"):
        take(updates(corpus, vocabulary), 1, Position(0, 99))


def test_some_rows_hold_pass_keys(corpus, vocabulary):
    passkeys = PasskeyText(vocabulary, 1)
    length = passkeys.shortest + 10
    order = PackedUpdates(corpus, vocabulary, length, 2, seed=1, passkeys=passkeys, share=0.5)
    assert order.passkey_rows == order.text_rows > 0
    lengths = set()
    for number in range(3 * order.rows_per_epoch):
        row, again = order.row(number), order.row(number)
        assert row.inputs.tolist() == again.inputs.tolist()
        labelled = row.labels != IGNORED
        assert labelled.sum() == order.labels(number)
        if number % order.rows_per_epoch >= order.text_rows:
            count = int(labelled.sum())
            assert labelled[:count].all()
            assert row.inputs[0] == vocabulary.bos_id
            assert row.labels[count - 1] == vocabulary.eos_id
            assert row.inputs[1:count].tolist() == row.labels[: count - 1].tolist()
            assert not row.starts
            lengths.add(count)
    assert len(lengths) > 2
    assert max(lengths) <= length


def test_too_little_text(corpus, vocabulary):
    with pytest.raises(ValueError, match="an update has 1000 rows of 8 tokens, and the whole text only"):
        updates(corpus, vocabulary, rows=1000)
