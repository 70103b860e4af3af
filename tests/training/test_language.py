import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tamis.data.batching import IGNORED, Position
from tamis.data.prepare import TextConfig
from tamis.training import Process
from training import tiny, tiny_language
from training.test_graphs import graphed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("language")
    tiny_language.prepared(place)
    return place


def update(task, number, process=tiny_language.HERE):
    stream = task.updates.iterate(Position())
    for _ in range(number):
        next(stream)
    _, indices = next(stream)
    tokens, parts = task.update(indices, process)
    return parts, tokens


def test_documents_in_a_row_are_as_if_alone(folder):
    """The loss of packed rows against that of every piece of a document put through the model by itself."""
    task = tiny_language.task(folder)
    model = tiny_language.model(tiny_language.prepared(folder))
    ((part,), tokens) = update(task, 0)
    assert part.inputs.shape == (4, 24)
    assert tokens == part.labels.numel() == 96
    assert part.bounds is not None
    assert len(part.bounds) > 5  # some documents begin within rows
    inputs, labels = part.inputs.flatten(), part.labels.flatten()
    expected = torch.zeros(())
    for start, end in itertools.pairwise(part.bounds.tolist()):
        logits = model(inputs[None, start:end])[0]
        expected = expected + F.cross_entropy(logits, labels[start:end], reduction="sum")
    torch.testing.assert_close(task.loss(model, part), expected)


def test_rows_of_one_document_are_not_packed(folder):
    task = tiny_language.task(folder, length=4, batch_tokens=8)
    model = tiny_language.model(tiny_language.prepared(folder))
    plain = next(part for number in range(50) for part in update(task, number)[0] if part.bounds is None)
    logits = model(plain.inputs.view(1, -1), cu_seqlens=torch.tensor([0, 4, 8]))
    expected = F.cross_entropy(logits[0], plain.labels.flatten(), reduction="sum")
    torch.testing.assert_close(task.loss(model, plain), expected)


@pytest.mark.parametrize("length", [4, 24])
def test_a_part_in_a_room_trains_the_same(folder, length):
    task = tiny_language.task(folder, length=length)
    model = tiny_language.model(tiny_language.prepared(folder))
    ((first,), _), ((second,), _) = update(task, 0), update(task, 1)
    room = first.room("cpu")
    room.fill(first)
    if room.room_shape() == second.room_shape():
        room.fill(second)
        first = second
    torch.testing.assert_close(task.loss(model, room), task.loss(model, first))


def test_few_shapes(folder):
    task = tiny_language.task(folder, length=24)
    shapes = {update(task, number)[0][0].room_shape() for number in range(12)}
    assert len(shapes) <= 2


@pytest.mark.parametrize("device_tokens", [None, 48])
def test_processes_share_an_update(folder, device_tokens):
    ((whole,), tokens) = update(tiny_language.task(folder), 2)
    task = tiny_language.task(folder, device_tokens=device_tokens)
    shares = [update(task, 2, Process(rank, 3, torch.device("cpu")))[0] for rank in range(3)]
    assert len({len(parts) for parts in shares}) == 1
    labels = [part.labels for parts in shares for part in parts]
    assert sum(int((some != IGNORED).sum()) for some in labels) == tokens
    rows = {tuple(row) for some in labels for row in some.tolist() if row[0] != IGNORED}
    assert rows == {tuple(row) for row in whole.labels.tolist()}


def test_validation_has_each_label_once(folder):
    task = tiny_language.task(folder)
    found = [part.labels for part in task.validation(tiny_language.HERE)]
    labels = torch.cat(found).flatten()
    expected = [token for document in range(len(task.valid)) for token in (*task.valid[document].tolist(), 2)]
    assert labels[labels != IGNORED].tolist() == expected
    everything = torch.cat([part.labels for part in task.sample(1 << 20)]).flatten()
    assert everything[everything != IGNORED].tolist() == expected
    few = torch.cat([part.labels for part in task.sample(72)])
    assert few.shape == (3, 24)
    assert few[0].tolist() == expected[:24]


