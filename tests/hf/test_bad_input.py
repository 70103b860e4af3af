"""What cannot be done is an error that says why, never something else done in silence."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import transformers
from safetensors.torch import load_file, save_file

import tamis.hf
from hf import tiny
from tamis.mechanisms import EntmaxAttention, LearnedAlpha, ReLAttention

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("name", ["tamis", "tamis_rela", "tamis_asentmax"])
def test_mechanisms_with_parameters_by_name_alone(name):
    with pytest.raises(RuntimeError, match=r"call tamis\.hf\.sparsify first"):
        tiny.build("llama", name)(**tiny.inputs("llama"))


def test_not_a_model_of_transformers():
    with pytest.raises(TypeError, match=r"must be a transformers\.PreTrainedModel, got Linear"):
        tamis.hf.sparsify(torch.nn.Linear(2, 2))


def test_an_architecture_without_the_interface():
    model = transformers.XLNetModel(
        transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=16)
    )
    with pytest.raises(ValueError, match=r"XLNetModel has no attention .* not supported"):
        tamis.hf.sparsify(model)


def with_sinks(implementation):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(**SMALL, **experts)
    config._attn_implementation = implementation
    return transformers.GptOssForCausalLM(config).eval()


def test_sinks():
    with pytest.raises(ValueError, match="attention sinks, which sparse attention cannot honour"):
        tamis.hf.sparsify(with_sinks("eager"))
    with pytest.raises(ValueError, match=r"attention sinks \(s_aux\)"):
        with_sinks("tamis_entmax")(torch.ones(1, 4, dtype=torch.long))


def with_soft_caps(implementation):
    config = transformers.Gemma2Config(**SMALL)
    config._attn_implementation = implementation
    return transformers.Gemma2ForCausalLM(config).eval()


def test_soft_caps():
    with pytest.raises(ValueError, match="a soft cap of its scores, which sparse attention cannot honour"):
        tamis.hf.sparsify(with_soft_caps("eager"))
    with pytest.raises(ValueError, match=r"a soft cap of the scores \(softcap\)"):
        with_soft_caps("tamis_entmax")(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mechanism": "entmx"}, ValueError, "did you mean 'entmax'"),
        ({"mechanism": 3}, TypeError, "a name, a Mechanism or a function"),
        ({"mechanism": "rela", "alpha": 1.5}, ValueError, "does not take"),
        ({"mechanism": "rela", "variant": "x"}, ValueError, "variant must be one of"),
        ({"alpha": 3.0}, ValueError, r"alpha must lie in \[1, 2\]"),
        ({"alpha": "lern"}, ValueError, "alpha must be"),
        ({"alpha": torch.ones(4)}, TypeError, "alpha must be a number"),
        ({"alpha": 1.5, "start": 1.2}, ValueError, "start is where the learned alphas"),
        ({"start": 2.5}, ValueError, "init must be"),
        ({"mechanism": "asentmax", "init": object()}, TypeError, "plain values"),
        ({"mechanism": EntmaxAttention(3)}, ValueError, "num_heads=3, but the layer has 4"),
        ({"mechanism": ReLAttention(64, 4)}, ValueError, "4 \\* 8 channels"),
        ({"mechanism": EntmaxAttention(4), "alpha": 1.5}, ValueError, "an object has its own"),
        ({"mechanism": lambda site: "entmax"}, TypeError, "must return a Mechanism"),
        ({"layers": [5]}, ValueError, r"layers must be some of \[0, 1\], got \[5\]"),
        ({"layers": []}, ValueError, "layers must be some of"),
        ({"layers": lambda site: False}, ValueError, r"chose none of layers\.0\.self"),
    ],
)
def test_arguments_of_sparsify(arguments, error, message):
    model, fed = tiny.build("llama"), tiny.inputs("llama")
    before = model(**fed).logits
    with pytest.raises(error, match=message):
        tamis.hf.sparsify(model, **arguments)
    assert torch.equal(model(**fed).logits, before)  # nothing was changed


def test_nothing_to_take_out():
    with pytest.raises(ValueError, match="no sparse attention to take out"):
        tamis.hf.densify(tiny.build("llama"))


def test_loading_a_dense_model(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no model with sparse attention"):
        tamis.hf.from_pretrained(tmp_path)


def test_loading_settings_of_another_version(tmp_path):
    tamis.hf.sparsify(tiny.build("llama")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="settings of version 1, got 2"):
        tamis.hf.from_pretrained(tmp_path)


def test_loading_an_architecture_nobody_knows(tmp_path):
    tamis.hf.sparsify(tiny.build("llama")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "AlpacaForCausalLM"))
    with pytest.raises(ValueError, match=r"AlpacaForCausalLM.*pass model_class="):
        tamis.hf.from_pretrained(tmp_path)


def test_loading_without_our_tensors(tmp_path):
    tamis.hf.sparsify(tiny.build("llama")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "layers.1.self_attn.tamis" not in k}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no model\.layers\.1\.self_attn\.tamis\.mechanism\.alpha\.raw"):
        tamis.hf.from_pretrained(tmp_path)


def own_range(site):
    return EntmaxAttention(site.num_heads, LearnedAlpha(site.num_heads, low=1.2, high=1.6))


def test_objects_have_to_be_made_again(tmp_path):
    model, fed = tamis.hf.sparsify(tiny.build("llama"), own_range), tiny.inputs("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="EntmaxAttention as an object: pass mechanism="):
        tamis.hf.from_pretrained(tmp_path)
    loaded = tamis.hf.from_pretrained(tmp_path, mechanism=own_range)
    assert torch.equal(loaded(**fed).logits, model(**fed).logits)


def test_every_layer_gets_its_own_copy_of_an_object():
    model = tamis.hf.sparsify(tiny.build("llama"), EntmaxAttention(4))
    assert len({id(parameter) for parameter in tamis.hf.added_parameters(model)}) == tiny.LAYERS


@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_additive_masks_hide_as_boolean_ones_do(mechanism):
    model, fed = tamis.hf.sparsify(tiny.build("llama"), mechanism), tiny.inputs("llama")
    visible = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    visible[0, :, :, :2] = False
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~visible, lowest)
    boolean = model(input_ids=fed["input_ids"], attention_mask=visible).logits
    found = model(input_ids=fed["input_ids"], attention_mask=additive).logits
    torch.testing.assert_close(found, boolean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [0, "all"])
def test_layers_that_are_no_numbers(layers):
    with pytest.raises(TypeError, match="layers must be numbers of layers"):
        tamis.hf.sparsify(tiny.build("llama"), layers=layers)
