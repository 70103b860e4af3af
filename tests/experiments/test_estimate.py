"""What a run will take is counted before it starts, and leaves no trace in it."""

import pytest
import torch

from experiments.listening import Heard
from tamis.experiments import estimate
from tamis.experiments.estimate import activation_bytes, describe_cost, fixed_bytes, largest_part
from tamis.training import TrainingError
from training import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.prepared(tmp_path_factory.mktemp("data"))


def test_weights_gradients_and_optimiser(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path / "a")
    assert fixed_bytes(trainer) == 4 * 4 * trainer.model.num_parameters()
    assert fixed_bytes(tiny.trainer(data, tmp_path / "b", ema=0.9)) == 5 * 4 * trainer.model.num_parameters()


def test_activations_grow_with_the_batch_and_are_less_in_parts(data, tmp_path):
    found = {}
    for name, changes in {"whole": {}, "twice": {"batch_tokens": 800}, "parts": {"device_tokens": 100}}.items():
        trainer = tiny.trainer(data, tmp_path / name, **changes)
        part = largest_part(trainer)
        found[name] = activation_bytes(trainer, part)
        logits = part.labels.numel() * 60 * 4
        assert found[name] > logits
    assert found["parts"] < 0.5 * found["whole"]
    assert 1.5 * found["whole"] < found["twice"] < 3.0 * found["whole"]


def test_the_run_is_what_it_would_have_been(data, tmp_path):
    tiny.trainer(data, tmp_path / "plain", dropout=0.3).run()
    trainer = tiny.trainer(data, tmp_path / "told", dropout=0.3)
    trainer.run(begin=lambda: describe_cost(trainer))
    assert tiny.losses(tmp_path / "told") == tiny.losses(tmp_path / "plain")
    before = torch.get_rng_state()
    describe_cost(trainer)
    assert torch.equal(before, torch.get_rng_state())


def test_too_little_memory_is_said_with_the_setting_to_lower(data, tmp_path, monkeypatch):
    trainer = tiny.trainer(data, tmp_path)
    trainer.display = heard = Heard()
    free = estimate.fixed_bytes(trainer) - estimate.held_bytes(trainer)
    monkeypatch.setattr(estimate, "free_bytes", lambda device: free)
    describe_cost(trainer)
    assert "for weights, gradients and optimiser" in heard.lines[0]
    assert "source and" in heard.lines[0]
    told = (
        f"more than the {estimate.shown_bytes(free)} that are free: lower training.device_tokens, now all of an update"
    )
    assert told in heard.lines[1]
    monkeypatch.setattr(estimate, "free_bytes", lambda device: None)
    describe_cost(trainer)
    assert len(heard.lines) == 3


def test_what_is_free_is_known_here():
    free = estimate.free_bytes(torch.device("cpu"))
    assert free is None or free > 0


def test_what_training_surely_takes_is_refused_where_it_is_not(data, tmp_path, monkeypatch):
    trainer = tiny.trainer(data, tmp_path, steps=2, checkpoint_every=2)
    weights = sum(parameter.numel() * 4 for parameter in trainer.model.parameters())
    assert estimate.fixed_bytes(trainer) - estimate.held_bytes(trainer) == 3 * weights
    monkeypatch.setattr(estimate, "free_bytes", lambda device: 1000)
    with pytest.raises(
        TrainingError, match=r"gradients and optimiser take another .*, and 1 kB are free: lower the sizes"
    ):
        trainer.run(begin=lambda: describe_cost(trainer))
    trainer.run()
    held = estimate.held_bytes(trainer)
    assert weights * 3 <= held <= weights * 3.1  # the optimiser's averages are there now, gradients come and go
