"""Models of transformers in the live page: any architecture, sparse or dense, with a tokenizer or with numbers."""

import resource
import time

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny
from tamis.analysis import capture
from tamis.report import show
from tamis.report.live.hugging_face import HuggingFace, load
from tamis.report.live.looking import Limits, Wish, described, look, score_of
from tamis.report.live.models import subject_of


def tokenizer():
    """Of words, as transformers has them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *"abcdefgh", "<unk>"])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("mechanism", ["entmax", None], ids=["sparse", "dense"])
def test_every_kind_can_be_asked(name, mechanism):
    model = tiny.build(name)
    if mechanism:
        tamis.hf.sparsify(model, mechanism, alpha=1.5)
    subject = HuggingFace("one", model)
    assert subject.writes == {"bert": "nothing", "t5": "translation"}.get(name, "continuation")
    found = look(subject, Wish(text="3 4 5 6"), Limits(written=3))
    shown = described(subject, found)
    assert shown["sites"]
    if name in ("llama", "gpt2"):
        assert found.answer.startswith(" ")
        ids = torch.tensor([[int(number) for number in f"3 4 5 6{found.answer}".split()]])
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)
        expected = sum(float(logs[place - 1, ids[0, place]]) for place in range(4, ids.shape[1]))
        assert score_of(found.forced) == pytest.approx(expected, abs=1e-3)
    dense = model.config._attn_implementation
    assert dense == ("tamis" if mechanism else "sdpa"), "a dense model stays as it was"


def test_text_goes_through_a_tokenizer_and_unknown_words_are_shown():
    subject = subject_of(tiny.build("llama"), "one", tokenizer())
    shown = described(subject, look(subject, Wish(text="a  strange b"), Limits(written=2)))
    text = "".join(part for part, _ in shown["target"]["segments"])
    assert text.startswith("a  strange b")
    assert "strange" in [part for part, token in shown["target"]["segments"] if token is not None]
    assert "strange" in show(tiny.build("llama"), ["a strange b"], tokenizer=tokenizer()).html
    ids = tokenizer()(["a b c"], return_tensors="pt")
    assert '"source":"3 4 5"' in show(tiny.build("llama"), ids).html


@pytest.mark.parametrize("mechanism", ["entmax", None], ids=["sparse", "dense"])
def test_a_folder_is_loaded_without_a_network(mechanism, tmp_path):
    model = tiny.build("llama")
    if mechanism:
        tamis.hf.sparsify(model, mechanism, alpha="learn", start=1.4)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    subject = load(tmp_path, "saved", "cpu")
    direct = subject_of(model, "direct", tokenizer())
    seen = [look(one, Wish(text="a b c d", answer=" e"), Limits(written=2)) for one in (subject, direct)]
    assert score_of(seen[0].forced) == pytest.approx(score_of(seen[1].forced), abs=1e-5)
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
        load(tmp_path / "nothing", "none")


def text_of(length):
    ids = torch.randint(3, tiny.VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))
    return ids, " ".join(map(str, ids.tolist()))


def llama():
    return tamis.hf.sparsify(tiny.build("llama"), "entmax", alpha=2.0)


@pytest.mark.slow
def test_long_maps_are_those_of_dense_weights():
    ids, text = text_of(2048)
    model = llama()
    found = look(HuggingFace("llama", model), Wish(text=text, answer=""), Limits(seconds=600))
    with torch.no_grad(), capture(model) as dense:
        model(ids[None])
    for site, weights in found.weights.items():
        torch.testing.assert_close(weights.to_dense(), dense[site])
        assert weights.val.numel() == int((dense[site] != 0).sum())


@pytest.mark.slow
def test_a_map_of_32768_tokens_takes_memory_linear_in_its_non_zeros():
    _, text = text_of(32768)
    subject = HuggingFace("llama", llama())
    look(subject, Wish(text=text[:4000], answer=""), Limits(seconds=600))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    found = look(subject, Wish(text=text, answer=""), Limits(tokens=32768, seconds=3000))
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    kept = sum(weights.val.numel() for weights in found.weights.values())
    print(f"{time.monotonic() - began:.0f} s, {more:.0f} MB more, {kept:,} non-zeros")
    assert {weights.shape for weights in found.weights.values()} == {(1, 4, 32768, 32768)}
    assert more < 1024, "one head's dense weights alone would take 4096 MB"
