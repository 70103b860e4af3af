"""Saved folders load with the Auto classes, in processes that did not write them, whole or not at all."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import transformers

import tamis.hf
from hf import own, tiny

AUTO = {"bert": "AutoModelForMaskedLM", "modernbert": "AutoModelForMaskedLM"}
AUTO |= dict.fromkeys(tiny.CAUSAL, "AutoModelForCausalLM") | dict.fromkeys(tiny.SEQ2SEQ, "AutoModelForSeq2SeqLM")
KINDS = ("entmax", "rela", "asentmax")


def write(folder, model, auto, fed):
    """A model with what it is to compute."""
    model.save_pretrained(folder)
    with torch.no_grad():
        logits = model(**fed).logits
    save_file({**fed, "logits": logits.contiguous()}, folder / "inputs.safetensors")
    (folder / "auto.txt").write_text(f"{auto} {type(model).__name__}")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    for number, name in enumerate(tiny.ARCHITECTURES):
        model = tamis.hf.sparsify(tiny.build(name), KINDS[number % 3])
        write(root / name, model, AUTO[name], tiny.inputs(name))
    for kind, ours, auto in (
        ("own_seq2seq", own.translator(), "AutoModelForSeq2SeqLM"),
        ("own_causal_lm", own.generator(), "AutoModelForCausalLM"),
    ):
        ours.save(root / f"_{kind}")
        model, tokenizer = tamis.hf.to_transformers(root / f"_{kind}")
        for file in (root / f"_{kind}").iterdir():
            file.unlink()
        (root / f"_{kind}").rmdir()
        fed = tokenizer(own.lines("source")[:3], return_tensors="pt", padding=True)
        fed = dict(fed)
        if kind == "own_seq2seq":
            fed["decoder_input_ids"] = torch.arange(3, 21).view(3, 6)
        write(root / kind, model, auto, fed)
        tokenizer.save_pretrained(root / kind)
        (root / kind / "tokens.txt").write_text(str(tokenizer("The boy has said ü.").input_ids))
    return root


@pytest.mark.parametrize("how", ["imported", "foreign"])
def test_in_a_process_that_did_not_write_them(how, written):
    script = Path(__file__).with_name("elsewhere.py")
    ran = subprocess.run([sys.executable, str(script), str(written), how], capture_output=True, text=True)
    assert "all is well" in ran.stdout, ran.stderr[-3000:]


def test_the_module_beside_the_weights_is_a_few_lines(written):
    text = (written / "llama" / "tamis_model.py").read_text()
    assert len(text.splitlines()) < 15
    config = json.loads((written / "llama" / "config.json").read_text())
    assert config["model_type"] == "tamis_llama"
    assert config["auto_map"]["AutoModelForCausalLM"] == "tamis_model.LlamaForCausalLM"
    assert config["auto_map"]["AutoModelForSequenceClassification"] == "tamis_model.LlamaForSequenceClassification"


def test_nothing_of_transformers_is_changed(written):
    dense = transformers.LlamaConfig()
    assert transformers.AutoConfig.for_model("llama").__class__ is transformers.LlamaConfig
    small = tiny.config("llama")
    assert type(transformers.AutoModelForCausalLM.from_config(small)) is transformers.LlamaForCausalLM
    assert dense.model_type == "llama"
    assert transformers.LlamaForCausalLM.save_pretrained is transformers.PreTrainedModel.save_pretrained


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_head_of_another_kind(name, written):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(written / name, num_labels=3)
    assert model.config.num_labels == 3
    saved = load_file(written / name / "model.safetensors")
    for path, parameter in model.named_parameters():
        if ".tamis." in path:
            key = path if path in saved else path.split(".", 1)[1]
            assert torch.equal(parameter, saved[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_what_is_learned_of_attention(dtype, written, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "llama", dtype=dtype)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == dtype
    assert {parameter.dtype for parameter in tamis.hf.added_parameters(model)} == {torch.float32}
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.layers[0].self_attn.q_proj.weight.dtype == dtype
    fed = tiny.inputs("llama")
    assert torch.equal(again(**fed).logits, model(**fed).logits)


def test_shards_and_a_device_map_with_a_disk(written, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "qwen3")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "sharded", device_map=places, offload_folder=tmp_path / "offload"
    )
    fed = tiny.inputs("qwen3")
    with torch.no_grad():
        assert torch.equal(loaded(**fed).logits, model(**fed).logits)


def test_the_card_says_how_to_load_it_and_is_not_written_over(written, tmp_path):
    text = (written / "llama" / "README.md").read_text()
    assert "AutoModelForCausalLM" in text
    assert "- entmax alpha=learn start=1.05: layers.0.self, layers.1.self" in text
    assert "Learned alphas" in text
    model = tamis.hf.sparsify(tiny.build("llama"))
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_dense_again_is_saved_as_dense(tmp_path):
    model = tamis.hf.sparsify(tiny.build("llama"))
    assert isinstance(model, transformers.LlamaForCausalLM)
    model.save_pretrained(tmp_path / "sparse")
    tamis.hf.densify(model)
    assert type(model) is transformers.LlamaForCausalLM
    assert type(model.config) is transformers.LlamaConfig
    model.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "auto_map" not in config
    assert "tamis" not in config


def test_a_loaded_model_can_be_made_dense_and_sparse_again(written):
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "gpt2")
    fed = tiny.inputs("gpt2")
    before = model(**fed).logits
    state = {path: tensor for path, tensor in model.state_dict().items() if ".tamis." in path}
    dense = tamis.hf.densify(model)(**fed).logits
    assert not torch.equal(dense, before)
    tamis.hf.sparsify(model, KINDS[tiny.ARCHITECTURES.index("gpt2") % 3])
    model.load_state_dict(state, strict=False)
    assert torch.equal(model(**fed).logits, before)


def test_whole_models_are_pickled_by_name():
    model = tamis.hf.sparsify(tiny.build("bert"), alpha=1.5)
    assert pickle.loads(pickle.dumps(type(model))) is type(model)
    assert pickle.loads(pickle.dumps(type(model.config))) is type(model.config)
    with pytest.raises(AttributeError, match="no class 'LlamaForNothing'"):
        tamis.hf.class_named("LlamaForNothing")


def test_an_explicit_mechanism_reaches_the_auto_classes(tmp_path):
    from tamis.mechanisms import EntmaxAttention

    model = tamis.hf.sparsify(tiny.build("llama"), EntmaxAttention(4, 1.3))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pass mechanism="):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, mechanism=lambda site: EntmaxAttention(site.num_heads, 1.3)
    )
    fed = tiny.inputs("llama")
    assert torch.equal(loaded(**fed).logits, model(**fed).logits)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def _change(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _without(folder, wanted):
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if wanted not in k}, path, {"format": "pt"})


def _pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"x": Bomb()}, folder / "pytorch_model.bin")


def _cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


TORN = {
    "no settings": (lambda folder: _change(folder, tamis=None), "holds no sparse attention"),
    "settings of a kind": (lambda folder: _change(folder, tamis=[1]), "holds no sparse attention"),
    "no sites": (lambda folder: _change(folder, tamis={"version": 1}), "must name a mechanism for each site"),
    "sites of a kind": (
        lambda folder: _change(folder, tamis={"version": 1, "sites": {"layers.0.self": 3}}),
        "must name",
    ),
    "fewer sites": (lambda folder: _change(folder, tamis={"version": 1, "sites": {}}), "no settings for layers.0.self"),
    "unknown": (
        lambda folder: _change(
            folder, tamis={"version": 1, "sites": {f"layers.{n}.self": {"name": "os.system"} for n in (0, 1)}}
        ),
        "mechanism must be one of",
    ),
    "missing": (lambda folder: _without(folder, "layers.1.self_attn.tamis"), "has no model.layers.1.self_attn.tamis"),
    "pickle": (_pickled, "model.safetensors"),
    "cut": (_cut, "(?i)incomplete|header|deserializ"),
}


@pytest.mark.parametrize("name", TORN)
def test_torn_and_hostile_folders(name, tmp_path):
    tear, message = TORN[name]
    tamis.hf.sparsify(tiny.build("llama")).save_pretrained(tmp_path)
    tear(tmp_path)
    with pytest.raises(Exception, match=message) as found:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(found.value, ValueError | OSError) or "Safetensor" in type(found.value).__name__


def test_pickle_on_demand_is_refused(written):
    with pytest.raises(ValueError, match="safetensors alone"):
        transformers.AutoModelForCausalLM.from_pretrained(written / "llama", use_safetensors=False)


@pytest.mark.parametrize("missing", ["model.encoder.0", "model.embedding"])
def test_our_own_models_are_loaded_whole(missing, written, tmp_path):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(written / "own_seq2seq")
    model.save_pretrained(tmp_path)
    _without(tmp_path, missing)
    with pytest.raises(ValueError, match=f"has no {missing}"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
