"""All analyses in one pass: the same as each alone, whatever the batches, and back from disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from analysis import cases
from analysis.cases import batches, causal_lm, pairs, seq2seq, tokens
from tamis import analysis
from tamis.analysis import (
    OFFSETS,
    Sentences,
    Thresholds,
    Tokens,
    analyze,
    capture,
    read_arrays,
    shown_sentences,
    write_arrays,
)
from tamis.mechanisms import MECHANISMS
from tamis.nn import Attention

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
FIGURES = {
    "density": analysis.density,
    "sparsity_rate": analysis.sparsity_rate,
    "null_share": analysis.null_share,
    "support_size": analysis.support_size,
    "entropy": analysis.entropy,
    "normalised_entropy": analysis.normalised_entropy,
    "first_token": analysis.first_token_mass,
    "one_hot": analysis.one_hot_share,
    "confidence": analysis.positional_confidence,
    "diversity": analysis.head_diversity,
}
TABLES = {"density": analysis.density_histogram, "support": analysis.support_histogram}


def words_of(batch: Sentences) -> Sentences:
    """With words of two tokens, and tokens that ask or mark questions as they come."""

    def described(side: Tokens) -> Tokens:
        place = torch.arange(side.ids.shape[1]).expand(side.ids.shape)
        words = torch.where(side.mask, place // 2, -1)
        return replace(side, words=words, interrogative=side.ids % 2 == 0, question=side.ids % 3 == 0)

    return replace(batch, source=described(batch.source), target=described(batch.target))


@every_mechanism
def test_one_pass_finds_what_each_function_finds(mechanism):
    model, batch = seq2seq(mechanism), words_of(batches(6)[0])
    found = analyze(model, [batch])
    with torch.no_grad(), capture(model) as captured:
        model(batch.source.ids, batch.target.ids, batch.source.mask, batch.target.mask)
    assert list(found.sites) == list(captured)
    for site, weights in captured.items():
        visible, result = captured.visible[site], found.sites[site]
        for name, figure in FIGURES.items():
            expected = figure(weights, visible)
            value = getattr(result, name)
            if name == "confidence":
                value = [[math.nan if x is None else x for x in head] for head in value]
            torch.testing.assert_close(torch.tensor(value).double(), expected, equal_nan=True, msg=f"{site} {name}")
        for name, table in TABLES.items():
            assert torch.equal(found.histograms[f"{site}/{name}"], table(weights, visible))
        for name, table in zip(("support_sum", "length"), analysis.support_by_length(weights, visible), strict=True):
            assert torch.equal(found.histograms[f"{site}/{name}"], table)
    queries, keys = batch.target, batch.source
    cross, own = found.sites["decoder.0.cross"], found.sites["encoder.1.self"]
    expected = analysis.interrogation(
        captured["decoder.0.cross"], queries.interrogative, keys.question, captured.visible["decoder.0.cross"]
    )
    assert cross.questions > 0
    assert cross.interrogation == pytest.approx(expected.tolist())
    assert cross.subword_merging is None
    expected = analysis.subword_merging(captured["encoder.1.self"], keys.words, captured.visible["encoder.1.self"])
    assert own.subword_merging == pytest.approx(expected.tolist())
    assert own.words == sum((len(source) + 1) // 2 for source, _ in pairs())
    expected = analysis.split_word_merging(captured["encoder.1.self"], keys.words, captured.visible["encoder.1.self"])
    assert own.split_word_merging == pytest.approx(expected.tolist())
    assert own.split_words == sum(len(source) // 2 for source, _ in pairs())


@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax"])
@pytest.mark.parametrize("size", [1, 4])
def test_batches_change_nothing(mechanism, size):
    """One sentence at a time there is no padding, all at once there is much."""
    model = seq2seq(mechanism)
    whole = analyze(model, map(words_of, batches(6)), shown=[0, 3])
    parts = analyze(model, map(words_of, batches(size)), shown=[0, 3])
    assert whole.sentences == parts.sentences == 6
    assert flat(parts.to_dict()) == pytest.approx(flat(whole.to_dict()), abs=1e-5)
    for name, array in whole.arrays().items():
        torch.testing.assert_close(parts.arrays()[name], array)


def flat(value: Any, path: str = "") -> dict[str, float]:
    """The numbers of a dict of dicts and lists, by their path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: number for key, item in items for name, number in flat(item, f"{path}/{key}").items()}
    return {path: value} if isinstance(value, int | float) else {}


