"""Beam search: against exhaustive search, plain greedy search and rescoring by the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.models import EOS, IDS, PAD, every_ending, plain_greedy, rescored, sources, tiny
from tamis.decoding import DecodingConfig, beam_search, greedy, sample
from tamis.decoding.search import penalty
from tamis.mechanisms import MECHANISMS
from tamis.positions import POSITIONS

few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**changes: Any) -> DecodingConfig:
    return DecodingConfig(**{"beam": 4, "n_best": 4, "max_length": 8, **changes})


def search(model: Any, source: Tensor, **changes: Any) -> list[Any]:
    return beam_search(model, source, config=config(**changes), **IDS)


def check(model: Any, source: Tensor, found: list[Any], alpha: float = 1.0, length_penalty: float = 1.0) -> None:
    """What every result must be: distinct, sorted, finite, and scored as the whole model scores it."""
    assert len(found) == source.shape[0]
    for row, hypotheses in zip(source, found, strict=True):
        assert hypotheses
        assert len({(*h.tokens, h.finished) for h in hypotheses}) == len(hypotheses)
        order = [(not h.finished, -h.normalised) for h in hypotheses]
        assert order == sorted(order)
        for h in hypotheses:
            assert math.isfinite(h.score)
            assert h.score <= 0.0
            assert EOS not in h.tokens
            assert h.score == pytest.approx(rescored(model, row, h.tokens, h.finished, alpha), abs=1e-5, rel=1e-5)
            assert h.normalised == pytest.approx(h.score / penalty(len(h.tokens) + h.finished, length_penalty))


# ---------------------------------------------------------------------------------------------------------------
# Scores and order


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("position", ["sinusoidal", "nape"])
def test_scores_are_those_of_the_whole_model(mechanism: str, position: str):
    model, source = tiny(mechanism, position=position), sources([5, 2, 7, 1])
    check(model, source, search(model, source, max_length=12))


@pytest.mark.parametrize("position", POSITIONS)
def test_scores_are_those_of_the_whole_model_for_all_positions(position: str):
    model, source = tiny("asentmax", position=position), sources([6, 3])
    check(model, source, search(model, source, max_length=30, max_extra=30))


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_scores_of_sparse_output_layers(alpha: float):
    model, source = tiny(), sources([5, 2, 7, 1])
    check(model, source, search(model, source, alpha=alpha), alpha)


@few
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    beam=st.integers(1, 6),
    length_penalty=st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
    alpha=st.sampled_from([1.0, 1.5, 2.0]),
    sharpness=st.sampled_from([0.3, 2.0]),  # sharper, and log-probabilities at the edge of a support amplify rounding
)
def test_any_search_gives_sound_results(seed, lengths, beam, length_penalty, alpha, sharpness):
    model, source = tiny("softmax", seed=seed, sharpness=sharpness), sources(lengths, seed=seed)
    changes = {"beam": beam, "n_best": beam, "length_penalty": length_penalty, "alpha": alpha}
    check(model, source, search(model, source, **changes), alpha, length_penalty)


@pytest.mark.parametrize("heads", [1, 2])
def test_grouped_heads_and_own_head_size(heads: int):
    model, source = tiny("entmax15", num_kv_heads=heads, head_dim=6, position="rope"), sources([4, 6])
    check(model, source, search(model, source))


def test_places_in_the_cache_are_used_again_and_nothing_changes():
    """Long outputs of many beams: new tokens overwrite those that no beam sees."""
    model, source = tiny("entmax", position="alibi", sharpness=1.0), sources([9, 4])
    found = search(model, source, beam=6, n_best=6, max_length=60, max_extra=60, min_length=55)
    assert max(len(h.tokens) for h in found[0]) >= 54
    check(model, source, found)


# ---------------------------------------------------------------------------------------------------------------
# Exhaustive search


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_a_wide_beam_finds_the_best_of_all_sequences(length_penalty: float, alpha: float):
    steps, vocab_size, reached = 4, 5, 0
    for seed in range(4):
        model = tiny("softmax", vocab_size=vocab_size, seed=seed, sharpness=0.5)
        source = sources([3, 2], vocab_size)
        # As many beams as there are sequences: none is ever cut.
        found = search(
            model, source, beam=500, n_best=3, max_length=steps, max_extra=9, length_penalty=length_penalty, alpha=alpha
        )
        for row, hypotheses in zip(source, found, strict=True):
            scores = every_ending(model, row, steps, alpha)
            ranked = {t: s / penalty(len(t) + 1, length_penalty) for t, s in scores.items() if s > -math.inf}
            best = sorted(ranked.values(), reverse=True)[:3]
            ended = [h for h in hypotheses if h.finished]
            assert [h.normalised for h in ended] == pytest.approx(best[: len(ended)], abs=1e-4)
            assert len(ended) == min(3, len(best))
            assert all(ranked[tuple(h.tokens)] == pytest.approx(h.normalised, abs=1e-4) for h in ended)
            reached += len(ended)
    assert reached >= 12  # sparse outputs may leave no way to an end


@few
@given(seed=st.integers(0, 1000), length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]), n_best=st.integers(1, 4))
def test_stopping_early_changes_no_result(seed, length_penalty, n_best):
    """The bound never stops a search that could still find better: asking for more only adds to the end."""
    model, source = tiny("softmax", seed=seed), sources([3, 5, 1], seed=seed)
    everything = search(model, source, length_penalty=length_penalty)
    found = search(model, source, length_penalty=length_penalty, n_best=n_best)
    for some, more in zip(found, everything, strict=True):
        assert [h.tokens for h in some] == [h.tokens for h in more][:n_best]


# ---------------------------------------------------------------------------------------------------------------
# Greedy


@few
@given(
    seed=st.integers(0, 1000),
    alpha=st.sampled_from([1.0, 1.5, 2.0]),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
)
def test_beam_one_is_greedy_search(seed, alpha, length_penalty):
    model, source = tiny("entmax15", seed=seed), sources([4, 1, 6], seed=seed)
    changes = {"beam": 1, "n_best": 1, "alpha": alpha, "length_penalty": length_penalty}
    found = search(model, source, **changes)
    for row, (hypothesis,) in zip(source, found, strict=True):
        assert (hypothesis.tokens, hypothesis.finished) == plain_greedy(model, row, 8, alpha)
    assert greedy(model, source, config=config(alpha=alpha, length_penalty=length_penalty), **IDS) == found
    check(model, source, found, alpha, length_penalty)


# ---------------------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "asentmax"])
def test_a_sentence_is_translated_alike_alone_and_in_a_batch(mechanism: str):
    model, source = tiny(mechanism), sources([5, 2, 9, 1, 7, 3, 4, 8, 6])
    together = search(model, source, max_length=20)
    for row, expected in zip(source, together, strict=True):
        (alone,) = search(model, row[row != PAD][None], max_length=20)
        assert [h.tokens for h in alone] == [h.tokens for h in expected]
        assert [h.score for h in alone] == pytest.approx([h.score for h in expected], abs=1e-5)


def test_padding_may_stand_on_either_side():
    model, source = tiny(), sources([5, 2, 7])
    left = torch.stack([torch.cat([row[row == PAD], row[row != PAD]]) for row in source])
    for a, b in zip(search(model, source), search(model, left), strict=True):
        assert [h.tokens for h in a] == [h.tokens for h in b]


def test_limits_are_those_of_each_sentence():
    model, source = tiny(), sources([2, 9])
    source = torch.cat([source, torch.full((2, 5), PAD)], 1)
    found = search(model, source, min_length=99, max_length=99, max_ratio=1.5, max_extra=1)
    assert [len(hypotheses[0].tokens) for hypotheses in found] == [int(1.5 * 3 + 1), int(1.5 * 10 + 1)]
    assert not found[0][0].finished


def test_learned_positions_bound_the_length():
    model = tiny(position="learned", max_length=7)
    found = search(model, sources([3]), min_length=99, max_length=99, max_extra=99)
    assert len(found[0][0].tokens) == 7


def test_no_sentences():
    assert search(tiny(), torch.zeros(0, 3, dtype=torch.long)) == []


# ---------------------------------------------------------------------------------------------------------------
# Few candidates


def always(model: Any, scores: dict[int, float]) -> Any:
    """Let a model give these logits whatever it reads."""
    with torch.no_grad():
        model.output.weight.zero_()
    table = torch.full((model.config.vocab_size,), -100.0)
    for token, score in scores.items():
        table[token] = score
    model.output.register_forward_hook(lambda module, args, output: table.expand(output.shape).clone())
    return model


def test_fewer_candidates_than_beams():
    """Sparsemax leaves two tokens at each step, one of them the end."""
    model = always(tiny(), {5: 0.5, EOS: 0.0})
    (found,) = search(model, sources([3]), beam=8, n_best=8, alpha=2.0, max_length=4)
    assert [h.tokens for h in found if h.finished] == [[], [5], [5, 5], [5, 5, 5]]
    assert [h.tokens for h in found if not h.finished] == [[5, 5, 5, 5]]
    assert [h.score for h in found if h.finished] == pytest.approx([math.log(0.25 * 0.75**n) for n in range(4)])


def test_only_the_end_is_possible():
    model = always(tiny(), {EOS: 5.0})
    (found,) = search(model, sources([3]), alpha=1.5)
    assert found == [([], 0.0, 0.0, True)]


def test_nothing_may_follow():
    """The only possible token is forbidden: what there is comes back, unfinished and finite."""
    model = always(tiny(), {EOS: 5.0})
    (found,) = search(model, sources([3]), alpha=2.0, min_length=3)
    assert found == [([], 0.0, 0.0, False)]
    model = always(tiny(), {5: 0.5, 6: 0.4})
    (found,) = beam_search(model, sources([3]), config=config(alpha=2.0), banned_ids=[5, 6], **IDS)
    assert found == [([], 0.0, 0.0, False)]


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_one_step(alpha: float):
    model, source = tiny(), sources([3, 5])
    found = search(model, source, max_length=1, alpha=alpha)
    check(model, source, found, alpha)
    for hypotheses in found:
        assert all(len(h.tokens) + h.finished == 1 for h in hypotheses)


def test_banned_tokens_are_never_written_and_scores_stay_those_of_the_model():
    model, source = tiny(), sources([3, 5, 6])
    found = beam_search(model, source, config=config(), banned_ids=[PAD, 1, 4, 4], **IDS)
    check(model, source, found)
    assert not {PAD, 1, 4} & {token for hypotheses in found for h in hypotheses for token in h.tokens}


def test_more_beams_than_tokens():
    model, source = tiny(vocab_size=4), sources([3], 4)
    check(model, source, search(model, source, beam=20, n_best=20))


def test_a_broken_model_says_so():
    model = tiny()
    with torch.no_grad():
        model.output.weight.fill_(math.nan)
    for alpha in (1.0, 1.5):
        with pytest.raises(ValueError, match="NaN"):
            search(model, sources([3]), alpha=alpha)


# ---------------------------------------------------------------------------------------------------------------
# The edge


def test_a_model_in_training_is_left_in_training():
    model = tiny(dropout=0.5)
    source = sources([4])
    expected = search(model, source)
    model.train()
    model.encoder.eval()
    assert search(model, source) == expected
    assert model.training
    assert model.decoder.training
    assert not model.encoder.training


@pytest.mark.parametrize(
    ("source", "ids", "message"),
    [
        (torch.zeros(2, 0, dtype=torch.long), IDS, "at least one token"),
        (torch.zeros(2, 3), IDS, "token ids"),
        (torch.zeros(3, dtype=torch.long), IDS, "token ids"),
        (torch.full((1, 2), 9), IDS, r"\[0, 8\]"),
        (torch.ones(1, 2, dtype=torch.long), {"bos_id": 1, "eos_id": 9}, "eos_id"),
        (torch.ones(1, 2, dtype=torch.long), {"bos_id": -1, "eos_id": 2}, "bos_id"),
    ],
)
def test_bad_input_is_refused(source: Tensor, ids: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        beam_search(tiny(), source, **ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": 100_000, "n_best": 1}, "beam must be an int of at most 10000, got 100000"),
        ({"method": "sample", "n_best": 10**6}, "n_best must be an int of at most 10000"),
        ({"max_length": 2**31 - 1}, "max_length must be an int of at most 1000000"),
        ({"max_extra": 10**400}, r"max_extra must be an int of at most 1000000, got about 2\*\*1329"),
        ({"beam": 2, "n_best": 3}, "n_best must be at most beam"),
        ({"method": "greedy", "n_best": 2}, "greedy"),
        ({"method": "bean"}, "beam"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 99}, "length_penalty"),
        ({"alpha": 0.5}, "alpha"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_length": True}, "max_length"),
        ({"max_ratio": -1.0}, "max_ratio"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**changes)


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_a_search_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, method: str):
    monkeypatch.setattr("tamis.settings.free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("tamis.settings.SMALL", 0)
    settings = DecodingConfig(method=method, beam=2000, n_best=2000, max_length=10**6, max_extra=10**6)
    expected = (
        "2,000 hypotheses of 2 sentences of up to 1,000,000 tokens would take 64.* GB of memory, and 1.1 GB are free"
    )
    with pytest.raises(ValueError, match=expected):
        (beam_search if method == "beam" else sample)(tiny(), sources([3, 3]), config=settings, **IDS)
