"""Replayed steps, with a graph that is Python: what is captured runs again on the memory it was captured with."""

import pytest
import torch

from tamis.training import Process, TrainingError
from tamis.training.graphs import GraphedBackward
from training import tiny

CPU = torch.device("cpu")


class Replayed(GraphedBackward):
    """Captures by remembering what to call."""

    def _capture(self, held):
        run, self.captured = self._added_at_once, getattr(self, "captured", 0) + 1
        held.loss = torch.zeros(())

        class Graph:
            def replay(self):
                held.loss.copy_(run(held))

        held.graph = Graph()


def graphed(trainer):
    """As on a GPU."""
    trainer.graphs = Replayed(trainer._backward, trainer.model.parameters(), CPU)
    return trainer


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
def test_padding_to_fewer_shapes_changes_nothing(data, tmp_path, mechanism):
    """In fp64: padding changes the order of sums, and ReLA's norms let fp32's rounding grow to 1e-4 in thirty steps."""
    settings = {"mechanism": mechanism, "dropout": 0.0, "steps": 30, "device_tokens": 150}
    plain = tiny.trainer(data, tmp_path / "plain", **settings)
    trainer = graphed(tiny.trainer(data, tmp_path / "graphs", **settings))
    for one in (plain, trainer):
        one.model.double()
        one.run()
    assert 0 < trainer.graphs.captured < 60
    for expected, padded in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "graphs"), strict=True):
        key = "loss" if "loss" in expected else "valid_loss"
        assert padded[key] == pytest.approx(expected[key], rel=1e-6)


def test_resume_to_the_bit(data, tmp_path):
    graphed(tiny.trainer(data, tmp_path / "one", steps=40)).run()
    graphed(tiny.trainer(data, tmp_path / "two", steps=20)).run()
    graphed(tiny.trainer(data, tmp_path / "two", steps=40)).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")


def test_the_first_time_runs_without_a_graph_and_so_do_too_many_shapes(data, tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.training.graphs.MOST_GRAPHS", 2)
    trainer = graphed(tiny.trainer(data, tmp_path, steps=60))
    trainer.run()
    held = list(trainer.graphs._held.values())
    assert sum(one.graph is not None for one in held) == 2
    assert any(one.runs > 1 and one.graph is None for one in held)
    assert all(one.graph is None for one in held if one.runs == 1)


def test_on_a_cpu_nothing_is_captured(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, cuda_graphs=True)
    assert trainer.graphs is None


def test_several_processes_are_an_error(data, tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.training.distributed.spread", lambda model, *_: model)
    with pytest.raises(TrainingError, match="for one process, and there are 2"):
        tiny.trainer(data, tmp_path, Process(0, 2, CPU), cuda_graphs=True)


def test_a_captured_step_adds_to_gradients_that_stay(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path)
    _, (tokens, (part, *_)) = next(trainer._stream(trainer.state.position))
    graphs, parameters = graphed(trainer).graphs, list(trainer.model.parameters())
    torch.manual_seed(0)
    graphs(part, 1.0 / tokens)
    first, kept = [p.grad.clone() for p in parameters], [p.grad for p in parameters]
    torch.manual_seed(0)
    graphs(part, 1.0 / tokens)
    assert graphs.captured == 1
    for parameter, grad, own in zip(parameters, first, kept, strict=True):
        assert parameter.grad is own
        torch.testing.assert_close(own, 2.0 * grad)


@pytest.mark.slow
def test_what_is_captured_may_be_compiled(data, tmp_path):
    changes = {"dropout": 0.0, "steps": 6, "mechanism": "softmax"}
    tiny.trainer(data, tmp_path / "plain", **changes).run()
    trainer = graphed(tiny.trainer(data, tmp_path / "both", **changes, compile=True, cuda_graphs=True))
    trainer.run()
    assert trainer.model.decoder[0]._compiled_call_impl is not None
    for plain, both in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "both"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert both[key] == pytest.approx(plain[key], rel=1e-4)
