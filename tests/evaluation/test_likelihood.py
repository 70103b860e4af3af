"""Likelihood figures against whole distributions written out, and their limits."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data.batching import Batch
from tamis.evaluation import LikelihoodMeter, translation_likelihood
from tamis.functional import entmax
from tamis.models import Seq2Seq, Seq2SeqConfig


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def oracle(rows: list[list[float]], gold: list[int], epsilon: float) -> dict[str, float]:
    """From distributions, by the definitions."""
    smoothed, scores, divergences = [], [], []
    for p, x in zip(rows, gold, strict=True):
        q = [(value + epsilon) / sum(v + epsilon for v in p) for value in p]
        smoothed.append(-math.log(q[x]))
        one_hot = [float(j == x) for j in range(len(p))]
        # 1 - the sparsemax loss that belongs to these probabilities: 1/2 |p - e|^2 = 1/2 |p|^2 - p_x + 1/2
        scores.append(1 - sum((a - b) ** 2 for a, b in zip(p, one_hot, strict=True)) / 2)
        middle = [(a + b) / 2 for a, b in zip(p, one_hot, strict=True)]
        divergences.append(entropy(middle) - (entropy(p) + entropy(one_hot)) / 2)
    count = len(gold)
    return {
        "epsilon_perplexity": math.exp(sum(smoothed) / count),
        "sparsemax_score": sum(scores) / count,
        "jensen_shannon": sum(divergences) / count,
        "support": sum(value > 0 for p in rows for value in p) / count,
        "zero_share": sum(p[x] == 0 for p, x in zip(rows, gold, strict=True)) / count,
    }


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(2, 9),
    st.sampled_from([1.0, 1.2, 1.5, 2.0]),
    st.sampled_from([1e-6, 1e-2]),
)
def test_figures_equal_their_definitions(seed, count, size, alpha, epsilon):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    gold = torch.randint(size, (count,), generator=generator)
    meter = LikelihoodMeter(alpha, epsilon)
    meter.update(logits, gold)
    result = meter.result()
    rows = (logits.softmax(-1) if alpha == 1.0 else entmax(logits, alpha)).tolist()
    for name, value in oracle(rows, gold.tolist(), epsilon).items():
        assert getattr(result, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    likelihoods = [p[x] for p, x in zip(rows, gold.tolist(), strict=True)]
    if min(likelihoods) > 0:
        assert result.perplexity == pytest.approx(math.prod(likelihoods) ** (-1 / count), rel=1e-6)
    else:
        assert result.perplexity == math.inf
        assert result.to_dict()["perplexity"] is None
    assert 0.0 <= result.jensen_shannon <= math.log(2) + 1e-12
    assert 0.0 <= result.sparsemax_score <= 1.0 + 1e-12


def test_softmax_perplexity_is_that_of_cross_entropy():
    logits, gold = torch.randn(4, 7, 11), torch.randint(1, 11, (4, 7))
    gold[:, 5:] = 0
    meter = LikelihoodMeter()
    meter.update(logits, gold, ignore=0)
    result = meter.result()
    assert result.tokens == 20
    expected = F.cross_entropy(logits.double().flatten(0, 1), gold.flatten(), ignore_index=0)
    assert result.nll == pytest.approx(float(expected), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(float(expected)), rel=1e-6)


def test_a_vanishing_epsilon_gives_perplexity():
    logits, gold = torch.randn(50, 11, dtype=torch.float64), torch.randint(11, (50,))
    results = []
    for epsilon in (1e-4, 1e-8, 0.0):
        meter = LikelihoodMeter(epsilon=epsilon)
        meter.update(logits, gold)
        results.append(meter.result())
    gaps = [abs(result.epsilon_perplexity - result.perplexity) for result in results]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[1] < 1e-5
    assert gaps[2] == 0.0


def test_the_two_ends():
    """Certain and right, certain and wrong, and knowing nothing."""
    size, epsilon = 10, 1e-3
    logits = torch.zeros(1, size, dtype=torch.float64)
    ends = {}
    for name, height, gold in (("right", 9.0, 0), ("wrong", 9.0, 1), ("uniform", 0.0, 1)):
        logits[0, 0] = height
        meter = LikelihoodMeter(2.0, epsilon)
        meter.update(logits, torch.tensor([gold]))
        ends[name] = meter.result()
    assert (ends["right"].perplexity, ends["right"].sparsemax_score, ends["right"].jensen_shannon) == (1.0, 1.0, 0.0)
    assert (ends["wrong"].perplexity, ends["wrong"].sparsemax_score) == (math.inf, 0.0)
    assert ends["wrong"].jensen_shannon == pytest.approx(math.log(2))
    assert ends["wrong"].epsilon_perplexity == pytest.approx((1 + epsilon * size) / epsilon)
    assert ends["wrong"].zero_share == 1.0
    assert ends["uniform"].perplexity == pytest.approx(size)
    assert ends["uniform"].epsilon_perplexity == pytest.approx(size)
    assert ends["uniform"].sparsemax_score == pytest.approx(0.1 + (1 - 0.1) / 2)
    assert ends["uniform"].support == size


def test_logits_of_any_size_have_a_log_probability():
    """A gold token 2000 nats down has e^-2000, which is 0 in any dtype, but its logarithm is known."""
    meter = LikelihoodMeter()
    meter.update(torch.tensor([[2000.0, 0.0]]), torch.tensor([1]))
    assert meter.result().nll == pytest.approx(2000.0)
    assert meter.result().zero_share == 0.0
    assert json.dumps(meter.result().to_dict(), allow_nan=False)


def seq2seq() -> Seq2Seq:
    sizes = {"vocab_size": 12, "embed_dim": 16, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    return Seq2Seq(Seq2SeqConfig(**sizes, dropout=0.5))


def batch(rows: slice) -> Batch:
    source = torch.tensor([[4, 5, 6, 2], [7, 8, 2, 0], [9, 2, 0, 0]])[rows]
    labels = torch.tensor([[5, 6, 2], [7, 2, 0], [2, 0, 0]])[rows]
    target = torch.tensor([[1, 5, 6], [1, 7, 0], [1, 0, 0]])[rows]
    return Batch(source, target, labels, list(range(len(source))), int((labels != 0).sum()))


def test_a_model_is_measured_without_dropout_whatever_the_batches():
    model = seq2seq().train()
    model.decoder[0].eval()
    whole = translation_likelihood(model, [batch(slice(0, 3))], alpha=1.5)
    parts = translation_likelihood(model, [batch(slice(0, 1)), batch(slice(1, 3))], alpha=1.5)
    assert whole.tokens == 6
    assert asdict(parts) == pytest.approx(asdict(whole), rel=1e-5)
    assert model.training
    assert not model.decoder[0].training  # as it was


def test_the_model_stays_in_its_mode_after_an_error():
    model = seq2seq().train()

    def broken():
        yield batch(slice(0, 1))
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        translation_likelihood(model, broken())
    assert model.training


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="alpha must be at least 1"):
        LikelihoodMeter(0.5)
    with pytest.raises(ValueError, match="epsilon must be"):
        LikelihoodMeter(epsilon=-1.0)
    with pytest.raises(ValueError, match="need labels"):
        LikelihoodMeter().update(torch.zeros(2, 3), torch.zeros(3).long())
    with pytest.raises(ValueError, match="no token"):
        LikelihoodMeter().result()
    meter = LikelihoodMeter()
    meter.update(torch.zeros(1, 3), torch.tensor([0]), ignore=0)
    assert meter.tokens == 0


@pytest.mark.gpu
def test_a_gpu_gives_the_same_figures():
    model = seq2seq()
    expected = translation_likelihood(model, [batch(slice(0, 3))])
    found = translation_likelihood(model.cuda(), [batch(slice(0, 3))])
    assert asdict(found) == pytest.approx(asdict(expected), rel=1e-3)