@every_mechanism
@pytest.mark.parametrize("left", [False, True])
def test_a_language_model(mechanism, left):
    model = causal_lm(mechanism)
    rows = [[3, 4, 5, 6], [7, 8], [9]]
    ids = torch.tensor([[0] * (4 - len(row)) + row if left else row + [0] * (4 - len(row)) for row in rows])
    found = analyze(model, [Sentences(target=Tokens(ids=ids, mask=ids != 0))], shown=[1])
    assert list(found.sites) == ["layers.0.self", "layers.1.self"]
    assert all(site.rows == 7 for site in found.sites.values())
    alone = analyze(model, [Sentences(target=Tokens(ids=torch.tensor([row]))) for row in rows])
    assert flat(found.to_dict()["sites"]) == pytest.approx(flat(alone.to_dict()["sites"]), abs=1e-5)
    assert list(found.summary()) == ["decoder", "all"]
    assert found.shown[1].target.tolist() == [7, 8]
    assert found.shown[1].source is None
    assert found.shown[1].weights["layers.0.self"].shape == (1, 4, 2, 2)


@every_mechanism
def test_shown_sentences_come_back_from_disk(mechanism, tmp_path):
    model = seq2seq(mechanism)
    numbered = [replace(batch, numbers=(30 + at, 40 + at, 50 + at)) for at, batch in enumerate(batches(3))]
    found = analyze(model, numbered, shown=[41, 50])
    write_arrays(tmp_path / "analysis.npz", found.arrays())
    arrays = read_arrays(tmp_path / "analysis.npz")
    assert torch.equal(arrays["encoder.0.self/density"], found.histograms["encoder.0.self/density"])
    back = shown_sentences(arrays)
    assert sorted(back) == [41, 50]
    source, target = pairs()[4]
    assert back[41].source.tolist() == source
    assert back[41].target.tolist() == target
    with torch.no_grad(), capture(model) as captured:
        model(torch.tensor([source]), torch.tensor([target]))
    for site, weights in captured.items():
        stored = back[41].weights[site]
        torch.testing.assert_close(stored.to_dense(), weights, atol=1e-6, rtol=1e-5)
        assert stored.val.numel() == int((stored.to_dense() != 0).sum())


@every_mechanism
def test_json_holds_everything_but_the_arrays(mechanism):
    found = analyze(seq2seq(mechanism), map(words_of, batches(2)), shown=[2])
    values = found.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["shown"] == [2]
    assert values["sites"]["decoder.0.cross"]["kind"] == "cross"
    assert sum(values["density_histograms"]["encoder"]) == 4 * sum(
        values["sites"][f"encoder.{layer}.self"]["rows"] for layer in (0, 1)
    )
    curve = values["support_by_length"]["decoder.0.self"]
    assert curve["keys"] == [1, 2, 3, 4, 5, 6]  # causal, of at most six tokens
    assert all(support <= n for row in curve["support"] for n, support in zip(curve["keys"], row, strict=True))
    assert bool(values["scales"]) == (mechanism in ("asentmax", "assmax"))
    assert bool(values["alphas"]) == (mechanism == "entmax")


