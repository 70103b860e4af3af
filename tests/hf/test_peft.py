"""PEFT looks up which layers adapters go to by model_type: sparse models have what the dense ones have."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")
pytest.importorskip("peft", reason="these are tests of PEFT")

import peft
import transformers

import tamis.hf
from hf import tiny

LORA = {"r": 2, "init_lora_weights": False}


def adapted(model, **changes):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, **changes))


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow), "t5"])
def test_adapters_go_where_those_of_the_dense_model_go(name, tmp_path):
    model = tamis.hf.sparsify(tiny.build(name))
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    expected = [path for path, _ in adapted(tiny.build(name)).named_parameters() if "lora" in path]
    for sparse in (model, auto.from_pretrained(tmp_path)):
        assert [path for path, _ in adapted(sparse).named_parameters() if "lora" in path] == expected


@pytest.mark.slow
def test_an_adapter_is_saved_and_loaded_onto_its_base(tmp_path):
    tamis.hf.sparsify(tiny.build("llama"), alpha=1.5).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model, fed = adapted(base, task_type="CAUSAL_LM").eval(), tiny.inputs("llama")
    expected = model(**fed).logits
    model.save_pretrained(tmp_path / "adapter")
    found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(found(**fed).logits, expected)
    merged = found.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(**fed).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_alphas_are_trained_with_an_adapter(tmp_path):
    """As a mechanism that is saved whole beside the adapter."""
    tamis.hf.sparsify(tiny.build("llama"), start=1.5).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model, fed = adapted(base, modules_to_save=["mechanism"]), tiny.inputs("llama")
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    model(**fed, labels=fed["input_ids"]).loss.backward()
    optimiser.step()
    raw = [p for name, p in model.named_parameters() if "alpha.raw" in name and p.requires_grad]
    assert len(raw) == tiny.LAYERS
    assert all(p.abs().max() > 1e-4 for p in raw)  # raw 0 is alpha 1.5
    expected = model.eval()(**fed).logits
    model.save_pretrained(tmp_path / "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert torch.equal(found(**fed).logits, expected)


@pytest.mark.slow
def test_in_whatever_order_things_are_imported(tmp_path):
    text = "import sys; sys.path.insert(0, sys.argv[1]); import tamis.hf; from hf import tiny; "
    text += "model = tamis.hf.sparsify(tiny.build('llama')); import peft; "
    text += "peft.get_peft_model(model, peft.LoraConfig(r=2)).print_trainable_parameters()"
    tests = str(__file__).rsplit("/", 2)[0]
    ran = subprocess.run([sys.executable, "-c", text, tests], capture_output=True, text=True)
    assert "trainable params" in ran.stdout, ran.stderr[-2000:]
