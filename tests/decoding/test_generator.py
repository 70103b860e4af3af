import pytest
import torch

from tamis.data.vocabulary import Vocabulary
from tamis.decoding import DecodingConfig, TextGenerator, Translator
from tamis.models import CausalLM, CausalLMConfig

TEXTS = ["a red dog runs", "she reads and reads", "it rains again and again"]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(TEXTS * 3, 44, kind="bpe")


def generator(vocabulary, position="nape", **settings):
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 2}
    model = CausalLM(CausalLMConfig(vocab_size=len(vocabulary) + 3, position=position, **sizes)).eval()
    return TextGenerator(model, vocabulary, DecodingConfig(**({"method": "sample", "max_length": 12} | settings)))


@pytest.mark.parametrize("position", ["rope", "nape", "none"])
def test_greedy_with_the_cache_is_greedy_without(vocabulary, position):
    found = generator(vocabulary, position, method="greedy")
    (only,) = found.generate(["a red dog"])[0]
    ids = [vocabulary.bos_id, *vocabulary.encode("a red dog")]
    banned = [vocabulary.pad_id, vocabulary.bos_id, *range(len(vocabulary), len(vocabulary) + 3)]
    written, score = [], 0.0
    with torch.no_grad():
        while len(written) < 12 and (not written or written[-1] != vocabulary.eos_id):
            logits = found.model(torch.tensor([ids + written]))[0, -1].index_fill(0, torch.tensor(banned), -torch.inf)
            best = logits.log_softmax(-1).max(-1)
            written.append(best.indices.item())
            score += best.values.item()
    assert only.finished == (written[-1] == vocabulary.eos_id)
    assert only.tokens == [token for token in written if token != vocabulary.eos_id]
    assert only.score == pytest.approx(score, rel=1e-4)
    assert only.text.startswith("a red dog")
    assert only.text == vocabulary.decode(ids + written)


def test_draws_depend_on_the_seed_and_the_prompt_alone(vocabulary):
    found = generator(vocabulary)
    alone, again, other = found(["she"]), found(["she", "it rains"])[:1], found(["she"], seed=5)
    assert alone == again
    assert alone != other
    several = found.generate(["she"], n_best=4)[0]
    assert len({draw.text for draw in several}) > 1


def test_settings(vocabulary):
    found = generator(vocabulary)
    assert all(len(draw.tokens) <= 3 for draw in found.generate(["she"], max_length=3, n_best=8)[0])
    long = found.generate(["she"], max_length=30, min_length=30, n_best=3)[0]
    assert all(len(draw.tokens) >= 29 for draw in long)
    likeliest = found.generate(["she"], method="greedy")[0][0].tokens
    assert found.generate(["she"], top_k=1)[0][0].tokens == likeliest
    assert found([""])[0].strip() == found([""])[0]  # a document from its beginning


def test_a_long_prompt_is_read_in_parts(vocabulary, monkeypatch):
    found = generator(vocabulary)
    expected = found(["it rains again " * 20])
    monkeypatch.setattr("tamis.decoding.reading.read.__defaults__", (None, 7))
    assert found(["it rains again " * 20]) == expected


def test_saved_and_loaded(vocabulary, tmp_path):
    found = generator(vocabulary, max_length=5, seed=3)
    found.save(tmp_path)
    loaded = TextGenerator.load(tmp_path, "cpu")
    assert loaded.decoding == found.decoding
    assert loaded(["she", ""]) == found(["she", ""])
    with pytest.raises(ValueError, match="holds a CausalLM, not a Seq2Seq"):
        Translator.load(tmp_path, "cpu")


def test_learned_positions_end(vocabulary):
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 1, "max_length": 6}
    model = CausalLM(CausalLMConfig(vocab_size=len(vocabulary), position="learned", **sizes))
    found = TextGenerator(model, vocabulary)
    assert len(found.generate([""], min_length=50)[0][0].tokens) == 5
    with pytest.raises(ValueError, match="the model has 6 positions, and the prompt fills"):
        found(["it rains again and again"])


def test_mistakes(vocabulary):
    found = generator(vocabulary)
    with pytest.raises(TypeError, match="put it in a list"):
        found("she")
    with pytest.raises(ValueError, match='method is "sample" or "greedy"'):
        found(["she"], method="beam")
    with pytest.raises(ValueError, match="did you mean 'top_p'"):
        found(["she"], topp=0.9)
    torch.manual_seed(0)
    small = CausalLM(CausalLMConfig(vocab_size=5, embed_dim=8, num_heads=2, ffn_dim=8, num_layers=1))
    with pytest.raises(ValueError, match="pieces, and the model embeds 5"):
        TextGenerator(small, vocabulary)