def fixed_model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Head 0 looks at the previous token, head 1 at the first, head 2 at all, head 3 at nothing."""
    model = causal_lm("entmax", num_layers=1)
    previous, first = torch.eye(6).roll(-1, 1).tril(), torch.zeros(6, 6)
    previous[0, 0] = first[:, 0] = 1.0
    weights = torch.stack([previous, first, torch.ones(6, 6).tril(), torch.zeros(6, 6)])
    mechanism = model.layers[0].self_attention.mechanism
    monkeypatch.setattr(mechanism, "weights", lambda query, key, **_: weights[None].expand(len(query), 4, 6, 6))
    return model


def test_heads_are_named_after_what_they_do(monkeypatch):
    model = fixed_model(monkeypatch)
    found = analyze(model, [Sentences(target=tokens([[1, 2, 3, 4, 5, 6]]))])
    named = {(head.head, head.role): head for head in found.named_heads()}
    assert set(named) == {
        (0, "previous position"),
        (0, "near one-hot"),
        (1, "first token"),
        (1, "near one-hot"),
        (3, "null"),
    }
    assert named[0, "previous position"].score == 1.0
    assert named[0, "previous position"].alpha == found.alphas["layers.0.self"][0]
    strict = analyze(model, [Sentences(target=tokens([[1, 2, 3, 4, 5, 6]]))], thresholds=Thresholds(position=0.3))
    assert (2, "same position") in {(head.head, head.role) for head in strict.named_heads()}
    with pytest.raises(ValueError, match=r"first_token must lie in \(0, 1\], got 0"):
        Thresholds(first_token=0.0)


def test_a_causal_query_has_no_next_position():
    found = analyze(seq2seq(), batches(6))
    causal, free = found.to_dict()["sites"]["decoder.0.self"], found.to_dict()["sites"]["encoder.0.self"]
    for head in causal["confidence"]:
        assert [x is None for x in head] == [offset > 0 for offset in OFFSETS]
    assert all(x is not None for head in free["confidence"] for x in head)


def test_a_head_that_looks_at_itself_is_not_named_after_merging(monkeypatch):
    """Where no word is split there is nothing to merge; where one is, it shows who does."""
    model = fixed_model(monkeypatch)
    itself, before = torch.eye(6), torch.eye(6).roll(-1, 1).tril()
    weights = torch.stack([itself, before, itself, itself])[None]
    monkeypatch.setattr(model.layers[0].self_attention.mechanism, "weights", lambda query, key, **_: weights)
    for words, merging in (([0, 1, 2, 3, 4, 5], []), ([0, 1, 2, 3, 4, 4], [1])):
        target = tokens([[1, 2, 3, 4, 5, 6]], words=torch.tensor([words]))
        found = analyze(model, [Sentences(target=target)])
        assert [head.head for head in found.named_heads() if head.role == "subword merging"] == merging
        site = found.sites["layers.0.self"]
        assert site.subword_merging[0] >= 0.8, "the paper's score is kept"
        assert (site.split_word_merging is None) == (site.split_words == 0) == (not merging)


def test_data_without_a_question_is_told_from_data_without_words():
    asking = [words_of(batch) for batch in batches(6)]
    silent = [replace(b, source=replace(b.source, question=torch.zeros_like(b.source.question))) for b in asking]
    found = [analyze(seq2seq(), some).sites["encoder.0.self"] for some in (asking, silent, batches(6))]
    assert found[0].questions > 0
    assert [site.questions for site in found[1:]] == [0, None]
    assert [site.interrogation for site in found[1:]] == [None, None]


class Single(nn.Module):
    """A model of one attention layer, called in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(cases.VOCAB, 16)
        self.encoder = Attention(16, 4)

    def forward(self, ids: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(ids), key_mask=key_mask)


def test_any_model_of_attention_layers():
    def run(model: nn.Module, batch: Sentences) -> Any:
        return model(batch.target.ids, key_mask=batch.target.mask)

    found = analyze(Single(), [Sentences(target=tokens([[1, 2], [3]]))], run=run, shown=[1])
    assert found.sites["encoder"].rows == 3
    assert torch.equal(found.shown[1].weights["encoder"].to_dense(), torch.ones(1, 4, 1, 1))


@every_mechanism
def test_an_empty_source_has_no_rows(mechanism):
    """Nothing of it is seen: its rows do not count, and the other sentence is as if it were alone."""
    model = seq2seq(mechanism).double()  # one sentence or two: products are summed in another order
    source, target = Tokens(ids=torch.tensor([[3, 4], [5, 6]])), Tokens(ids=torch.tensor([[1, 3], [1, 4]]))
    empty = replace(source, mask=torch.tensor([[True, True], [False, False]]))
    found = analyze(model, [Sentences(source=empty, target=target)], shown=[1])
    alone = Sentences(source=source.map(lambda x: x[:1]), target=target.map(lambda x: x[:1]))
    expected = analyze(model, [alone])
    for site in ("encoder.0.self", "encoder.1.self", "decoder.0.cross"):
        assert flat(found.sites[site].to_dict()) == pytest.approx(flat(expected.sites[site].to_dict()), abs=1e-6)
    assert found.shown[1].weights["decoder.0.cross"].shape == (1, 4, 2, 0)
    assert shown_sentences(found.arrays())[1].source.tolist() == []


def test_the_model_is_left_as_it_was():
    model = seq2seq().train()
    analyze(model, batches(3))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no sentence to analyse"):
        analyze(seq2seq(), [])
    with pytest.raises(ValueError, match="no sentence with the number 6, 99"):
        analyze(seq2seq(), batches(3), shown=[0, 6, 99])


def test_sums_do_not_grow_with_the_sentences():
    """Two batches or eight: the same arrays of the same sizes."""
    model = seq2seq("asentmax")
    few, many = (analyze(model, batches(3) * times).arrays() for times in (1, 4))
    assert {name: array.shape for name, array in few.items()} == {name: array.shape for name, array in many.items()}
    assert all(torch.equal(4 * few[name], many[name]) for name in few)


@pytest.mark.gpu
@every_mechanism
def test_a_gpu_finds_the_same(mechanism):
    found = [analyze(seq2seq(mechanism).to(device), batches(3), shown=[1]) for device in ("cpu", "cuda")]
    results = [flat(x.to_dict()["sites"]) for x in found]
    assert results[1] == pytest.approx(results[0], abs=1e-3)
    assert found[1].shown[1].weights["encoder.0.self"].val.device.type == "cpu"
