"""Training on a GPU: what a CPU cannot show."""

import pytest
import torch

from tamis.models import CausalLM, CausalLMConfig
from tamis.training import GeneratedTask, Process, TaskConfig, Trainer
from training import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu():
    return Process(0, 1, torch.device("cuda"))


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_resume_to_the_bit(data, tmp_path, gpu, mechanism, precision):
    settings = {"mechanism": mechanism, "precision": precision, "deterministic": True, "ema": 0.9, "device_tokens": 150}
    tiny.trainer(data, tmp_path / "one", gpu, **settings).run()
    tiny.trainer(data, tmp_path / "two", gpu, **settings | {"steps": 10}).run()
    tiny.trainer(data, tmp_path / "two", gpu, **settings).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")


# Muon takes bf16 products on a GPU, and none on a CPU.
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adam", 1e-3), ("muon", 2e-2)])
def test_a_gpu_gives_the_losses_of_a_cpu(data, tmp_path, gpu, optimizer, tolerance):
    tiny.trainer(data, tmp_path / "cpu", dropout=0.0, steps=10, optimizer=optimizer).run()
    tiny.trainer(data, tmp_path / "gpu", gpu, dropout=0.0, steps=10, optimizer=optimizer).run()
    for here, there in zip(tiny.losses(tmp_path / "cpu"), tiny.losses(tmp_path / "gpu"), strict=True):
        key = "loss" if "loss" in here else "valid_loss"
        assert there[key] == pytest.approx(here[key], rel=tolerance)


def test_skipped_steps_are_counted_without_waiting_for_the_device(data, tmp_path, gpu):
    trainer = tiny.trainer(data, tmp_path, gpu, steps=20)
    loss, calls = trainer.task.loss, iter(range(1, 1000))
    trainer.task.loss = lambda model, part: loss(model, part) * (float("inf") if next(calls) in (3, 4, 20) else 1.0)
    assert trainer.run().skipped == 3


def test_graphs_give_the_losses_of_single_kernels(data, tmp_path, gpu):
    for name, graphs in (("plain", False), ("graphs", True)):
        trainer = tiny.trainer(data, tmp_path / name, gpu, dropout=0.0, steps=60, cuda_graphs=graphs)
        trainer.run()
    assert any(held.graph is not None for held in trainer.graphs._held.values())
    for plain, graphed in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "graphs"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert graphed[key] == pytest.approx(plain[key], rel=1e-3)


@pytest.mark.parametrize("mechanism", ["softmax", "ssmax", {"name": "entmax", "alpha": 1.5}, "asentmax"], ids=str)
def test_compiled_graphs_give_the_losses_of_single_kernels(tmp_path, gpu, mechanism):
    # Lengths on both sides of 64, from which on the backward pass of fp32 has other kernels.
    config = TaskConfig(name="reverse", options={"symbols": 8}, lengths=(4, 40), batch_size=32, lengths_per_batch=1)
    sizes = {"embed_dim": 64, "num_heads": 4, "ffn_dim": 128, "num_layers": 2, "arrangement": "both"}
    for name, fast in (("plain", False), ("fast", True)):
        training = tiny.settings(steps=60, label_smoothing=0.0, compile=fast, cuda_graphs=fast)
        torch.manual_seed(0)
        model = CausalLM(CausalLMConfig(vocab_size=config.build().vocab_size, mechanism=mechanism, **sizes))
        trainer = Trainer(model, GeneratedTask(config, training), training, tmp_path / name, gpu)
        trainer.run()
    captured = {shape[1] for shape, held in trainer.graphs._held.items() if held.graph is not None}
    assert min(captured) < 64 < max(captured)
    for plain, fast in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "fast"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert fast[key] == pytest.approx(plain[key], rel=1e-3)


@pytest.mark.parametrize(
    ("mechanism", "schedule"),
    [
        ("rela", {"name": "slope", "start": 0.8, "begin": 5, "end": 50}),
        ({"name": "entmax", "alpha": 1.5}, {"name": "alpha", "end": 50}),
        ("entmax", {"name": "pressure", "target": 0.5, "begin": 5, "end": 50}),
    ],
    ids=lambda x: x["name"] if isinstance(x, dict) else x,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_graphs_see_what_a_schedule_moves(data, tmp_path, gpu, mechanism, schedule, compiled):
    settings = {"mechanism": mechanism, "schedules": [schedule], "dropout": 0.0, "steps": 60}
    tiny.trainer(data, tmp_path / "plain", gpu, **settings).run()
    trainer = tiny.trainer(data, tmp_path / "graphs", gpu, **settings, cuda_graphs=True, compile=compiled)
    trainer.run()
    assert any(held.graph is not None for held in trainer.graphs._held.values())
    for plain, graphed in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "graphs"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert graphed[key] == pytest.approx(plain[key], rel=1e-3)


def test_compiled_graphs_translate_too(data, tmp_path, gpu):
    for name, fast in (("plain", False), ("fast", True)):
        trainer = tiny.trainer(data, tmp_path / name, gpu, dropout=0.0, steps=60, compile=fast, cuda_graphs=fast)
        trainer.run()
    assert any(held.graph is not None for held in trainer.graphs._held.values())
    for plain, fast in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "fast"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert fast[key] == pytest.approx(plain[key], rel=1e-3)


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_resume_to_the_bit(data, tmp_path, gpu, mechanism, precision):
    settings = {"mechanism": mechanism, "precision": precision, "deterministic": True, "cuda_graphs": True, "steps": 60}
    tiny.trainer(data, tmp_path / "one", gpu, **settings).run()
    tiny.trainer(data, tmp_path / "two", gpu, **settings | {"steps": 40}).run()
    tiny.trainer(data, tmp_path / "two", gpu, **settings).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")
