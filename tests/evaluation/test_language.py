"""Perplexity at many lengths, against the whole text put through the model at once."""

import math

import numpy as np
import pytest
import torch

from tamis.data.documents import Document, DocumentCorpus, build_documents
from tamis.data.passkey import FILLER, NEEDLE, QUESTION, PasskeyText
from tamis.data.vocabulary import Vocabulary
from tamis.evaluation.language import (
    LanguageConfig,
    _answer_scores,
    _windows,
    score_passkeys,
    score_perplexity,
    spans,
)
from tamis.models import CausalLM, CausalLMConfig

SMALL = LanguageConfig(lengths=(64, 128, 256), tokens=512, batch_tokens=256, logit_tokens=48)
WORDS = FILLER.lower().replace(".", "").split()


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([FILLER, QUESTION, *NEEDLE, "0 1 2 3 4 5 6 7 8 9", " ".join(WORDS)] * 5, 110, kind="bpe")


@pytest.fixture(scope="module")
def corpus(vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(count)) for n, count in ((3, 300), (5, 20), (7, 400))]
    build_documents((Document(n, [text]) for n, text in enumerate(texts, 1)), folder, "test", vocabulary)
    return DocumentCorpus.open(folder, "test")


def model(vocabulary, **settings):
    torch.manual_seed(1)
    sizes = {"embed_dim": 32, "num_heads": 4, "ffn_dim": 32, "num_layers": 2}
    return CausalLM(CausalLMConfig(vocab_size=len(vocabulary), **(sizes | settings))).eval()


def mean_loss(model, row, start, end, counted):
    """Of the labels from `counted` on in a window of a row."""
    with torch.no_grad():
        logits = model(torch.from_numpy(row.inputs[start:end])[None])[0]
    labels = torch.from_numpy(row.labels[start:end])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses[counted - start :].double()


def test_spans_are_pieces_of_single_documents(corpus, vocabulary):
    found = spans(corpus, vocabulary, SMALL)
    assert len(found) == 2
    for row in found:
        assert len(row.inputs) == 256
        assert not row.starts
        assert row.inputs[1:].tolist() == row.labels[:-1].tolist()
    joined = spans(corpus, vocabulary, LanguageConfig(lengths=(512,), tokens=1, across_documents=True))
    assert len(joined) == 1
    assert len(joined[0].inputs) == 512


@pytest.mark.parametrize("mechanism", ["softmax", "asentmax"])
@pytest.mark.parametrize("position", ["rope", "nape"])
def test_full_windows(corpus, vocabulary, mechanism, position):
    lm = model(vocabulary, mechanism=mechanism, position=position)
    pieces = spans(corpus, vocabulary, SMALL)
    for length in SMALL.lengths:
        found = score_perplexity(lm, pieces, length, "full", SMALL)
        losses = torch.stack([
            mean_loss(lm, row, start, start + length, start) for row in pieces for start in range(0, 256, length)
        ])  # fmt: skip
        assert found.likelihood.tokens == 512
        assert found.likelihood.nll == pytest.approx(losses.mean().item(), rel=1e-4)
        edges = [(bucket.start, bucket.end) for bucket in found.buckets]
        assert edges == [(0, 64), (64, 128), (128, 256)][: len(edges)]
        assert edges[-1][1] == length
        for bucket in found.buckets:
            expected = losses[:, bucket.start : bucket.end].mean().item()
            assert bucket.likelihood.nll == pytest.approx(expected, rel=1e-4)
    assert f"{length} tokens, full" in found.describe()
    assert math.isfinite(found.to_dict()["perplexity"])


@pytest.mark.parametrize("stride", [0.5, 0.3])
def test_sliding_windows(corpus, vocabulary, stride):
    lm = model(vocabulary)
    config = LanguageConfig(lengths=(64, 256), tokens=512, stride=stride)
    pieces = spans(corpus, vocabulary, config)
    found = score_perplexity(lm, pieces, 64, "sliding", config)
    losses = []
    step = round(stride * 64)
    for row in pieces:
        done = 0
        while done < 256:
            end = min(done + step, 256) if done else 64
            losses.append(mean_loss(lm, row, end - 64, end, done))
            done = end
    assert found.likelihood.tokens == 512
    assert found.likelihood.nll == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_no_token_of_a_sliding_window_has_a_short_context(corpus, vocabulary):
    (piece, *_) = spans(corpus, vocabulary, SMALL)
    windows = list(_windows([piece], 64, "sliding", 0.25))
    counted = [np.flatnonzero(labels != -100) for _, labels in windows]
    assert sum(map(len, counted)) == 256
    assert all(places.min() >= 48 for places in counted[1:])


