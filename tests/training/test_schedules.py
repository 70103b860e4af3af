"""Schedules of a run: what moves, where the journal has it, and that going on is exact."""

import pytest
import torch

from tamis.models import Seq2Seq
from tamis.training import Trainer, TrainingConfig, TranslationTask
from tamis.training.journal import read_journal
from training import tiny
from training.test_graphs import graphed

SLOPE = {"mechanism": "rela", "schedules": [{"name": "slope", "start": 0.8, "begin": 2, "end": 16}]}
ALPHA = {"mechanism": {"name": "entmax", "alpha": 1.5}, "schedules": [{"name": "alpha", "end": 20}]}


def mixed(data, folder, captured, **changes):
    """All three at once: a leaky encoder, a decoder on its way from softmax, and learned alphas under pressure."""
    schedules = [*SLOPE["schedules"], *ALPHA["schedules"], {"name": "pressure", "target": 0.5, "begin": 3, "end": 9}]
    config = tiny.settings(steps=24, checkpoint_every=6, schedules=schedules, **changes)
    sites = {"encoder_mechanism": "rela", "decoder_mechanism": ALPHA["mechanism"], "cross_mechanism": "entmax"}
    model = tiny.model(data, dropout=0.1, attention_dropout=0.1, **sites)
    trainer = Trainer(model, TranslationTask(data, config), config, folder, tiny.HERE)
    return graphed(trainer) if captured else trainer


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
def test_a_run_in_two_sittings_is_the_run_in_one(data, tmp_path, captured):
    mixed(data, tmp_path / "one", captured).run()
    stopped = mixed(data, tmp_path / "two", captured)  # at step 12, in the middle of each way, as a full disk would
    stopped._done = lambda: stopped.state.step >= 12
    stopped.run()
    assert stopped.state.step == 12
    mixed(data, tmp_path / "two", captured).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")
    paths = [tmp_path / run / "checkpoints" / "step-00000024" / "model.safetensors" for run in ("one", "two")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_journal_has_where_everything_is(data, tmp_path):
    tiny.trainer(data, tmp_path, steps=20, checkpoint_every=20, log_every=4, **SLOPE).run()
    records = [record for record in read_journal(tmp_path / "metrics.jsonl") if "loss" in record]
    found = {record["step"]: record["schedules"]["slope"] for record in records}
    assert found == pytest.approx({4: 0.8 * 12 / 14, 8: 0.8 * 8 / 14, 12: 0.8 * 4 / 14, 16: 0.0, 20: 0.0})


def test_without_schedules_nothing_is_moved_or_noted(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=2, mechanism="rela")
    trainer.run()
    assert not any("moved" in name for name, _ in trainer.model.named_buffers())
    assert not any("schedules" in record for record in read_journal(tmp_path / "metrics.jsonl"))


def test_what_is_exported_is_what_the_config_says(data, tmp_path):
    """On the way ReLA is something else, which may well have the lower loss: it is never the best."""
    settings = SLOPE | {"schedules": [{"name": "slope", "end": 25}]}
    trainer = tiny.trainer(data, tmp_path, steps=30, checkpoint_every=10, **settings)
    state = trainer.run()
    validated = [record for record in read_journal(tmp_path / "metrics.jsonl") if "best" in record]
    assert [record["best"] for record in validated] == [False, False, True]
    assert state.best_step == 30
    saved = Seq2Seq.from_pretrained(tmp_path / "checkpoints" / "step-00000030").eval()
    (batch,) = list(trainer.task.validation(trainer.group))[:1]
    with torch.no_grad():
        expected = trainer.task.measure(trainer.model.eval(), batch)
        assert torch.equal(torch.stack(trainer.task.measure(saved, batch)), torch.stack(expected))


def test_alpha_moves_the_model(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, **ALPHA)
    trainer.schedules.place(trainer.model, 10)
    moved = {float(buffer) for name, buffer in trainer.model.named_buffers() if "moved_alpha" in name}
    assert moved == {1.25}


def test_pressure_begins_after_the_warm_up_and_raises_alphas(data, tmp_path):
    def alphas(folder, **changes):
        tiny.trainer(
            data, tmp_path / folder, steps=20, warmup=10, mechanism_lr=100.0, mechanism="entmax", **changes
        ).run()
        records = read_journal(tmp_path / folder / "metrics.jsonl")
        return {r["step"]: [x for site in r["alphas"].values() for x in site] for r in records if "alphas" in r}

    plain, pressed = alphas("plain"), alphas("pressed", schedules=[{"name": "pressure", "target": 100.0}])
    assert pressed[9] == plain[9]
    assert sum(pressed[20]) > sum(plain[20]) + 0.1


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ("slope", "schedules must be a list of tables"),
        (["slope"], "schedules must be a list of tables"),
        ([{"name": "slopes", "end": 3}], "did you mean 'slope'"),
        ([{"end": 3}], "name of a schedule must be one of"),
        ([{"name": "slope", "ends": 3}], "did you mean 'end'"),
        ([{"name": "slope"}], "slope needs an end"),
        ([{"name": "slope", "end": 31}], "must be a step, 0 to steps = 30, got 31"),
        ([{"name": "slope", "end": 1.5}], "must be a step"),
        ([{"name": "slope", "begin": 9, "end": 3}], "must not end before it begins"),
        ([{"name": "slope", "end": 3, "target": 0.0}], r"ends where \[model\] has it"),
        ([{"name": "slope", "end": 3, "start": 2}], "from 0 to 1, got 2"),
        ([{"name": "alpha", "end": 3, "start": 0.5}], "from 1 to 2, got 0.5"),
        ([{"name": "pressure"}], "needs a target"),
        ([{"name": "pressure", "target": -1.0}], "from 0 to inf, got -1"),
        ([{"name": "pressure", "target": float("nan")}], "got nan"),
        ([{"name": "slope", "end": 3}, {"name": "slope", "end": 4}], "one schedule of slope is enough"),
    ],
)
def test_what_cannot_be_is_explained(schedules, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(steps=30, warmup=10, schedules=schedules)


@pytest.mark.parametrize(
    ("mechanism", "schedule", "message"),
    [
        ("softmax", {"name": "slope", "end": 3}, "needs a mechanism with a rectifier"),
        ("entmax", {"name": "alpha", "end": 3}, "needs a mechanism with a fixed one"),
        ("rela", {"name": "pressure", "target": 0.1}, "for learned alphas, and this model has none"),
    ],
)
def test_a_model_without_it_is_explained(data, tmp_path, mechanism, schedule, message):
    with pytest.raises(ValueError, match=message):
        tiny.trainer(data, tmp_path, mechanism=mechanism, schedules=[schedule])
