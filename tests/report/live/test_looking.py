"""One look: the answer, its probability, the weights, and what becomes of them when heads are changed."""

import math

import pytest
import torch

from report.live.models import generator, subjects, translator, vocabulary
from tamis.analysis import altered, capture, capture_sparse
from tamis.analysis.capture import joined
from tamis.models import CausalLM, CausalLMConfig
from tamis.report import show
from tamis.report.live.looking import Limits, Wish, described, look, score_of
from tamis.report.live.subjects import Continuation, Translation

TEXT = "the old man reads"


def test_an_own_answer_has_the_probability_that_decoding_gave_it():
    subject = Translation("one", translator())
    found = look(subject, Wish(text=TEXT), Limits(written=12))
    best = subject.translator.translate([TEXT], max_length=12)[0][0]
    assert found.answer == found.own == best.text
    again = subject.target.encode(best.text).ids[1:]
    if best.finished and subject.target.vocabulary.pieces(again) == best.pieces:  # else it is cut into other pieces
        assert score_of(found.forced) == pytest.approx(best.score, abs=1e-4)
    assert all(0.0 <= chance <= 1.0 for chance in found.forced.chances)


def test_weights_are_those_of_the_model_that_is_made_to_write():
    subject = Translation("one", translator())
    found = look(subject, Wish(text=TEXT, answer="der Mann liest"))
    source, target = (torch.tensor([side.ids]) for side in (found.forced.source, found.forced.target))
    with torch.no_grad(), capture(subject.model) as captured:
        logits = subject.model(source, target)
    assert set(found.weights) == set(captured)
    for site, weights in found.weights.items():
        torch.testing.assert_close(weights.to_dense(), captured[site])
        assert int((captured[site] != 0).sum()) == weights.val.numel()
    labels = [*target[0, 1:].tolist(), vocabulary().eos_id]
    expected = logits[0].log_softmax(-1)[torch.arange(len(labels)), labels]
    assert score_of(found.forced) == pytest.approx(float(expected.sum()), rel=1e-5)


def test_a_continuation_is_scored_after_its_prompt():
    subject = Continuation("text", generator())
    found = look(subject, Wish(text=TEXT, answer=" a newspaper"))
    ids = vocabulary().encode(TEXT + " a newspaper")
    assert found.forced.target.ids == [vocabulary().bos_id, *ids]
    with torch.no_grad():
        logs = subject.model(torch.tensor([found.forced.target.ids]))[0].log_softmax(-1)
    places = range(found.forced.prompt, len(found.forced.target.ids))
    expected = sum(float(logs[place - 1, found.forced.target.ids[place]]) for place in places)
    assert score_of(found.forced) == pytest.approx(expected, rel=1e-5)
    shown = described(subject, found)
    assert [one["row"] for one in shown["chances"]] == [place - 1 for place in places]
    assert shown["causal"] == ["layers.0.self", "layers.1.self"]


@pytest.mark.parametrize("number", range(4))
def test_every_kind_of_model_can_be_asked(number):
    subject = subjects()[number]
    found = look(subject, Wish(text="3 4 5 6" if subject.name == "numbers" else TEXT), Limits(written=6))
    shown = described(subject, found)
    for side in ("source", "target"):
        if shown[side] is not None:
            assert "".join(part for part, _ in shown[side]["segments"]) == (
                TEXT if side == "source" else shown["answer"] if subject.writes == "translation" else
                ("3 4 5 6" if subject.name == "numbers" else TEXT) + shown["answer"]
            )  # fmt: skip
    for site, weights in found.weights.items():
        assert shown["sites"][site]["kept"] == (weights.to_dense() != 0).sum((0, 2, 3)).tolist()