def test_few_logits_are_held_at_once(corpus, vocabulary):
    lm = model(vocabulary)
    sizes = []
    lm.register_forward_hook(lambda module, inputs, out: sizes.append(out.shape[0] * out.shape[1]))
    score_perplexity(lm, spans(corpus, vocabulary, SMALL), 256, "full", SMALL)
    score_passkeys(lm, PasskeyText(vocabulary, 2), 256, 0.5, LanguageConfig(passkey_samples=2, logit_tokens=48))
    assert max(sizes) <= 48


def test_candidates_are_scored_as_if_each_were_read_whole(vocabulary):
    lm = model(vocabulary)
    prompts = torch.randint(4, len(vocabulary), (2, 30))
    answers = [[[5, 6, 7], [8], [9, 10]], [[11], [12, 13], [14, 15, 16]]]
    with torch.no_grad():
        found = _answer_scores(lm, prompts, answers, 1.0, 16)
        for row in range(2):
            for place, ids in enumerate(answers[row]):
                whole = torch.cat([prompts[row], torch.tensor(ids)])[None]
                logs = lm(whole)[0, 29:-1].log_softmax(-1)
                expected = sum(logs[k, token].item() for k, token in enumerate(ids))
                assert found[row, place].item() == pytest.approx(expected, rel=1e-4)


class Knowing(torch.nn.Module):
    """Says the number that stands after the last `The pass key is`, but one: that of the needle."""

    def __init__(self, vocabulary, passkeys, lie=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.size, self.passkeys, self.lie = len(vocabulary), passkeys, lie
        self.mark = vocabulary.encode(NEEDLE[0])

    def new_cache(self):
        class Cache(list):
            def shorten(self, length):
                del self[length:]

        return Cache()

    def forward(self, tokens, cache):
        cache.extend(tokens[0].tolist())
        size = self.passkeys.longest_answer
        first = next(i for i in range(len(cache)) if cache[i : i + len(self.mark)] == self.mark) + len(self.mark)
        key = cache[first : first + size]
        last = max(i for i in range(len(cache)) if cache[i : i + len(self.mark)] == self.mark) + len(self.mark)
        logits = torch.zeros(1, tokens.shape[1], self.size)
        for place in range(tokens.shape[1]):
            written = len(cache) - tokens.shape[1] + place + 1 - last
            if 0 <= written < size:
                logits[0, place, key[written]] = -9.0 if self.lie else 9.0
        return logits


@pytest.mark.parametrize("lie", [False, True])
def test_who_knows_the_number_finds_it(vocabulary, lie):
    passkeys = PasskeyText(vocabulary, 3)
    config = LanguageConfig(passkey_samples=6, batch_tokens=1, logit_tokens=10_000)
    for depth in (0.0, 0.5, 1.0):
        found = score_passkeys(Knowing(vocabulary, passkeys, lie), passkeys, 200, depth, config)
        assert found.samples == 6
        assert found.accuracy == float(not lie)


def test_who_knows_nothing_finds_nothing(vocabulary):
    """Equal scores are no choice."""
    lm = model(vocabulary)
    torch.nn.init.zeros_(lm.embedding.weight)
    config = LanguageConfig(passkey_samples=3)
    assert score_passkeys(lm, PasskeyText(vocabulary, 2), 150, 0.5, config).accuracy == 0.0


def test_a_sparse_output_layer(corpus, vocabulary):
    lm = model(vocabulary)
    pieces = spans(corpus, vocabulary, SMALL)
    found = score_perplexity(lm, pieces, 64, "full", SMALL, alpha=1.5)
    assert found.likelihood.support < len(vocabulary)
    config = LanguageConfig(passkey_samples=2)
    assert 0.0 <= score_passkeys(lm, PasskeyText(vocabulary, 2), 150, 0.5, config, alpha=1.5).accuracy <= 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "lengths must be some numbers"),
        ({"lengths": [64.0]}, "lengths must be some numbers"),
        ({"lengths": (48, 64)}, "divide the greatest"),
        ({"lengths": (0, 64)}, "at least 1"),
        ({"passkey_depths": (2,)}, r"must lie in \[0, 1\]"),
        ({"stride": 2}, "stride must lie"),
        ({"candidates": 1}, "candidates must be an int of at least 2"),
        ({"candidates": 10**6}, "candidates must be an int of at most 10000"),
        ({"across_documents": 1}, "must be true or false"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LanguageConfig(**settings)


@pytest.mark.parametrize(("across", "message"), [(False, "the longest document has"), (True, "the whole text has")])
def test_a_text_that_is_too_short(corpus, vocabulary, across, message):
    with pytest.raises(ValueError, match=f"a length of 65536 cannot be tested: {message}"):
        spans(corpus, vocabulary, LanguageConfig(lengths=(65536,), across_documents=across))
