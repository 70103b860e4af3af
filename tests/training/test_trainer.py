import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tamis.models import Seq2Seq
from tamis.training import TrainingError, environment, guards
from tamis.training.journal import Journal, read_journal
from tamis.training.recorder import PATIENCE_WITH_NAN
from tamis.training.state import stream_seed
from training import tiny


def start(data, folder, **settings):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, tiny.__file__, str(data.folder.parent), str(folder), json.dumps(settings)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_it_learns(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path / "run", steps=120, checkpoint_every=60)
    state = trainer.run()
    records = read_journal(tmp_path / "run" / "metrics.jsonl")
    first, last = (record["valid_loss"] for record in records if "valid_loss" in record)
    assert last < first < 0.6 * math.log(len(data.target_vocabulary))
    assert state.best_step == 120
    model = Seq2Seq.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000120")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mechanism": "rela", "ema": 0.9, "optimizer": "adamw", "weight_decay": 0.1},
        {"mechanism": "softmax", "log_every": 7, "device_tokens": 100, "precision": "bf16", "loss": "entmax"},
        {"mechanism": "softmax", "optimizer": "muon", "weight_decay": 0.1},
    ],
    ids=["plain", "ema", "window", "muon"],
)
def test_a_run_in_two_sittings_is_the_run_in_one(data, tmp_path, settings):
    tiny.trainer(data, tmp_path / "one", **settings).run()
    tiny.trainer(data, tmp_path / "two", **settings | {"steps": 10}).run()
    tiny.trainer(data, tmp_path / "two", **settings).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")
    for name in os.listdir(tmp_path / "one" / "checkpoints" / "step-00000030"):
        if name.endswith(".safetensors"):
            paths = [tmp_path / run / "checkpoints" / "step-00000030" / name for run in ("one", "two")]
            assert paths[0].read_bytes() == paths[1].read_bytes(), name


def test_killed_at_any_moment(data, tmp_path):
    settings = {"steps": 60, "checkpoint_every": 4, "keep": 2}
    tiny.trainer(data, tmp_path / "straight", **settings).run()
    folder = tmp_path / "killed"
    for steps_more in (3, 17):
        journal = folder / "metrics.jsonl"
        seen = len(journal.read_text().splitlines()) if journal.exists() else 0
        run = start(data, folder, **settings)
        while run.poll() is None and (
            not journal.exists() or len(journal.read_text().splitlines()) < seen + steps_more
        ):
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL
    tiny.trainer(data, folder, **settings).run()
    assert tiny.losses(folder) == tiny.losses(tmp_path / "straight")


def test_asked_to_stop_it_saves_first(data, tmp_path):
    run = start(data, tmp_path / "run", steps=5000, checkpoint_every=1000)
    journal = tmp_path / "run" / "metrics.jsonl"
    while run.poll() is None and (not journal.exists() or not journal.read_text()):
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "the same command goes on from there" in said
    (step,) = (int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert read_journal(journal)[-1]["step"] == step


def test_torn_newest_checkpoint(data, tmp_path):
    tiny.trainer(data, tmp_path / "one").run()
    tiny.trainer(data, tmp_path / "two", steps=20).run()
    (tmp_path / "two" / "checkpoints" / "step-00000020" / "model.safetensors").write_bytes(b"torn")
    tiny.trainer(data, tmp_path / "two").run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")


def test_checkpoints_of_another_model(data, tmp_path):
    tiny.trainer(data, tmp_path, mechanism="softmax", steps=10).run()
    with pytest.raises(ValueError, match="another model"):
        tiny.trainer(data, tmp_path, mechanism="rela").run()


def poisoned(trainer, steps):
    """Makes the loss of these steps infinite."""
    counter, loss = itertools.count(1), trainer.task.loss
    trainer.task.loss = lambda model, part: loss(model, part) * (float("inf") if next(counter) in steps else 1.0)
    return trainer


def test_a_step_without_a_finite_gradient_is_skipped_and_counted(data, tmp_path):
    state = poisoned(tiny.trainer(data, tmp_path, steps=20), {3, 4, 11}).run()
    assert state.skipped == 3
    records = read_journal(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("loss", 0.0) is None] == [3, 4, 11]
    assert [record["skipped"] for record in records if "loss" in record][-1] == 3
    assert records[-1]["valid_loss"] < records[0]["loss"]


def test_ten_in_a_row_stop_the_run(data, tmp_path):
    with pytest.raises(TrainingError, match=r"no finite gradient in 10 steps in a row, up to step 14"):
        poisoned(tiny.trainer(data, tmp_path, steps=40), set(range(5, 5 + PATIENCE_WITH_NAN))).run()


def test_out_of_memory_names_the_batch_and_the_setting(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path)

    def loss(model, part):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.task.loss = loss
    with pytest.raises(TrainingError, match=r"a batch of \d+ sentences of up to \d+ .* lower training.device_tokens"):
        trainer.run()


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), guards.memory_explained("x", "y"):
        raise RuntimeError("shapes differ")


