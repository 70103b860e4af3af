"""Further places for records, with fakes of the packages behind them."""

import sys
from types import SimpleNamespace

import pytest

from tamis.training import TrainingConfig
from tamis.training.journal import read_journal
from tamis.training.loggers import LOGGERS, LoggedRun, build_logger, numbers_of
from training import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.prepared(tmp_path_factory.mktemp("data"))


class FakeWandb:
    def __init__(self):
        self.runs = []

    def init(self, **given):
        run = SimpleNamespace(given=given, logged=[], finished=False)
        run.log = lambda numbers, step: run.logged.append((step, numbers))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


class FakeMlflow:
    def __init__(self):
        self.calls = []

    def start_run(self, run_id=None, run_name=None):
        self.calls.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def test_weights_and_biases_gets_every_record_of_the_same_run(data, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers = ({"name": "wandb", "project": "sieve", "tags": ["x"]},)
    tiny.trainer(data, tmp_path, steps=4, checkpoint_every=2, loggers=loggers).run()
    tiny.trainer(data, tmp_path, steps=6, checkpoint_every=2, loggers=loggers).run()
    first, second = fake.runs
    assert first.given["id"] == second.given["id"]
    assert (first.given["project"], first.given["tags"], first.given["resume"]) == ("sieve", ["x"], "allow")
    assert first.given["config"]["steps"] == 4
    records = read_journal(tmp_path / "metrics.jsonl")
    assert [step for step, _ in first.logged + second.logged] == [record["step"] for record in records]
    losses = [numbers["loss"] for _, numbers in first.logged if "loss" in numbers]
    assert losses == [record["loss"] for record in records if "loss" in record][:4]
    assert any(name.startswith("alphas/") for name in first.logged[0][1])
    assert first.finished
    assert second.finished


def test_mlflow_goes_on_with_its_run(data, tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tiny.trainer(data, tmp_path, steps=2, checkpoint_every=2, loggers=["mlflow"]).run()
    tiny.trainer(data, tmp_path, steps=4, checkpoint_every=2, loggers=["mlflow"]).run()
    assert [call for call in fake.calls if call[0] == "start"] == [
        ("start", None, tmp_path.name),
        ("start", "r1", None),
    ]
    logged = [call for call in fake.calls if call[0] == "log_metrics"]
    assert [call[2] for call in logged] == [record["step"] for record in read_journal(tmp_path / "metrics.jsonl")]
    assert sum(call[0] == "log_params" for call in fake.calls) == 1
    assert sum(call[0] == "end_run" for call in fake.calls) == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_package_that_is_not_there_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"the logger '{name}' needs a package: pip install"):
        build_logger(name, LoggedRun(tmp_path, 0, {}))


def test_specs_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="loggers must be a list of names and of tables"):
        TrainingConfig(loggers="wandb")
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        build_logger("tensorbord", LoggedRun(tmp_path, 0, {}))
    with pytest.raises(ValueError, match="logger 'tensorboard' does not take"):
        build_logger({"name": "tensorboard", "where": "x"}, LoggedRun(tmp_path, 0, {}))
    assert set(LOGGERS) >= {"tensorboard", "wandb", "mlflow"}


def test_numbers_of_a_record_are_flat():
    record = {"step": 3, "loss": 1.5, "best": True, "note": "x", "none": None, "alphas": {"e": [1.25, 1.5]}}
    assert numbers_of(record) == {"loss": 1.5, "best": 1.0, "alphas/e/0": 1.25, "alphas/e/1": 1.5}