def test_a_silenced_head_changes_the_answer_and_its_probability():
    subject = Translation("one", translator())
    plain = look(subject, Wish(text=TEXT, answer="der Mann"))
    every = tuple((f"decoder.{layer}.cross", head) for layer in (0, 1) for head in range(4))
    changed = look(subject, Wish(text=TEXT, answer="der Mann", silent=every))
    assert changed.before["score"] == pytest.approx(score_of(plain.forced))
    assert changed.before["own"] == plain.own
    assert score_of(changed.forced) != pytest.approx(changed.before["score"], abs=1e-3)
    after = look(subject, Wish(text=TEXT, answer="der Mann"))
    assert score_of(after.forced) == score_of(plain.forced), "the model is as it was"


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "asentmax"])
def test_alphas_of_single_heads(mechanism):
    """Head 1 becomes softmax and head 2 sparsemax; the others of the first layer stay as they were."""
    model = translator(mechanism).model
    source, target = torch.tensor([[5, 6, 7, 8, 9, 2]]), torch.tensor([[1, 5, 6]])
    with torch.no_grad(), capture(model) as before:
        model(source, target)
    with torch.no_grad(), altered(model, alphas={"encoder.0.self": {1: 1.0, 2: 2.0}}), capture(model) as after:
        model(source, target)
    old, new = before["encoder.0.self"], after["encoder.0.self"]
    torch.testing.assert_close(new[:, [0, 3]], old[:, [0, 3]])
    assert (new[:, 1] > 0).all()
    assert (new[:, 2] == 0).sum() >= (old[:, 2] == 0).sum()
    with torch.no_grad(), capture(model) as again:
        model(source, target)
    assert all(torch.equal(again[site], before[site]) for site in before)


def test_what_cannot_be_changed():
    model = translator("rela").model
    with (
        pytest.raises(ValueError, match="has no alpha to change: it is ReLAttention"),
        altered(model, alphas={"encoder.0.self": {0: 1.5}}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"alpha must lie in \[1, 2\], got 3"),
        altered(translator().model, alphas={"encoder.0.self": {0: 3.0}}),
    ):
        pass
    with (
        pytest.raises(ValueError, match="has heads 0 to 3, got 4"),
        altered(translator().model, alphas={"encoder.0.self": {4: 1.5}}),
    ):
        pass
    with pytest.raises(ValueError, match="did you mean"), altered(model, silent=[("encoder.9.self", 0)]):
        pass


def test_a_look_has_limits():
    subject = Translation("one", translator())
    with pytest.raises(ValueError, match="may have 8 tokens here, this one has"):
        look(subject, Wish(text="the old man " * 9), Limits(tokens=8))
    with pytest.raises(ValueError, match="took longer than 1e-09 seconds"):
        look(subject, Wish(text=TEXT), Limits(seconds=1e-9))
    assert not any(module._forward_pre_hooks for module in subject.model.modules())


@pytest.mark.parametrize("part", [3, 8, 64])
@pytest.mark.parametrize("position", ["nape", "rope"])
def test_a_text_read_in_parts_has_the_weights_of_the_whole(part, position):
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=20, embed_dim=32, num_heads=4, ffn_dim=32, num_layers=2, mechanism="entmax", position=position
    )
    model = CausalLM(config).double().eval()
    ids = torch.randint(20, (1, 21))
    with torch.no_grad(), capture(model) as whole:
        model(ids)
    cache = model.new_cache()
    with torch.no_grad(), capture_sparse(model) as parts:
        for some in ids.split(part, 1):
            model(some, cache=cache)
    for site, expected in whole.items():
        found = joined(parts[site])
        assert found.shape == expected.shape
        torch.testing.assert_close(found.to_dense(), expected.float(), atol=1e-6, rtol=1e-5)
        assert found.val.numel() == int((expected != 0).sum())


def test_words_are_aligned():
    subject = Translation("one", translator())
    shown = described(subject, look(subject, Wish(text="the old man", answer="der Mann liest")))
    assert shown["links"]["source"] == ["the", "old", "man"]
    assert shown["links"]["target"] == ["der", "Mann", "liest"]
    expected = subject.translator.align(["the old man"], ["der Mann liest"])[0]
    assert shown["links"]["pairs"] == expected


def test_a_notebook_shows_texts_without_a_server():
    made = show(translator(), [TEXT, "a dog"])
    assert "<iframe" in made._repr_html_()
    assert TEXT in made.html
    numbers = show(subjects()[3].model, torch.tensor([[3, 4, 5], [6, 7, 8]]))
    assert '"source":"3 4 5"' in numbers.html
    with pytest.raises(ValueError, match="needs texts"):
        show(translator())
    with pytest.raises(TypeError, match="got Linear"):
        show(torch.nn.Linear(2, 2), ["text"])


def test_probabilities_of_a_sparse_output_may_be_zero():
    made = translator()
    subject = Translation("one", made)
    made.decoding = type(made.decoding)(alpha=2.0, beam=2, max_length=12)
    found = look(subject, Wish(text=TEXT, answer="newspaper garden sleeps the the"))
    assert min(found.forced.chances) == 0.0
    assert math.isinf(score_of(found.forced))
