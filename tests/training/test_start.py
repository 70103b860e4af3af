import shutil

import pytest
import torch

from tamis.models import Seq2Seq
from training import tiny


@pytest.fixture
def before(data, tmp_path):
    """A short run of softmax."""
    folder = tmp_path / "before"
    tiny.trainer(data, folder, mechanism="softmax", steps=10).run()
    return folder


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:08d}"


def test_another_mechanism_starts_from_the_weights_of_a_run(data, tmp_path, before):
    source = Seq2Seq.from_pretrained(checkpoint(before, 10))
    source.save_pretrained(before / "model")
    theirs = source.state_dict()
    for folder in (before, before / "model", checkpoint(before, 10)):
        trainer = tiny.trainer(data, tmp_path / "run", mechanism="rela", start=str(folder))
        ours = trainer.model.state_dict()
        new = ours.keys() - theirs.keys()
        assert new
        assert all(".mechanism." in name for name in new)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_what_both_mechanisms_learn_is_taken_over(data, tmp_path):
    trainer = tiny.trainer(data, tmp_path / "before", steps=10)
    trainer.run()
    learned = {name: tensor for name, tensor in trainer.model.state_dict().items() if ".mechanism." in name}
    assert learned
    fresh = tiny.trainer(data, tmp_path / "fresh").model.state_dict()
    started = tiny.trainer(data, tmp_path / "after", start=str(checkpoint(tmp_path / "before", 10))).model.state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in learned.items())
    assert not any(torch.equal(fresh[name], tensor) for name, tensor in learned.items())


def test_what_the_other_mechanism_had_learnt_is_left_behind(data, tmp_path):
    tiny.trainer(data, tmp_path / "before", mechanism="rela", steps=10).run()
    trainer = tiny.trainer(
        data, tmp_path / "after", mechanism="softmax", start=str(checkpoint(tmp_path / "before", 10))
    )
    assert not any(".mechanism." in name for name in trainer.model.state_dict())


def test_a_run_that_goes_on_needs_its_start_no_more(data, tmp_path, before):
    settings = {"start": str(checkpoint(before, 10)), "ema": 0.9}
    tiny.trainer(data, tmp_path / "one", **settings).run()
    tiny.trainer(data, tmp_path / "two", **settings | {"steps": 10}).run()
    shutil.rmtree(before)
    tiny.trainer(data, tmp_path / "two", **settings).run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")


def test_a_run_whose_checkpoints_are_torn_starts_there_again(data, tmp_path, before):
    start = str(checkpoint(before, 10))
    tiny.trainer(data, tmp_path / "run", start=start, steps=10).run()
    first = tiny.losses(tmp_path / "run")
    (checkpoint(tmp_path / "run", 10) / "model.safetensors").write_bytes(b"torn")
    tiny.trainer(data, tmp_path / "run", start=start, steps=10).run()
    assert tiny.losses(tmp_path / "run") == first
    assert first[0]["loss"] < tiny.losses(before)[0]["loss"]


def test_what_does_not_fit_is_refused(data, tmp_path, before):
    start = checkpoint(before, 10)
    config = start / "config.json"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tiny.trainer(data, tmp_path / "run", start=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"start must be a string, got 3"):
        tiny.settings(start=3)
    other = tiny.model(data, embed_dim=16)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"expected .* to be \(32,\), got \(16,\)"):
        tiny.trainer(data, tmp_path / "run", start=str(tmp_path / "other"))
    deeper = tiny.model(data, encoder_layers=2)
    deeper.save_pretrained(tmp_path / "deeper")
    with pytest.raises(ValueError, match=r"to be no such weight, got \("):
        tiny.trainer(data, tmp_path / "run", start=str(tmp_path / "deeper"))
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not as it was written"):
        tiny.trainer(data, tmp_path / "run", start=str(start))
    (start / "checksums.json").unlink()
    with pytest.raises(ValueError, match="is not JSON"):
        tiny.trainer(data, tmp_path / "run", start=str(start))
    assert not (tmp_path / "run" / "checkpoints").exists()