def test_patience_ends_a_run_and_stays_ended(data, tmp_path):
    settings = {"steps": 100, "checkpoint_every": 1, "patience": 3, "lr": 1e-12, "warmup": 0}
    state = tiny.trainer(data, tmp_path, **settings).run()
    assert state.step < 100
    assert state.stale == 3
    again = tiny.trainer(data, tmp_path, **settings).run()
    assert again.step == state.step


def test_the_best_checkpoint_stays(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=8, checkpoint_every=1, keep=2)
    scores = iter([1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    trainer.config = dataclasses.replace(trainer.config, monitor="score")
    trainer.observe = lambda model: {"valid_score": next(scores)}
    state = trainer.run()
    assert state.best_step == 3
    assert trainer.checkpoints.steps() == [3, 7, 8]
    best = trainer.checkpoints.load(3, "model")
    assert all(torch.equal(tensor, best[name]) for name, tensor in trainer.final_weights().items())


def test_the_average_of_the_last(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=12, checkpoint_every=3, average=3)
    trainer.run()
    tables = [trainer.checkpoints.load(step, "model") for step in (6, 9, 12)]
    for name, tensor in trainer.final_weights().items():
        mean = torch.stack([table[name].double() for table in tables]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_accumulation_does_not_change_the_losses(data, tmp_path):
    tiny.trainer(data, tmp_path / "whole", dropout=0.0, steps=20).run()
    tiny.trainer(data, tmp_path / "parts", dropout=0.0, steps=20, device_tokens=60).run()
    for whole, parts in zip(tiny.losses(tmp_path / "whole"), tiny.losses(tmp_path / "parts"), strict=True):
        key = "loss" if "loss" in whole else "valid_loss"
        assert parts[key] == pytest.approx(whole[key], rel=1e-5)


def test_the_moving_average_is_what_is_validated(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=10, ema=0.9)
    trainer.run()
    recorded = read_journal(tmp_path / "metrics.jsonl")[-1]["valid_loss"]
    model = tiny.model(data).eval()
    model.load_state_dict(trainer.checkpoints.load(10, "ema"), strict=True)
    total = sum(torch.stack(trainer.task.measure(model, part)) for part in trainer.task.validation(tiny.HERE))
    assert (total[0] / total[2]).item() == pytest.approx(recorded, rel=1e-6)


def test_an_interruption_leaves_no_trace(data, tmp_path):
    """Neither in the exported average nor in what is kept."""
    settings = {"steps": 20, "checkpoint_every": 5, "average": 2, "keep": 2}
    straight = tiny.trainer(data, tmp_path / "straight", **settings)
    straight.run()
    stopped = tiny.trainer(data, tmp_path / "stopped", **settings)
    loss, calls = stopped.task.loss, itertools.count(1)

    def asked(model, part):
        stopped.interruption.asked = next(calls) == 17
        return loss(model, part)

    stopped.task.loss = asked
    with pytest.raises(TrainingError, match="stopped after step 17"):
        stopped.run()
    assert stopped.checkpoints.steps() == [10, 15, 17]
    again = tiny.trainer(data, tmp_path / "stopped", **settings)
    again.run()
    assert again.checkpoints.steps() == straight.checkpoints.steps() == [15, 20]
    expected = straight.final_weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.final_weights().items())


def test_what_is_newer_than_the_good_checkpoint_goes(data, tmp_path):
    tiny.trainer(data, tmp_path, steps=20, checkpoint_every=5).run()
    for step in (15, 20):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "state.json").write_text("torn")
    trainer = tiny.trainer(data, tmp_path, steps=10, checkpoint_every=5)
    trainer.run()
    assert trainer.checkpoints.steps() == [5, 10]


def test_a_checkpoint_that_a_kill_left_over_goes_with_the_next_run(data, tmp_path):
    """Killed after a checkpoint was written and before the one too many was removed, at the last step even."""
    trainer = tiny.trainer(data, tmp_path, steps=20, checkpoint_every=5, keep=2)
    prune, trainer._prune = trainer._prune, lambda: prune() if trainer.state.step < 20 else None
    trainer.run()
    before = trainer.checkpoints.steps()
    assert before[-3:] == [10, 15, 20]
    again = tiny.trainer(data, tmp_path, steps=20, checkpoint_every=5, keep=2)
    again.run()
    assert again.checkpoints.steps() == sorted({again.state.best_step, 15, 20})


def test_a_torn_checkpoint_is_not_exported(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=20, checkpoint_every=5, average=2)
    trainer.run()
    path = trainer.checkpoints.path(15) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    tables = [trainer.checkpoints.load(step, "model") for step in (10, 20)]
    for name, tensor in trainer.final_weights().items():
        torch.testing.assert_close(tensor, (tables[0][name] + tables[1][name]) / 2, rtol=1e-6, atol=1e-7)


def test_nothing_to_export(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path, steps=2, checkpoint_every=2)
    trainer.task.measure = lambda model, part: [torch.tensor(x, dtype=torch.float64) for x in (math.nan, 0.0, 1.0)]
    trainer.run()
    with pytest.raises(TrainingError, match=r"no validation in .* had a finite loss"):
        trainer.final_weights()


def test_other_data_and_fewer_steps_are_refused(data, tmp_path):
    tiny.trainer(data, tmp_path, steps=10).run()
    with pytest.raises(TrainingError, match=r"has 10 steps already, and training\.steps is 5"):
        tiny.trainer(data, tmp_path, steps=5).run()
    other = tiny.trainer(data, tmp_path, steps=20)
    other.task.fingerprint = lambda: "other"
    with pytest.raises(TrainingError, match="other data or another vocabulary"):
        other.run()


def test_a_line_without_an_end_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}\n{"step": 3, "lo')
    journal = Journal(path, 5)
    journal.write({"step": 3, "loss": 1.0, "grad_norm": math.nan})
    journal.close()
    assert read_journal(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0, "grad_norm": None}]


