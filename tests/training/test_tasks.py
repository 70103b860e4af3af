import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

from tamis.data.batching import Position
from tamis.kernels.rela_norm import ops as rela_norm
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn.layers import TransformerLayer
from tamis.training import GeneratedTask, Process, TaskConfig, Trainer, TrainingConfig
from tamis.training.journal import Display
from tamis.training.tasks import IGNORED, Part
from training import tiny

SMALL = TaskConfig(name="reverse", options={"symbols": 4}, lengths=(3, 6), batch_size=16, validation_size=32)


def settings(**changes):
    base = {"steps": 30, "checkpoint_every": 10, "log_every": 1, "warmup": 5, "lr": 3e-3, "label_smoothing": 0.0}
    return TrainingConfig(**(base | changes))


def trainer(folder, config=SMALL, model=None, **changes):
    training = settings(**changes)
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "ffn_dim": 64, "num_layers": 1}
    model = CausalLM(CausalLMConfig(vocab_size=config.build().vocab_size, **(sizes | (model or {}))))
    return Trainer(model, GeneratedTask(config, training), training, folder, tiny.HERE, display=Display(quiet=True))


def update(task, number, process=tiny.HERE):
    _, indices = next(task.updates.iterate(Position(0, number)))
    tokens, parts = task.update(indices, process)
    return parts, tokens


def test_labels_are_the_answers_one_place_ahead():
    ((part,), tokens) = update(GeneratedTask(SMALL, settings()), 3)
    task = SMALL.build()
    assert part.inputs.shape[0] == SMALL.batch_size
    assert (part.labels != IGNORED).sum() == tokens
    lengths = set()
    for inputs, labels in zip(part.inputs.tolist(), part.labels.tolist(), strict=True):
        sep = inputs.index(task.sep_id)
        answer = [label for label in labels if label != IGNORED]
        assert labels[sep : sep + len(answer)] == answer
        assert inputs[sep + 1 : sep + len(answer)] == answer[:-1]
        assert answer == [*inputs[1:sep][::-1], task.eos_id]
        lengths.add(sep - 1)
    assert len(lengths) > 1
    assert lengths <= {3, 4, 5, 6}


def test_an_update_is_a_function_of_the_seed_and_its_number():
    task, again, other = (GeneratedTask(SMALL, settings(seed=seed)) for seed in (1, 1, 2))
    for number in (0, 1):
        update(again, number)
    inputs = update(task, 7)[0][0].inputs
    assert torch.equal(inputs, update(again, 7)[0][0].inputs)
    for different in (update(other, 7), update(task, 8)):
        assert not torch.equal(inputs, different[0][0].inputs)


@pytest.mark.parametrize("device_tokens", [None, 40])
def test_processes_share_an_update(device_tokens):
    task = GeneratedTask(SMALL, settings(device_tokens=device_tokens))
    ((whole,), tokens) = update(GeneratedTask(SMALL, settings()), 5)
    shares = [update(task, 5, Process(rank, 3, torch.device("cpu")))[0] for rank in range(3)]
    assert len({len(parts) for parts in shares}) == 1
    rows = [row for parts in shares for part in parts for row in part.inputs.tolist()]
    assert sorted(rows) == sorted(whole.inputs.tolist())
    assert sum((part.labels != IGNORED).sum() for parts in shares for part in parts) == tokens
    if device_tokens:
        assert all(part.inputs.numel() <= device_tokens for parts in shares for part in parts)


def test_validation_is_the_same_for_every_seed_and_never_trained_on():
    first, second = (list(GeneratedTask(SMALL, settings(seed=seed)).validation(tiny.HERE)) for seed in (1, 2))
    assert torch.equal(first[0].inputs, second[0].inputs)
    sep = SMALL.build().sep_id
    valid = {tuple(row[: row.index(sep)]) for row in first[0].inputs.tolist()}
    task = GeneratedTask(SMALL, settings())
    seen = {tuple(row[: row.index(sep)]) for n in range(200) for row in update(task, n)[0][0].inputs.tolist()}
    assert not valid & seen


