"""The traps of transformers' attention interface, one test or more for each letter."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import transformers

import tamis.hf
from hf import tiny
from tamis.hf.interface import BY_NAME, NEEDS_PARAMETERS, attention_forward, mask_of_tokens

NAMES = (BY_NAME, *NEEDS_PARAMETERS)


def left_padded(fed, by=3):
    return {key: torch.nn.functional.pad(x, (by, 0)) for key, x in fed.items()}


def test_a_every_name_has_its_mask_function():
    for name in NAMES:
        assert transformers.AttentionMaskInterface()[name] is mask_of_tokens


def test_a_padding_leaks_without_a_mask_function_but_not_with_ours():
    def unmasked(*args, **kwargs):
        return attention_forward(*args, implementation=BY_NAME, **kwargs)

    transformers.AttentionInterface.register("no_mask_function", unmasked)
    fed = tiny.inputs("llama")
    padded = left_padded(fed)
    for name, leaks in (("no_mask_function", True), (BY_NAME, False)):
        model = tiny.build("llama", name)
        found, expected = model(**padded).logits[:, 3:], model(**fed).logits
        assert torch.allclose(found, expected, atol=1e-4) is not leaks


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_b_no_mask_on_a_causal_module_still_hides_what_comes_later(name):
    model, fed = tiny.build(name, BY_NAME), tiny.inputs(name)
    before = model(**fed).logits
    fed["input_ids"][:, -1] += 1
    fed["input_ids"][:, -1] %= tiny.VOCABULARY
    after = model(**fed).logits
    torch.testing.assert_close(after[:, :-1], before[:, :-1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[:, -1], before[:, -1], atol=1e-2)


def test_b_in_the_prefill_of_a_static_cache_the_first_query_sits_on_the_first_key():
    module = tiny.build("llama", BY_NAME).model.layers[0].self_attn
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    out, weights = attention_forward(module, query, key, value, None, implementation=BY_NAME, output_attentions=True)
    mask = torch.ones(3, 7, dtype=torch.bool).tril()
    expected = tamis.entmax_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert weights.shape == (2, 4, 3, 7)
    assert (weights[..., 3:] == 0).all()


def test_b_a_single_query_sees_all_keys():
    module = tiny.build("llama", BY_NAME).model.layers[0].self_attn
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    out, _ = attention_forward(module, query, key, value, None, implementation=BY_NAME)
    torch.testing.assert_close(out, tamis.entmax_attention(query, key, value, enable_gqa=True).transpose(1, 2))


def test_c_no_name_says_flash():
    assert not [name for name in NAMES if "flash" in name]


def test_d_weights_are_asked_for_per_call_not_in_the_config():
    model = tiny.build("llama", "eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="pass output_attentions=True"):
        tamis.hf.sparsify(model)
    model.config.output_attentions = False
    tamis.hf.sparsify(model)
    with pytest.raises(ValueError, match="not supported"):
        model.config.output_attentions = True
    assert len(model(**tiny.inputs("llama"), output_attentions=True).attentions) == tiny.LAYERS


def test_e_the_implementation_is_not_in_config_json_but_our_settings_are(tmp_path):
    tamis.hf.sparsify(tiny.build("llama"), alpha=1.5).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "attn_implementation" not in json.dumps(written)
    assert written["tamis"]["sites"]["layers.1.self"] == {"name": "entmax", "alpha": 1.5}
    assert tamis.hf.from_pretrained(tmp_path).config._attn_implementation == "tamis"


@pytest.mark.parametrize("name", NAMES)
def test_e_a_saved_model_is_never_taken_for_another_mechanism(name, tmp_path):
    model = tamis.hf.sparsify(tiny.build("llama"), "rela")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    fed = tiny.inputs("llama")
    assert torch.equal(loaded(**fed).logits, model(**fed).logits)


@pytest.mark.parametrize("name", NAMES)
def test_e_nor_is_one_in_the_first_form(name, tmp_path):
    tiny.save_in_first_form(tamis.hf.sparsify(tiny.build("llama"), "rela"), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with pytest.raises(RuntimeError, match=r"tamis\.hf\.from_pretrained"):
        model(**tiny.inputs("llama"))


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_f_added_parameters_survive_where_transformers_drops_them(tmp_path, shard, caplog):
    model = tamis.hf.sparsify(tiny.build("t5"), start="normal")
    tiny.save_in_first_form(model, tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard == "10KB")
    dropped = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert not [name for name in dropped.state_dict() if ".tamis." in name]
    loaded = tamis.hf.from_pretrained(tmp_path)
    for (name, saved), (other, found) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(saved, found)


def test_f_loading_says_nothing_of_unexpected_tensors(tmp_path, capfd):
    tamis.hf.sparsify(tiny.build("llama")).save_pretrained(tmp_path)
    capfd.readouterr()
    tamis.hf.from_pretrained(tmp_path)
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    assert transformers.LlamaForCausalLM._keys_to_ignore_on_load_unexpected is None


@pytest.mark.parametrize(("saved", "loaded"), [("LlamaForCausalLM", "LlamaModel"), ("LlamaModel", "LlamaForCausalLM")])
def test_f_with_and_without_a_head(tmp_path, saved, loaded):
    torch.manual_seed(0)
    model = tamis.hf.sparsify(getattr(transformers, saved)(tiny.config("llama")), start="normal")
    model.save_pretrained(tmp_path)
    other = tamis.hf.from_pretrained(tmp_path, model_class=getattr(transformers, loaded))
    for ours, theirs in zip(tamis.hf.added_parameters(model), tamis.hf.added_parameters(other), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_g_fully_masked_rows_give_zeros_and_finite_gradients(name, mechanism):
    model = tamis.hf.sparsify(tiny.build(name), mechanism).train()
    seen = []
    for _, part in tamis.hf.sites.parts_of(model):
        part.register_forward_hook(lambda module, args, output: seen.append(output))
    fed = tiny.inputs(name)
    fed["attention_mask"][0] = 0  # nothing to see in a whole sentence
    model(**fed).logits.square().mean().backward()
    assert (seen[0][0] == 0).all()
    assert not (seen[0][1] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_h_every_layer_may_have_its_own_mechanism():
    model = tiny.build("llama")
    before = model(**tiny.inputs("llama")).logits
    tamis.hf.sparsify(model, "entmax", layers=[0], alpha=1.5)
    first = model(**tiny.inputs("llama")).logits
    tamis.hf.sparsify(model, "rela", layers=lambda site: site == "layers.1.self")
    kinds = [type(layer.self_attn.tamis.mechanism).__name__ for layer in model.model.layers]
    assert kinds == ["EntmaxAttention", "ReLAttention"]
    assert len({logits.sum().item() for logits in (before, first, model(**tiny.inputs("llama")).logits)}) == 3


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_h_layers_that_are_left_alone_compute_what_they_did(name):
    model, fed = tiny.build(name), tiny.inputs(name)
    before = model(**fed, output_hidden_states=True)
    tamis.hf.sparsify(model, alpha=1.5, layers=[1])
    after = model(**fed, output_hidden_states=True)
    states = [out.decoder_hidden_states if name in tiny.SEQ2SEQ else out.hidden_states for out in (before, after)]
    if name not in tiny.SEQ2SEQ:  # whose decoders read the last layer of the encoder
        torch.testing.assert_close(states[1][1], states[0][1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(states[1][2], states[0][2], atol=1e-4)


def test_h_kinds_of_attention_by_name_of_the_site():
    model = tamis.hf.sparsify(tiny.build("t5"), "sparsemax", layers=lambda site: site.endswith("cross"))
    found = {part.site: type(part.mechanism).__name__ for _, part in tamis.hf.sites.parts_of(model)}
    assert found == {
        f"{side}.{layer}.{kind}": "EntmaxAttention" if kind == "cross" else "SoftmaxAttention"
        for side, kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
        for layer in range(tiny.LAYERS)
    }


def scale_by_hand(part, hidden, counts):
    """delta + beta log(n + 1)^gamma of ASEntmax."""
    weight, bias = part.mechanism.scale.weight, part.mechanism.scale.bias
    beta, gamma = (hidden @ weight.T + bias).transpose(1, 2).chunk(2, 1)
    return 1.0 + torch.nn.functional.softplus(beta) * torch.log(counts + 1.0) ** (2.0 * torch.tanh(gamma))


@pytest.mark.parametrize("name", ["gpt2", "bert", "marian", "t5", "llama"])
def test_i_the_scale_reads_the_input_of_the_layer_and_n_comes_from_the_mask(name):
    """The interface passes no hidden states, and positions that are missing or count the padding."""
    model = tamis.hf.sparsify(tiny.build(name), "asentmax")
    fed = tiny.inputs(name)
    fed["input_ids"][0, :4] = tiny.PAD
    fed["attention_mask"][0, :4] = 0  # left padding
    module, part = next(iter(tamis.hf.sites.parts_of(model)))
    inputs, seen = [], {}
    module.register_forward_pre_hook(lambda module, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True)
    part.mechanism.scale.register_forward_hook(lambda module, args, output: seen.update(scale=output))
    model(**fed)
    args, kwargs = inputs[0]
    hidden = args[0] if args else kwargs["hidden_states"]
    length = fed["input_ids"].shape[1]
    counts = torch.full((2, 1, length), float(length))
    if name in tiny.CAUSAL:
        counts = torch.arange(1, length + 1).expand(2, 1, length).clone().float()
    counts[0] -= 4
    real = fed["attention_mask"].bool()[:, None].expand(2, tiny.HEADS, length)
    expected = scale_by_hand(part, hidden, counts.clamp(min=1))
    torch.testing.assert_close(seen["scale"][real], expected[real])


def test_i_left_padded_generation_has_the_n_of_unpadded():
    model, fed = tamis.hf.sparsify(tiny.build("gpt2"), "asentmax"), tiny.inputs("gpt2")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    plain, padded = model.generate(**fed, **options), model.generate(**left_padded(fed), **options)
    assert torch.equal(padded[:, 3:], plain)