@pytest.mark.slow
def test_compiled(data, tmp_path):
    tiny.trainer(data, tmp_path / "eager", dropout=0.0, steps=4, mechanism="softmax").run()
    tiny.trainer(data, tmp_path / "compiled", dropout=0.0, steps=4, mechanism="softmax", compile=True).run()
    for eager, compiled in zip(tiny.losses(tmp_path / "eager"), tiny.losses(tmp_path / "compiled"), strict=True):
        key = "loss" if "loss" in eager else "valid_loss"
        assert compiled[key] == pytest.approx(eager[key], rel=1e-4)


def test_tensorboard(data, tmp_path):
    tiny.trainer(data, tmp_path, steps=3, tensorboard=True).run()
    assert any((tmp_path / "tensorboard").rglob("events*"))


def test_streams_of_random_numbers_differ():
    seeds = {stream_seed(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_compiled(data, tmp_path, parallel):
    settings = {"dropout": 0.0, "steps": 4, "mechanism": "softmax"}
    tiny.trainer(data, tmp_path / "one", **settings).run()
    two_processes(data, tmp_path / "two", 900, **settings, parallel=parallel, compile=True)
    for one, two in zip(tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "two"), strict=True):
        key = "loss" if "loss" in one else "valid_loss"
        assert two[key] == pytest.approx(one[key], rel=1e-4)


def two_processes(data, folder, seconds=180, **settings):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, tiny.__file__, str(data.folder.parent), str(folder), json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_two_processes_give_the_losses_of_one(data, tmp_path, parallel, optimizer):
    settings = {"dropout": 0.0, "steps": 20, "ema": 0.9, "optimizer": optimizer, "weight_decay": 0.1}
    tiny.trainer(data, tmp_path / "one", **settings).run()
    two_processes(data, tmp_path / "two", **settings | {"steps": 10, "parallel": parallel})
    two_processes(data, tmp_path / "two", **settings | {"parallel": parallel})  # and resume
    one, two = tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "two")
    assert len(one) == len(two)
    for alone, together in zip(one, two, strict=True):
        key = "loss" if "loss" in alone else "valid_loss"
        assert together[key] == pytest.approx(alone[key], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=pytest.mark.slow)])