def test_easier_forms_are_drawn_in_training_alone():
    hard = TaskConfig(name="mqmtar", options={"symbols": 8, "queries": 3}, batch_size=16, validation_size=8)
    mixed = dataclasses.replace(hard, also=[{"queries": 1}, {"queries": 2}])
    task, plain = GeneratedTask(mixed, settings()), GeneratedTask(hard, settings())
    counts: Counter[int] = Counter()
    for number in range(60):
        ((part,), tokens) = update(task, number)
        answers = (part.labels != IGNORED).sum(1)
        assert answers.sum() == tokens
        counts.update(answers.tolist())
    assert set(counts) == {3 * queries + 1 for queries in (1, 2, 3)}
    assert all(240 < count < 400 for count in counts.values())  # of 960, in groups of four
    (valid,), (own,) = list(task.validation(tiny.HERE)), list(plain.validation(tiny.HERE))
    assert torch.equal(valid.labels, own.labels)
    assert task.fingerprint() != plain.fingerprint()


def test_a_part_in_a_room_trains_the_same():
    task = GeneratedTask(SMALL, settings())
    model = CausalLM(CausalLMConfig(vocab_size=7, embed_dim=16, num_heads=2, ffn_dim=16, num_layers=1))
    for number in (0, 1):
        ((part,), _) = update(task, number)
        odd = Part(part.inputs[:13], part.labels[:13])
        room = odd.room("cpu")
        room.labels.fill_(3)  # of what was there before
        room.fill(odd)
        assert room.inputs.shape == odd.room_shape() != odd.inputs.shape
        torch.testing.assert_close(task.loss(model, room), task.loss(model, odd))


def test_it_learns(tmp_path):
    config = TaskConfig(
        name="local_count",
        options={"symbols": 4, "longest_run": 4},
        lengths=(4, 12),
        batch_size=32,
        validation_size=64,
    )
    state = trainer(tmp_path, config, steps=150, checkpoint_every=75, log_every=50, lr=1e-2).run()
    assert state.best_step == 150
    assert tiny.losses(tmp_path)[-1]["valid_accuracy"] > 0.65  # by chance 0.3


def test_a_run_in_two_sittings_is_the_run_in_one(tmp_path):
    trainer(tmp_path / "one").run()
    trainer(tmp_path / "two", steps=10).run()
    trainer(tmp_path / "two").run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")
    weights = [tmp_path / run / "checkpoints" / "step-00000030" / "model.safetensors" for run in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "revers"}, "did you mean 'reverse'"),
        ({"options": {"symbol": 4}}, "no option 'symbol'"),
        ({"options": 4}, "options must be a table"),
        ({"also": {"symbols": 4}}, "also must be a list of tables"),
        ({"also": [{"symbol": 4}]}, "no option 'symbol'"),
        ({"name": "max_retrieval", "options": {"base": 6}, "lengths": (4, 40)}, "no 40 different integers below 36"),
        ({"also": [{"symbols": 3}]}, "easier forms of reverse must have its symbols"),
        ({"lengths": (6, 3)}, "lengths of reverse must ascend from 1 or more"),
        ({"lengths": (3,)}, "two ints"),
        ({"lengths": 3}, "two ints"),
        ({"name": "mqmtar", "options": {"symbols": 1}, "lengths": (20, 40)}, "no 2 different integers below 1"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "asentmax", "rela"])
def test_layers_alike_are_compiled_once(tmp_path, monkeypatch, mechanism):
    def traced(module, **arguments):
        nn.Module.compile(module, backend="eager", **arguments)  # and nothing to wait for

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def observe(model):
        before = graphs()
        model(torch.ones(1, 2, dtype=torch.int64))  # of a shape that would be compiled anew
        assert graphs() == before
        return {}

    monkeypatch.setattr(TransformerLayer, "compile", traced)
    monkeypatch.setattr(rela_norm, "worker", lambda z: None)  # compiled layers take the plain operations: so do both
    found = {}
    for name, compile in (("plain", False), ("compiled", True)):
        model = {"num_layers": 10, "mechanism": mechanism, "position": "nape"}
        run = trainer(tmp_path / name, model=model, steps=6, checkpoint_every=3, compile=compile)
        run.observe = observe
        torch._dynamo.reset()
        before = graphs()
        run.run()
        found[name] = graphs() - before
    assert found == {"plain": 0, "compiled": 2}  # one of training, one of validation
    for plain, compiled in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "compiled"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert compiled[key] == pytest.approx(plain[key], rel=1e-5)
