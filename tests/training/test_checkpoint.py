import random

import pytest
import torch

from tamis.training.checkpoint import CheckpointError, Checkpoints, average
from tamis.training.distributed import save_shards


def tensors(value):
    return {"a": torch.full((3, 4), float(value)), "b": torch.tensor([value], dtype=torch.long)}


def saved(folder, *steps):
    checkpoints = Checkpoints(folder)
    for step in steps:
        shards = checkpoints.draft(step) / "shards"
        shards.mkdir()
        (shards / "1.bin").write_bytes(bytes(range(step, 64)))
        checkpoints.save(
            step, {"model": tensors(step), "optimizer": tensors(-step)}, {"config.json": "{}"}, {"x": step}
        )
    return checkpoints


def usable(checkpoints):
    return [step for step, found in checkpoints.latest() if not isinstance(found, CheckpointError)]


def test_what_is_saved_comes_back(tmp_path):
    checkpoints = saved(tmp_path, 10, 20)
    step, state = next(checkpoints.latest())
    assert (step, state["step"], state["x"]) == (20, 20, 20)
    for name, tensor in checkpoints.load(20, "optimizer").items():
        assert torch.equal(tensor, tensors(-20)[name])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "state.json", "shards/1.bin"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "garbage"])
def test_a_damaged_one_is_passed_over(tmp_path, name, damage):
    checkpoints = saved(tmp_path, 10, 20)
    path = checkpoints.path(20) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "empty": b"",
                "cut": content[:-1] if name != "state.json" else content[:-3],
                "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "garbage": random.Random(0).randbytes(len(content)),
            }[damage]
        )
    assert usable(checkpoints) == [10]


def test_fuzzed_states_never_raise_anything_else(tmp_path):
    checkpoints = saved(tmp_path, 10)
    path = checkpoints.path(10) / "state.json"
    good, known = path.read_bytes(), checkpoints.verify(10)
    draw = random.Random(1)
    for _ in range(300):
        content = bytearray(good)
        for _ in range(draw.randint(1, 5)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(bytes(content))
        try:
            found = checkpoints.verify(10)
        except CheckpointError:
            continue
        assert found == known  # a change that JSON does not see, such as white space


@pytest.mark.parametrize("state", ["[" * 100_000, "[]", "null", "3", '{"sha256": 1}', '{"files": {}, "sha256": "x"}'])
def test_states_of_another_shape(tmp_path, state):
    checkpoints = saved(tmp_path, 10)
    (checkpoints.path(10) / "state.json").write_text(state)
    assert usable(checkpoints) == []


def test_a_draft_is_not_a_checkpoint(tmp_path):
    checkpoints = saved(tmp_path, 10)
    (tmp_path / ".unfinished-step-00000020").mkdir()
    (tmp_path / "step-notanumber").mkdir()
    assert checkpoints.steps() == [10]
    checkpoints.remove([])
    assert not (tmp_path / ".unfinished-step-00000020").exists()


def test_saving_again_replaces(tmp_path):
    checkpoints = saved(tmp_path, 10)
    (checkpoints.path(10) / "state.json").write_text("torn")
    checkpoints.draft(10)
    checkpoints.save(10, {"model": tensors(11)}, {}, {})
    assert usable(checkpoints) == [10]
    assert checkpoints.load(10, "model")["b"].item() == 11


def test_a_draft_begins_empty(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.draft(10) / "left behind").write_text("")
    assert list(checkpoints.draft(10).iterdir()) == []


def test_remove(tmp_path):
    checkpoints = saved(tmp_path, 10, 20, 30, 40, 50)
    checkpoints.remove([10, 30])
    assert checkpoints.steps() == [20, 40, 50]
    (tmp_path / "step-7").mkdir()
    assert checkpoints.steps() == [20, 40, 50]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/optimizer cannot be written by process 0"):
        save_shards(tmp_path / "file" / "optimizer", tensors(1))


def test_average(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 6)
    mean = average([checkpoints.path(step) / "model.safetensors" for step in (1, 2, 6)])
    assert torch.equal(mean["a"], torch.full((3, 4), 3.0))
    assert mean["b"].item() == 6


def test_average_of_different_models_is_an_error(tmp_path):
    checkpoints = saved(tmp_path, 1)
    checkpoints.draft(2)
    checkpoints.save(2, {"model": {"other": torch.ones(1)}}, {}, {})
    with pytest.raises(CheckpointError, match="other weights"):
        average([checkpoints.path(step) / "model.safetensors" for step in (1, 2)])
    with pytest.raises(ValueError, match="no checkpoint"):
        average([])
