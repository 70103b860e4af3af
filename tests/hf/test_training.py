"""Training: transformers' Trainer, and from dense to sparse."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import transformers

import tamis.hf
from hf import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "dense_to_sparse.py"


def examples(name, count=16):
    fed = tiny.inputs(name, batch=count)
    fed["labels"] = fed.pop("decoder_input_ids", fed["input_ids"])
    return [{key: value[row] for key, value in fed.items()} for row in range(count)]


def trainer(model, name, folder, **changes):
    arguments = {"max_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", **changes}
    options = transformers.TrainingArguments(output_dir=str(folder), **arguments)
    return transformers.Trainer(model=model, args=options, train_dataset=examples(name))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_trainer_for_ten_steps(name, mechanism, tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    model = tamis.hf.sparsify(tiny.build(name), mechanism)
    before = [parameter.detach().clone() for parameter in tamis.hf.added_parameters(model)]
    batch = {key: torch.stack([row[key] for row in examples(name)]) for key in examples(name)[0]}
    at_start = model(**batch).loss.item()
    result = trainer(model, name, tmp_path).train()
    assert result.global_step == 10
    assert model.eval()(**batch).loss.item() < at_start
    after = tamis.hf.added_parameters(model)
    assert any(not torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_trainer_resumes_from_its_checkpoint(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    model = tamis.hf.sparsify(tiny.build("llama"))
    whole = trainer(model, "llama", tmp_path, save_strategy="steps", save_steps=5)
    whole.train()
    again = tamis.hf.sparsify(tiny.build("llama", seed=5))
    trainer(again, "llama", tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    loaded = tamis.hf.from_pretrained(tmp_path / "checkpoint-10")
    fed = tiny.inputs("llama")
    assert torch.equal(loaded(**fed).logits, model.eval()(**fed).logits)


def test_groups_hold_every_parameter_once():
    model = tamis.hf.sparsify(tiny.build("gpt2"))
    weights, added = tamis.hf.parameter_groups(model, 1e-3, 1e-1)
    assert (weights["lr"], added["lr"], added["weight_decay"]) == (1e-3, 1e-1, 0.0)
    ids = [id(parameter) for group in (weights, added) for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    assert added["params"] == tamis.hf.added_parameters(model)


def test_pressure_is_the_distance_of_alphas_from_their_upper_end():
    model = tamis.hf.sparsify(tiny.build("gpt2"), start=1.25)
    assert tamis.hf.sparsity_pressure(model).item() == pytest.approx(0.75)
    optimiser = torch.optim.Adam(tamis.hf.added_parameters(model), 0.1)
    for _ in range(100):
        optimiser.zero_grad()
        tamis.hf.sparsity_pressure(model).backward()
        optimiser.step()
    assert tamis.hf.sparsity_pressure(model).item() < 0.05


def test_pressure_without_learned_alphas():
    with pytest.raises(ValueError, match="no learned alphas"):
        tamis.hf.sparsity_pressure(tamis.hf.sparsify(tiny.build("gpt2"), alpha=1.5))


def load_example():
    spec = importlib.util.spec_from_file_location("dense_to_sparse", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_runs(tmp_path, capsys):
    sizes = {"layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 8, "pairs": 200, "steps": 20, "more": 5}
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    result = load_example().main([*arguments, "--device", "cpu", "--output", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    (found,) = result["runs"]
    assert set(found["continued"]) == {"dense", "pressure 0", "pressure 0.02", "pressure 0.1"}
    assert "switched without training" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dense_model_becomes_sparse_at_the_loss_of_more_dense_training():
    (found,) = load_example().main(["--device", "cpu"])["runs"]
    dense, sparse = found["continued"]["dense"], found["continued"]["pressure 0.1"]
    assert sparse["at_switch"] == pytest.approx(found["before"], abs=0.01)
    assert sparse["after"] < found["before"]
    assert sparse["after"] < dense["after"] + 0.03
    assert sparse["density"] < 0.4