def test_it_learns_to_count(folder, tmp_path):
    tiny_language.trainer(folder, tmp_path, steps=120, checkpoint_every=60, lr=1e-2, batch_tokens=200).run()
    record = tiny.losses(tmp_path)[-1]
    assert record["valid_accuracy"] > 0.8


def test_pass_keys_train_too(folder, tmp_path):
    tiny_language.trainer(folder, tmp_path, length=180, share=0.3, steps=3, batch_tokens=400).run()
    assert tiny.losses(tmp_path)[-1]["step"] == 3


def test_a_run_in_two_sittings_is_the_run_in_one(folder, tmp_path):
    options = {"architecture": {"dropout": 0.1}, "share": 0.1, "length": 160, "batch_tokens": 320}
    tiny_language.trainer(folder, tmp_path / "one", **options).run()
    tiny_language.trainer(folder, tmp_path / "two", steps=4, **options).run()
    tiny_language.trainer(folder, tmp_path / "two", **options).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")


ARCHITECTURES = [{"mechanism": "softmax", "position": "rope"}, {"mechanism": "asentmax", "position": "nape"}]


def same_losses(first, second, rel):
    one, two = tiny.losses(first), tiny.losses(second)
    assert len(one) == len(two)
    for here, there in zip(one, two, strict=True):
        key = "loss" if "loss" in here else "valid_loss"
        assert there[key] == pytest.approx(here[key], rel=rel)


@pytest.mark.parametrize("length", [6, 24])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replayed_steps_are_the_same_steps(folder, tmp_path, architecture, length):
    """With a graph that is Python; rows of one document and packed ones have rooms of their own."""
    options = {"architecture": architecture, "length": length, "batch_tokens": 48, "steps": 20}
    tiny_language.trainer(folder, tmp_path / "plain", **options).run()
    trainer = graphed(tiny_language.trainer(folder, tmp_path / "graphs", **options))
    trainer.run()
    assert 0 < trainer.graphs.captured <= 5
    same_losses(tmp_path / "plain", tmp_path / "graphs", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_gives_the_losses_of_a_cpu_with_graphs_and_without(folder, tmp_path, architecture):
    gpu = Process(0, 1, torch.device("cuda"))
    options = {"architecture": architecture, "steps": 20}
    tiny_language.trainer(folder, tmp_path / "cpu", **options).run()
    tiny_language.trainer(folder, tmp_path / "gpu", gpu, **options).run()
    trainer = tiny_language.trainer(folder, tmp_path / "graphs", gpu, cuda_graphs=True, **options)
    trainer.run()
    assert any(held.graph is not None for held in trainer.graphs._held.values())
    same_losses(tmp_path / "cpu", tmp_path / "gpu", 1e-3)
    same_losses(tmp_path / "gpu", tmp_path / "graphs", 1e-3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(folder, tmp_path, parallel):
    options = {"steps": 6, "checkpoint_every": 3, "batch_tokens": 75}  # three rows: one process has one of them
    tiny_language.trainer(folder, tmp_path / "one", **options).run()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = json.dumps(options | {"parallel": parallel, "device_tokens": 24})
    command = [*launch, tiny_language.__file__, str(folder), str(tmp_path / "two"), settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    same_losses(tmp_path / "one", tmp_path / "two", 1e-5)


def test_an_update_needs_a_row(folder):
    with pytest.raises(ValueError, match=r"batch_tokens = 20 holds no row of text\.length = 24"):
        tiny_language.task(folder, batch_tokens=20)


def test_a_row_needs_room_for_a_pass_key(folder):
    with pytest.raises(ValueError, match=r"take \d+ tokens, more than text\.length = 24"):
        tiny_language.task(folder, share=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 3}, "train must be a string or a list of some, got 3"),
        ({"train": []}, "train must be a string or a list"),
        ({"valid": None}, "valid must be a string"),
        ({"documents": "page"}, "documents must be one of"),
        ({"length": 1}, "length must be an int of at least 2"),
        ({"passkey_share": 0.95}, "must leave room for text"),
        ({"passkey_share": 2}, r"must lie in \[0, 1\]"),
        ({"key": 3}, "key must be a string"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        TextConfig(**({"train": "a", "valid": "b"} | changes))
