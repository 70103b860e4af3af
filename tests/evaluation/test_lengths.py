import json

import pytest
import torch
from torch import nn

from tamis.data.tasks import MQMTAR, Reverse, stream
from tamis.evaluation.lengths import (
    HEADING,
    LengthsConfig,
    LengthScore,
    lengths_table,
    score_lengths,
    write,
)
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn.modes import evaluating

SIZES = {"embed_dim": 32, "num_heads": 4, "ffn_dim": 32, "num_layers": 2}


def model(task, **settings):
    torch.manual_seed(0)
    return CausalLM(CausalLMConfig(vocab_size=task.vocab_size, **SIZES, **settings)).double()


class Knowing(nn.Module):
    """Reverses by rule, with `wrong` of the last tokens before EOS wrong in rows whose source begins with 0."""

    def __init__(self, task, wrong):
        super().__init__()
        self.task, self.wrong = task, wrong
        self.anything = nn.Parameter(torch.zeros(1))
        self.largest = 0

    def new_cache(self):
        return []

    def forward(self, tokens, cache):
        cache.append(tokens)
        seen = torch.cat(cache, 1)
        self.largest = max(self.largest, seen.numel())
        sep = int((seen[0] == self.task.sep_id).nonzero())
        source, place = seen[:, 1:sep], seen.shape[1] - sep - 1
        if place == source.shape[1]:
            return nn.functional.one_hot(torch.full((len(seen), 1), self.task.eos_id), self.task.vocab_size)
        answer = source.flip(1)[:, place : place + 1]
        if place >= source.shape[1] - self.wrong:
            answer = torch.where(source[:, :1] == 0, (answer + 1) % self.task.symbols, answer)
        return nn.functional.one_hot(answer, self.task.vocab_size)


@pytest.mark.parametrize("mechanism", ["softmax", "asentmax", {"name": "entmax", "alpha": 1.5}, "ssmax"])
def test_writing_with_the_cache_is_writing_without(mechanism):
    task = Reverse(symbols=5)
    tested = model(task, mechanism=mechanism)
    prompt = task.generate(3, 9, stream(0)).tokens[:, :11]
    with evaluating(tested):
        written = write(tested, prompt, 10)
        tokens = prompt
        for _ in range(10):
            tokens = torch.cat([tokens, tested(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, tokens[:, 11:])


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_scores_by_hand(wrong):
    task = Reverse(symbols=4)
    drawn = task.generate(200, 6, stream("test", 0, 6), "test")
    spoilt = (drawn.tokens[:, 1] == 0).double().mean().item()
    (score,) = score_lengths(Knowing(task, wrong), task, 6, LengthsConfig(multiples=(1,), samples=200))
    assert score.exact_match == pytest.approx(1 - spoilt * (wrong > 0))
    assert score.token_accuracy == pytest.approx(1 - spoilt * wrong / 7)


def test_lengths_samples_and_batches():
    task = Reverse(symbols=4)
    said = []
    config = LengthsConfig(multiples=(1, 1.5, 16, 17), samples=20, samples_beyond=3, batch_tokens=200)
    knowing = Knowing(task, 0)
    scores = score_lengths(knowing, task, 8, config, said.append)
    assert [score.length for score in scores] == [8, 12, 128, 136]
    assert [score.samples for score in scores] == [20, 20, 20, 3]
    assert all(score.exact_match == score.token_accuracy == 1.0 for score in scores)
    assert knowing.largest <= 2 * 136 + 3  # one row at a time where two do not fit
    assert said == [HEADING, *(score.describe() for score in scores)]
    assert json.loads(json.dumps(scores[0].to_dict()))["length"] == 8


def test_batches_do_not_change_scores():
    task = MQMTAR(symbols=4, queries=1)
    tested = model(task)
    found = [
        [
            (score.exact_match, score.token_accuracy)
            for score in score_lengths(
                tested, task, 16, LengthsConfig(multiples=(1, 3), samples=12, batch_tokens=tokens)
            )
        ]
        for tokens in (1, 100, 100_000)
    ]
    assert found[0] == found[1] == found[2]


def test_the_table_has_means_and_what_they_are_of():
    def run(*shares):
        return [
            LengthScore(multiple=m, length=8, samples=9, exact_match=share, token_accuracy=0.5, seconds=0.1)
            for m, share in shares
        ]

    scores = {"softmax": [run((1, 1.0), (2, 0.25))], "asentmax": [run((1.5, 0.9), (1, 1.0)), run((1, 1.0), (1.5, 0.8))]}
    assert lengths_table(scores).splitlines() == [
        "| exact match, % | 1x    | 1.5x                | 2x   |",
        "| -------------- | ----- | ------------------- | ---- |",
        "| softmax        | 100.0 |                     | 25.0 |",
        "| asentmax       | 100.0 | 85.0 (80.0 to 90.0) |      |",
    ]
    assert lengths_table(scores, "token_accuracy").splitlines()[-1].split("|")[2:4] == [" 50.0 ", " 50.0 "]


@pytest.mark.parametrize("change", [{"samples": 0}, {"multiples": 3}, {"multiples": ["2"]}, {"beyond": -1}])
def test_bad_settings(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LengthsConfig(**change)
