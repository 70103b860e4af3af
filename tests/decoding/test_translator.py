"""The translator: order, empty and over-long lines, folders whole and broken, attention and alignments."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tamis.data.vocabulary import Vocabulary
from tamis.decoding import CrossAttention, DecodingConfig, Translator, beam_search
from tamis.decoding.search import Hypothesis
from tamis.models import Seq2Seq, Seq2SeqConfig
from tamis.native import product

SENTENCES = [
    "a red dog runs",
    "the old house by the river is empty now",
    "she reads",
    "two men and a woman walk along a long street in the evening",
    "no",
    "it rains again and again",
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(SENTENCES * 3, 60, kind="bpe")


@pytest.fixture(scope="module")
def other_vocabulary() -> Vocabulary:
    return Vocabulary.train([text[::-1] for text in SENTENCES] * 3, 50, kind="bpe")


def model_for(
    source: Vocabulary, target: Vocabulary | None = None, mechanism: Any = "entmax", **options: Any
) -> Seq2Seq:
    torch.manual_seed(0)
    own = {} if target is None else {"source_vocab_size": len(source)}
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 3, "max_length": 64}
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    config = {"vocab_size": len(target or source), "pad_id": source.pad_id, **own, **sizes, **chosen, **options}
    return Seq2Seq(Seq2SeqConfig(**config)).eval()


@pytest.fixture
def translator(vocabulary: Vocabulary) -> Translator:
    return Translator(model_for(vocabulary), vocabulary, decoding=DecodingConfig(beam=3, max_length=12))


# ---------------------------------------------------------------------------------------------------------------
# Translating


def test_results_are_those_of_beam_search_in_the_order_of_the_input(translator: Translator, vocabulary: Vocabulary):
    texts = translator(SENTENCES)
    for sentence, text in zip(SENTENCES, texts, strict=True):
        source = torch.tensor([[*vocabulary.encode(sentence), vocabulary.eos_id]])
        ids = {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id}
        banned = [vocabulary.pad_id, vocabulary.bos_id]
        ((best,),) = beam_search(translator.model, source, config=translator.decoding, banned_ids=banned, **ids)
        assert text == vocabulary.decode(best.tokens)


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_batches_change_nothing(vocabulary: Vocabulary, method: str):
    decoding = DecodingConfig(method=method, max_length=12)
    whole, single = (
        Translator(model_for(vocabulary), vocabulary, decoding=decoding, batch_tokens=tokens) for tokens in (4096, 1)
    )
    assert whole(SENTENCES) == single(SENTENCES)
    assert whole(SENTENCES[::-1]) == single(SENTENCES)[::-1]


def test_empty_lines_are_empty(translator: Translator):
    found = translator.translate(["", SENTENCES[0], "   ", "\t\n"], n_best=2)
    assert [len(x) for x in found] == [1, 2, 1, 1]
    assert [x[0].text for x in found if len(x) == 1] == ["", "", ""]
    assert found[0][0].finished
    assert translator([]) == []


def test_n_best_with_pieces_and_scores(translator: Translator, vocabulary: Vocabulary):
    (found,) = translator.translate([SENTENCES[1]], n_best=3)
    assert len(found) == 3
    for translation in found:
        assert vocabulary.pieces(vocabulary.encode("")) == []
        assert all(isinstance(piece, str) for piece in translation.pieces)
        assert translation.score <= 0.0


def test_overrides_are_settings(translator: Translator):
    assert translator(SENTENCES, beam=1) == translator(SENTENCES, method="greedy")
    with pytest.raises(ValueError, match="did you mean 'beam'"):
        translator(SENTENCES, beams=3)
    assert translator.decoding.beam == 3


def test_over_long_sentences_are_cut_with_a_warning(translator: Translator, caplog: Any):
    long = " ".join(SENTENCES * 20)
    with caplog.at_level(logging.WARNING, "tamis"):
        texts = translator([SENTENCES[0], long], max_source_length=10)
    assert len(texts) == 2
    assert re.search(r"sentence 2 has \d+ subwords: cut to 9", caplog.text)
    assert "sentence 1" not in caplog.text


def test_learned_positions_bound_the_source(vocabulary: Vocabulary):
    translator = Translator(model_for(vocabulary, position="learned"), vocabulary)
    long = " ".join(SENTENCES * 20)
    assert len(translator([long, "no"])) == 2
    assert translator.attention([long], [long])[0].weights.shape[2:] == (64, 64)


def test_what_would_end_a_line_or_a_column_is_a_space():
    spelling = Vocabulary.train(SENTENCES * 3, 320, kind="bpe", byte_fallback=True)
    translator = Translator(model_for(spelling), spelling)
    pieces = ["▁dog", "<0x0A>", "▁runs", "<0x09>", "<0x0D>", "a"]
    known = spelling.pieces(range(len(spelling)))
    tokens = [known.index(piece) for piece in pieces if piece in known]
    assert {"\n", "\t", "\r"} <= set(spelling.decode(tokens))
    found = translator._translation(Hypothesis(tokens, -1.0, -1.0, True))
    assert found.text == spelling.decode(tokens).replace("\n", " ").replace("\t", " ").replace("\r", " ")
    assert found.pieces == spelling.pieces(tokens)


def test_progress_is_told(translator: Translator):
    seen: list[tuple[int, int]] = []
    small = Translator(translator.model, translator.source_vocabulary, batch_tokens=12)
    small([*SENTENCES, ""], progress=lambda done, total: seen.append((done, total)), max_length=3)
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[-1] == (7, 7)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_text_is_translated(translator: Translator, sentences: list[str]):
    found = translator(sentences, beam=2, max_length=3)
    assert len(found) == len(sentences)


@pytest.mark.parametrize("sentences", ["one string", [1], [None], [b"bytes"]])
def test_what_is_not_a_list_of_strings_is_refused(translator: Translator, sentences: Any):
    with pytest.raises(TypeError, match="strings"):
        translator(sentences)


def test_rows_of_the_output_layer_without_a_piece_are_never_written(vocabulary: Vocabulary):
    model = model_for(vocabulary, vocab_size=len(vocabulary) + 40, tie_embeddings=False)
    with torch.no_grad():
        model.output.weight[len(vocabulary) :].mul_(50.0)
    for method in ("beam", "sample"):
        assert len(Translator(model, vocabulary)(SENTENCES, method=method, max_length=5)) == len(SENTENCES)


# ---------------------------------------------------------------------------------------------------------------
# Folders


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_saved_translates_alike(vocabulary, other_vocabulary, shared: bool, tmp_path: Path):
    target = None if shared else other_vocabulary
    decoding = DecodingConfig(beam=2, max_length=9, length_penalty=0.6)
    translator = Translator(model_for(vocabulary, target), vocabulary, target, decoding)
    translator.save(tmp_path / "run" / "model")
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    own = {"vocabulary.model"} if shared else {"source.model", "target.model"}
    assert names == {"config.json", "model.safetensors", "decoding.json", "checksums.json", *own}
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        loaded = Translator.load(folder, "cpu")
        assert loaded.decoding == decoding
        assert loaded.translate(SENTENCES) == translator.translate(SENTENCES)
        assert not loaded.model.training


def test_saving_again_leaves_no_vocabulary_behind(vocabulary, other_vocabulary, tmp_path: Path):
    Translator(model_for(vocabulary), vocabulary).save(tmp_path)
    Translator(model_for(vocabulary, other_vocabulary), vocabulary, other_vocabulary).save(tmp_path)
    loaded = Translator.load(tmp_path, "cpu")
    assert loaded.target_vocabulary.fingerprint == other_vocabulary.fingerprint


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "vocabulary.model"])
def test_a_missing_file_is_named(translator: Translator, missing: str, tmp_path: Path):
    translator.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(missing)):
        Translator.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocabulary.model", "decoding.json"])
@pytest.mark.parametrize("content", [b"", b"garbage \xff\x00", b"[1, 2]", b'{"beam": "many"}', b'{"bean": 3}'])
def test_garbage_is_named(translator: Translator, name: str, content: bytes, tmp_path: Path):
    translator.save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        Translator.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocabulary.model", "decoding.json"])
def test_a_changed_byte_is_noticed(translator: Translator, name: str, tmp_path: Path):
    translator.save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-4] ^= 1  # the last weight; the last digit of a setting
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is not as it was written; .* remove .*checksums.json"):
        Translator.load(tmp_path)
    (tmp_path / "checksums.json").unlink()  # as in folders of before: nobody can tell


@pytest.mark.parametrize("name", ["config.json", "decoding.json"])
def test_deep_nesting_is_a_clear_error(translator: Translator, name: str, tmp_path: Path):
    translator.save(tmp_path)
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=re.escape(name)):
        Translator.load(tmp_path)


def test_a_device_that_is_not_here(translator: Translator, tmp_path: Path):
    translator.save(tmp_path)
    with pytest.raises(ValueError, match="device must be one that is here: cpu"):
        Translator.load(tmp_path, "foo")


def test_without_decoding_json_the_defaults_hold(translator: Translator, tmp_path: Path):
    translator.save(tmp_path)
    (tmp_path / "decoding.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"decoding\.json is missing"):
        Translator.load(tmp_path, "cpu")
    (tmp_path / "checksums.json").unlink()  # on purpose
    assert Translator.load(tmp_path, "cpu").decoding == DecodingConfig()


def test_folders_that_hold_no_model(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        Translator.load(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(FileNotFoundError, match="trained to its end"):
        Translator.load(tmp_path)


def test_a_vocabulary_that_does_not_fit_is_refused(vocabulary, other_vocabulary, tmp_path: Path):
    with pytest.raises(ValueError, match="vocabulary has 60 pieces, and the model embeds 50"):
        Translator(model_for(other_vocabulary), vocabulary)
    with pytest.raises(ValueError, match="pads with 0, and the model with 3"):
        Translator(model_for(vocabulary, **{"mechanism": "softmax", "pad_id": 3}), vocabulary)
    Translator(model_for(other_vocabulary), other_vocabulary).save(tmp_path)
    vocabulary.save(tmp_path / "vocabulary.model")
    with pytest.raises(ValueError, match=str(tmp_path)):
        Translator.load(tmp_path)


def test_decoding_json_is_plain(translator: Translator, tmp_path: Path):
    translator.save(tmp_path)
    assert json.loads((tmp_path / "decoding.json").read_text()) == translator.decoding.to_dict()


# ---------------------------------------------------------------------------------------------------------------
# Attention and alignments


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
def test_attention_is_that_of_each_pair_alone(vocabulary, mechanism: str):
    translator = Translator(model_for(vocabulary, mechanism=mechanism), vocabulary)
    targets = SENTENCES[::-1]
    for found, source, target in zip(translator.attention(SENTENCES, targets), SENTENCES, targets, strict=True):
        ids, spans = vocabulary.spans(source)
        assert found.source == [*vocabulary.pieces(ids), "</s>"]
        assert found.source_spans == spans
        assert found.weights.shape == (3, 2, len(found.target), len(found.source))
        assert not found.weights.is_inference()
        (alone,) = translator.attention([source], [target])
        torch.testing.assert_close(alone.weights, found.weights, atol=1e-5, rtol=1e-4)
        if mechanism != "rela":
            torch.testing.assert_close(found.weights.sum(-1), torch.ones(found.weights.shape[:-1]))


def test_alignments_are_pairs_of_words(translator: Translator):
    targets = [*SENTENCES[1:], ""]
    links = translator.align(SENTENCES, targets)
    for found, source, target in zip(links, SENTENCES, targets, strict=True):
        assert found == sorted(set(found))
        assert all(i < len(source.split()) and j < len(target.split()) for i, j in found)
    assert links[-1] == []


def attention_of(weights: list[list[float]]) -> CrossAttention:
    """ "ab cd" in the subwords "a", "b", " cd" and "uv w" in "uv", " w"; one layer and one head."""
    return CrossAttention(
        source=["a", "b", " cd", "</s>"],
        target=["uv", " w", "</s>"],
        source_spans=[(0, 1), (1, 2), (3, 5)],
        target_spans=[(0, 2), (3, 4)],
        weights=torch.tensor(weights)[None, None],
    )


def test_links_follow_the_largest_weight():
    found = attention_of([[0.1, 0.7, 0.2, 0.0], [0.3, 0.0, 0.6, 0.1], [1.0, 0.0, 0.0, 0.0]])
    assert found.links("ab cd", "uv w") == [(0, 0), (1, 1)]
    assert found.links("ab cd", "uv w", shifted=True) == [(0, 1), (1, 0)]


def test_null_rows_and_the_end_make_no_link():
    found = attention_of([[0.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.2, 0.7], [0.0, 0.0, 0.0, 0.0]])
    assert found.links("ab cd", "uv w") == []


def test_the_layer_is_the_last_but_one_unless_said():
    layers = [[[1.0, 0.0, 0.0, 0.0]] * 3, [[0.0, 0.0, 1.0, 0.0]] * 3, [[0.0, 0.0, 0.0, 1.0]] * 3]
    one = attention_of(layers[0])
    found = CrossAttention(**{**vars(one), "weights": torch.tensor(layers)[:, None]})
    assert found.links("ab cd", "uv w") == [(1, 0), (1, 1)]
    assert found.links("ab cd", "uv w", layer=0) == [(0, 0), (0, 1)]
    assert found.links("ab cd", "uv w", layer=-1) == []
    with pytest.raises(ValueError, match="layer"):
        found.links("ab cd", "uv w", layer=3)


def test_attention_needs_as_many_targets(translator: Translator):
    with pytest.raises(ValueError, match="as many"):
        translator.align(SENTENCES, SENTENCES[1:])


@pytest.mark.skipif(product.obstacle() is not None, reason=str(product.obstacle()))
def test_a_quantised_translator_keeps_its_model(vocabulary: Vocabulary, tmp_path: Path):
    """Only searches are quantised: what is saved and what aligns is the model itself."""
    model = model_for(vocabulary)
    quantised = Translator(model, vocabulary, quantize="int8")
    assert len(quantised(SENTENCES)) == len(SENTENCES)
    quantised.save(tmp_path)
    assert Translator.load(tmp_path, "cpu")(SENTENCES) == Translator(model, vocabulary)(SENTENCES)
    assert quantised.align(SENTENCES, SENTENCES) == Translator(model, vocabulary).align(SENTENCES, SENTENCES)
    with pytest.raises(ValueError, match="int8"):
        Translator(model, vocabulary, quantize="int4")