def test_sharded_checkpoints(data, tmp_path, optimizer):
    """Two processes write what they have of the optimiser; two go on from it to the bit, and one within rounding."""
    settings = {"steps": 12, "checkpoint_every": 6, "dropout": 0.0, "optimizer": optimizer, "parallel": "fsdp"}
    two_processes(data, tmp_path / "whole", **settings)
    first = tmp_path / "whole" / "checkpoints" / "step-00000006"
    shards = sorted(path.name for path in (first / "optimizer").iterdir())
    assert len(shards) == 2
    assert all(name.endswith(".safetensors") for name in shards)
    assert not (first / "optimizer.safetensors").exists()
    for run in ("again", "one"):
        shutil.copytree(tmp_path / "whole", tmp_path / run)
        shutil.rmtree(tmp_path / run / "checkpoints" / "step-00000012")
    two_processes(data, tmp_path / "again", **settings)
    assert tiny.losses(tmp_path / "again") == tiny.losses(tmp_path / "whole")
    last = Path("checkpoints") / "step-00000012" / "model.safetensors"
    assert (tmp_path / "again" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    tiny.trainer(data, tmp_path / "one", **settings).run()
    for alone, together in zip(tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "whole"), strict=True):
        key = "loss" if "loss" in alone else "valid_loss"
        assert together[key] == pytest.approx(alone[key], rel=1e-5)
    assert (tmp_path / "one" / "checkpoints" / "step-00000012" / "optimizer.safetensors").exists()


def test_more_processes_than_sentences(data, tmp_path):
    """A process with nothing to do takes part all the same."""
    two_processes(data, tmp_path, steps=6, batch_tokens=5, checkpoint_every=6)
    assert Path(tmp_path / "metrics.jsonl").read_text().count("valid_loss") == 1


def going_on(data, folder, monkeypatch, **settings) -> list[str]:
    """What a run of 20 steps says that goes on after 10."""
    trainer = tiny.trainer(data, folder, steps=20, checkpoint_every=10, **settings)
    said: list[str] = []
    monkeypatch.setattr(trainer.display, "say", said.append)
    trainer.run()
    return said


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda lines: lines, False),
        (lambda lines: lines[1:], True),
        (lambda lines: [lines[0].replace("1", "2"), *lines[1:]], True),
        (lambda lines: [lines[0], *lines], True),
        (lambda lines: [], True),
        (lambda lines: [*lines, '{"step": 11, "loss": 9}\n'], False),  # what comes after the checkpoint is done again
    ],
    ids=["whole", "lost", "changed", "doubled", "gone", "newer"],
)
def test_records_that_were_changed_are_noticed(data, tmp_path, monkeypatch, change, noticed):
    tiny.trainer(data, tmp_path, steps=10, checkpoint_every=10).run()
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    said = going_on(data, tmp_path, monkeypatch)
    assert any("metrics.jsonl is not as it was written up to step 10" in line for line in said) is noticed
    assert not any("not to the bit" in line for line in said)


def test_going_on_elsewhere_is_said(data, tmp_path, monkeypatch):
    tiny.trainer(data, tmp_path, steps=10, checkpoint_every=10).run()
    here = environment.environment
    monkeypatch.setattr(
        "tamis.training.trainer.environment", lambda process: here(process) | {"threads": 64, "torch": "2.99"}
    )
    (line,) = (line for line in going_on(data, tmp_path, monkeypatch) if "not to the bit" in line)
    assert f"torch {torch.__version__} then and 2.99 now" in line
    assert f"threads {torch.get_num_threads()} then and 64 now" in line


def test_checkpoints_of_before_go_on_in_silence(data, tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.training.trainer.environment", lambda process: {})
    monkeypatch.setattr(Journal, "digest", lambda self: None)
    tiny.trainer(data, tmp_path, steps=10, checkpoint_every=10).run()
    monkeypatch.undo()
    said = going_on(data, tmp_path, monkeypatch)
    assert not any("not to the bit" in line or "not as it was" in line for line in said)
