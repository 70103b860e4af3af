"""Folders of transformers as our models: the same outputs, the same tokens, and nothing taken on trust."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="what is imported is written by transformers")

from exchange import tiny
from tamis.data.vocabulary import Vocabulary
from tamis.decoding import TextGenerator, Translator
from tamis.exchange.importing import import_folder
from tamis.experiments import read_recipe, train
from tamis.experiments.recipe import read_tables

LANGUAGE = ("gpt2", "llama", "mistral", "qwen2")
ODD = ["ßü 雪 🎈 <|endoftext|>  x", " ", "", "a  b\tc"]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("kind", LANGUAGE)
def test_language_models(kind, tmp_path):
    model, tokenizer = tiny.write_language_model(tmp_path / "theirs", kind)
    ours = TextGenerator.load(import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None))
    ids = torch.randint(model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        close(ours.model(ids), model(ids).logits)
    for text in [*tiny.sentences(20)[0], *ODD]:
        assert ours.vocabulary.encode(text) == tokenizer(text, split_special_tokens=True).input_ids
        assert ours.vocabulary.decode(ours.vocabulary.encode(text)) == text
    prompt = tokenizer("<|endoftext|>The boy", return_tensors="pt").input_ids
    written = model.generate(prompt, do_sample=False, max_new_tokens=6, min_new_tokens=6, suppress_tokens=None)
    found = ours.generate(["The boy"], method="greedy", max_length=6, min_length=7)[0][0]
    assert found.tokens == written[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"attention_bias": True}, {"head_dim": 6}])
def test_llamas_of_other_forms(changes, tmp_path):
    model, _ = tiny.write_language_model(tmp_path / "theirs", "llama", **changes)
    ours = TextGenerator.load(import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None))
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        close(ours.model(ids), model(ids).logits)


def test_linear_rotary_scaling_and_shards(tmp_path):
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}}
    model, _ = tiny.write_language_model(tmp_path / "theirs", "llama", **rope)
    (tmp_path / "theirs" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = TextGenerator.load(import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None))
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        close(ours.model(ids), model(ids).logits)


@pytest.mark.parametrize("same", [False, True])
def test_marian(same, tmp_path):
    model, tokenizer = tiny.write_marian(tmp_path / "theirs", same)
    ours = Translator.load(import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None))
    assert (ours.model.config.source_vocab_size is None) is same
    source, target = tiny.sentences(20)
    fed = tokenizer(source, return_tensors="pt", padding=True)
    ids = torch.randint(model.config.vocab_size - 1, (20, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(**fed, decoder_input_ids=ids).logits
        close(ours.model(fed.input_ids, ids, fed.attention_mask.bool()), theirs)
    for text in [*source, ">>fr<< The boy", ">>xx<< The boy", "ßü 雪"]:
        assert [*ours.source_vocabulary.encode(text), 0] == tokenizer(text).input_ids
    for text in [*target, "ßü 雪"] if not same else source:
        assert [*ours.target_vocabulary.encode(text), 0] == tokenizer(text_target=text).input_ids
    never = [[model.config.pad_token_id]]
    written = model.generate(**fed, num_beams=1, max_length=13, bad_words_ids=never, forced_eos_token_id=None)
    assert ours(source, beam=1, max_length=12) == tokenizer.batch_decode(written, skip_special_tokens=True)


def test_spans_of_imported_vocabularies(tmp_path):
    tiny.write_marian(tmp_path / "marian")
    tiny.write_language_model(tmp_path / "gpt2")
    for kind in ("marian", "gpt2"):
        import_folder(tmp_path / kind, tmp_path / "ours" / kind, lambda text: None)
    marian = Vocabulary.load(tmp_path / "ours" / "marian" / "source.model")
    ids, spans = marian.spans(">>fr<< The boy")
    assert ids == marian.encode(">>fr<< The boy")
    assert spans[0] == (0, 6)
    assert spans[-1][1] == 14
    gpt2 = Vocabulary.load(tmp_path / "ours" / "gpt2" / "vocabulary.model")
    text = "The boy has said ü"
    ids, spans = gpt2.spans(text)
    assert ids == gpt2.encode(text)
    assert all(text[begin:end] == text[begin:end].strip() for begin, end in spans)
    assert [list(map(int, row)) for row in gpt2.encode_batch([text, ""])] == [ids, []]


def recipe_of(folder, changes):
    tables = (folder / "recipe.toml").read_text()
    for before, after in changes.items():
        assert before in tables
        tables = tables.replace(before, after)
    (folder / "recipe.toml").write_text(tables)
    return folder / "recipe.toml"


def test_a_recipe_begins_where_the_imported_model_is(tmp_path):
    """From dense to sparse: the first validation is that of the model, and alphas are learned from there on."""
    tiny.write_language_model(tmp_path / "theirs", "llama")
    ours = import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    for split, count in (("train", 200), ("valid", 20)):
        (tmp_path / f"{split}.txt").write_text("\n".join(tiny.sentences(count)[0]))
    changes = {
        "train.txt": f"{tmp_path}/train.txt",
        "valid.txt": f"{tmp_path}/valid.txt",
        "length = 512": "length = 32",
    }
    options = ["training.steps=2", "training.batch_tokens=64", f"text.folder={tmp_path}/d"]
    recipe = read_recipe(recipe_of(ours, changes), options)
    assert recipe.model["mechanism"] == {"name": "entmax", "start": 1.05}
    trained = TextGenerator.load(train(recipe, tmp_path / "run", "cpu"))
    before, after = TextGenerator.load(ours).model.state_dict(), trained.model.state_dict()
    assert set(after) - set(before) == {f"layers.{layer}.self_attention.mechanism.alpha.raw" for layer in range(2)}
    assert all((after[name] - before[name]).abs().max() < 1e-2 for name in before)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_recipe_of_a_translation_model(tmp_path):
    tiny.write_marian(tmp_path / "theirs")
    ours = import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    recipe = recipe_of(
        ours, {'["train.en", "train.de"]': '"grammar:train:60"', '["valid.en", "valid.de"]': '"grammar:valid:8"'}
    )
    options = ["training.steps=1", "training.batch_tokens=200", f"data.folder={tmp_path}/data"]
    folder = train(read_recipe(recipe, options), tmp_path / "run", "cpu")
    assert Translator.load(folder).model.config.cross_mechanism == {"name": "entmax", "start": 1.05}


def test_another_process_reads_what_was_imported(tmp_path):
    """Nothing of transformers is in it."""
    model, tokenizer = tiny.write_marian(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    text = "import sys; from tamis.decoding import Translator; print(Translator.load(sys.argv[1], 'cpu')"
    text += "(['The boy has said that .'], beam=1, max_length=12)[0]); assert 'transformers' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "ours")], capture_output=True, text=True, check=True
    )
    fed = tokenizer(["The boy has said that ."], return_tensors="pt")
    options = {"max_length": 13, "bad_words_ids": [[model.config.pad_token_id]], "forced_eos_token_id": None}
    written = model.generate(**fed, num_beams=1, **options)
    assert ran.stdout.strip() == tokenizer.decode(written[0], skip_special_tokens=True)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, {"format": "pt"})


TORN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"model_type"'), "is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "must hold a table"),
    "unknown": (lambda folder: change_config(folder, model_type="falcon"), "model_type must be one of"),
    "type": (lambda folder: change_config(folder, model_type=["gpt2"]), "model_type must be one of"),
    "size": (lambda folder: change_config(folder, n_embd="x"), "must hold a number n_embd"),
    "shape": (lambda folder: change_config(folder, vocab_size=400), "must be of shape"),
    "activation": (lambda folder: change_config(folder, activation_function="mish"), "activation_function must be one"),
    "scaling": (lambda folder: change_config(folder, scale_attn_weights=False), "scale_attn_weights must be True"),
    "cut": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000]),
        "cannot be read",
    ),
    "missing": (lambda folder: change_weights(folder, lambda s: s.pop("transformer.h.1.ln_2.bias")), "has no weight"),
    "more": (lambda folder: change_weights(folder, lambda s: s.update(extra=torch.ones(2))), "has no place for: extra"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer.json"),
    "torn tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer"),
    "no end": (lambda folder: change_config(folder, eos_token_id=None), "which token ends a text"),
}


@pytest.mark.parametrize("name", TORN)
def test_torn_folders(name, tmp_path):
    tear, message = TORN[name]
    tiny.write_language_model(tmp_path / "theirs")
    tear(tmp_path / "theirs")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    assert not (tmp_path / "ours").exists()


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_no_pickle_is_loaded(tmp_path):
    tiny.write_language_model(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save({"x": Bomb()}, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="as pickle, which is not loaded"):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    tiny.write_language_model(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"transformer.wte.weight": name}}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no file of safetensors beside it"):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "kind 'llama3' have no place"),
        ({"sliding_window": 8, "model_type": "mistral"}, "sliding window of 8 has no place"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ],
)
def test_llamas_that_ours_cannot_be(changes, message, tmp_path):
    tiny.write_language_model(tmp_path / "theirs", "llama")
    change_config(tmp_path / "theirs", **changes)
    with pytest.raises(ValueError, match=message):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)


def test_what_is_there_is_not_written_over(tmp_path):
    tiny.write_language_model(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is no imported model"):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    (tmp_path / "ours" / "thesis.tex").unlink()
    for _ in range(2):
        import_folder(tmp_path / "theirs", tmp_path / "ours", lambda text: None)
    assert read_tables(tmp_path / "ours" / "recipe.toml")["training"]["start"] == str(tmp_path / "ours")


@pytest.mark.parametrize(
    "content", ['{"version": 1}', '{"version": 9, "kind": "tokenizers"}', "{", '{"version": 1, "kind": 3}']
)
def test_torn_vocabularies(content, tmp_path):
    (tmp_path / "vocabulary.model").write_text(content)
    with pytest.raises(ValueError, match="not the vocabulary of an imported model"):
        Vocabulary.load(tmp_path / "vocabulary.model")
