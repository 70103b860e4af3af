"""The callback: the gradient of the pressure, and figures in whatever the Trainer logs to."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

import transformers

import tamis.hf
from hf import tiny
from hf.test_training import examples


class Reporter(transformers.TrainerCallback):
    """What a TensorBoard would be told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append(dict(logs))


def trainer(model, folder, callbacks=(), **changes):
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, **changes}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    return transformers.Trainer(model, arguments, train_dataset=examples("llama"), callbacks=[*callbacks])


class InTheLoss(transformers.Trainer):
    """The pressure as docs say without the callback."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, **kwargs) + 50.0 * tamis.hf.sparsity_pressure(model)


def test_it_trains_as_with_the_pressure_in_the_loss(tmp_path):
    found = []
    for kind in (InTheLoss, transformers.Trainer):
        model = tamis.hf.sparsify(tiny.build("llama"), start=1.3)
        made = trainer(model, tmp_path, max_grad_norm=0.0, optim="sgd")
        made.__class__ = kind
        if kind is transformers.Trainer:
            tamis.hf.SparsityCallback(pressure=50.0).attach(made)
        made.train()
        found.append(model.state_dict())
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6)
    assert (found[0]["model.layers.0.self_attn.tamis.mechanism.alpha.raw"] > -0.83).all()  # up from alpha 1.3


def test_accumulation_counts_it_once(tmp_path):
    raw = []
    for steps in (1, 4):
        model = tamis.hf.sparsify(tiny.build("llama"), start=1.3)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in tamis.hf.added_parameters(model):
            parameter.requires_grad_(True)
        made = trainer(
            model,
            tmp_path,
            max_steps=2,
            optim="sgd",
            gradient_accumulation_steps=steps,
            per_device_train_batch_size=4 // steps,
            max_grad_norm=0.0,
        )
        tamis.hf.SparsityCallback(pressure=50.0).attach(made).train()
        raw.append(tamis.hf.added_parameters(model)[0].detach().clone())
    torch.testing.assert_close(raw[0], raw[1], rtol=1e-3, atol=1e-4)


def test_figures_reach_those_that_report(tmp_path):
    reporter = Reporter()
    model = tamis.hf.sparsify(tiny.build("llama"), start=1.5)
    made = trainer(model, tmp_path, [reporter])
    tamis.hf.SparsityCallback(pressure=0.1, sample=tiny.inputs("llama")).attach(made).train()
    told = [logs for logs in reporter.told if "loss" in logs]
    assert len(told) == 4
    for logs in told:
        assert {"alpha/mean", "alpha/min", "alpha/max", "alpha/layers.0.self", "density/mean"} <= logs.keys()
        assert logs["alpha/min"] <= logs["alpha/mean"] <= logs["alpha/max"]
        assert 0.0 < logs["density/layers.1.self"] < 1.0
    assert told[-1]["alpha/mean"] > told[0]["alpha/mean"]
    history = [record for record in made.state.log_history if "loss" in record]
    assert [record["alpha/mean"] for record in history] == [logs["alpha/mean"] for logs in told]
    assert model.training


def test_as_an_argument_it_writes_the_history(tmp_path):
    model = tamis.hf.sparsify(tiny.build("llama"))
    made = trainer(model, tmp_path, [tamis.hf.SparsityCallback()])
    made.train()
    assert "alpha/mean" in made.state.log_history[0]
    assert "density/mean" not in made.state.log_history[0]


def test_pressure_on_nothing(tmp_path):
    with pytest.raises(ValueError, match="at least 0"):
        tamis.hf.SparsityCallback(pressure=-1.0)
    made = trainer(tamis.hf.sparsify(tiny.build("llama"), alpha=1.5), tmp_path)
    with pytest.raises(ValueError, match="this model has none"):
        tamis.hf.SparsityCallback(pressure=0.1).attach(made).train()


def test_label_smoothing_is_that_of_the_dense_model(tmp_path):
    """The Trainer shifts labels for classes whose names it knows."""
    found = []
    for sparse in (True, False):
        model = tiny.build("llama")
        if sparse:
            tamis.hf.sparsify(model, "softmax")
        made = trainer(model, tmp_path, max_steps=1, label_smoothing_factor=0.1)
        made.train()
        found.append(made.state.log_history[0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
