"""What four processes that share sequences compute, against one: `crew.py` does the work."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel import crew
from training import tiny, tiny_language


def run(script: list[str], processes: int, seconds: int) -> None:
    paths = [*sys.path, str(Path(__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*launch, *script], env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]


def launched(folder: Path, kind: str, seconds: int) -> Path:
    """The results of the crew."""
    tiny_language.prepared(folder / "text")
    run([crew.__file__, str(folder), kind], 4, seconds)
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("crew"), "fast", 300)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("crew"), "slow", 1800)


def check(folder: Path, prefixes: tuple[str, ...]) -> None:
    found = json.loads((folder / "found.json").read_text())
    chosen = {name: errors for name, errors in found.items() if name.startswith(prefixes)}
    assert chosen
    wrong = {}
    for name, errors in chosen.items():
        bound = 0.0 if name.startswith(("by hand", "not kept")) else 1e-6 if "float32" in name else 1e-12
        too_large = {key: error for key, error in errors.items() if not error <= bound}
        if too_large:
            wrong[name] = too_large
    assert not wrong


@pytest.mark.parametrize("rule", ["entmax", "softmax", "relu", "softpick"])
def test_attention_is_that_of_one_process(fast, rule):
    """Outputs and all gradients, those of alphas, slopes and biases included."""
    check(fast, (rule,))


def test_gathered_keys_change_no_bit(fast):
    check(fast, ("by hand",))


def test_gathered_keys_are_not_kept(fast):
    check(fast, ("not kept",))


def test_keys_in_shards(fast):
    check(fast, ("shards",))


def test_models_within_the_context(fast):
    check(fast, ("model", "translation"))


def test_activation_checkpointing(fast):
    check(fast, ("recomputed",))


def same_losses(one: Path, other: Path) -> None:
    alone, together = tiny.losses(one), tiny.losses(other)
    assert len(alone) == len(together) > crew.LANGUAGE["steps"]
    for here, there in zip(alone, together, strict=True):
        key = "loss" if "loss" in here else "valid_loss"
        assert there[key] == pytest.approx(here[key], rel=1e-5)


def by_one(text: Path, folder: Path, **changes: object) -> Path:
    """A run of a single process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny_language.trainer(text, folder, **(crew.LANGUAGE | changes)).run()
    torch.set_num_threads(before)
    return folder


@pytest.fixture
def one(fast, tmp_path):
    return by_one(fast / "text", tmp_path / "one")


def test_training_follows_one_process(fast, one):
    same_losses(one, fast / "ddp")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("heads", 'context="heads" divides the heads of keys, 1, by the 4 processes'),
        ("odd", "query must hold two chunks of the whole sequence, an even number of tokens, got 5"),
        ("weights", "attention_weights sees only the tokens of this process"),
        ("statistics", "attention_statistics sees only the tokens of this process"),
        ("mask", "attn_mask of a shared sequence must have columns for all 24 keys"),
        ("positions", "query_positions must be those of this process's 6 tokens, got (24,)"),
        ("nested", "sequences are sharded already"),
        ("dimension", "the mesh has no dimension 'rows': it has the dimensions context"),
        ("mesh", "mesh must be a DeviceMesh"),
        ("way", "context must be one of auto, heads, keys, got 'ring'"),
        ("length", "length is 8, got a sequence of 9 tokens"),
        ("recipes", "all processes must be given one recipe, and process 2 has training.lr = 2, but process 0 1"),
        ("processes", "training.context_parallel = 3 does not divide the number of processes, 4"),
    ],
)
def test_bad_input(fast, case, message):
    said = json.loads((fast / "said.json").read_text())
    assert message in said[case]


@pytest.mark.slow
def test_everything(slow):
    check(slow, ("",))


@pytest.mark.slow
def test_training_of_sharded_weights_follows_one_process(slow, one):
    same_losses(one, slow / "ddp")
    same_losses(one, slow / "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_of_four_processes_is_read_by_fewer(slow, tmp_path, processes):
    longer = {"steps": 60}
    expected = by_one(slow / "text", tmp_path / "one", **longer)
    shutil.copytree(slow / "fsdp", tmp_path / "fewer")
    if processes == 1:
        by_one(slow / "text", tmp_path / "fewer", **longer)
    else:
        settings = json.dumps(crew.LANGUAGE | longer | {"context_parallel": 2, "parallel": "fsdp"})
        run([tiny_language.__file__, str(slow / "text"), str(tmp_path / "fewer"), settings], 2, 300)
    same_losses(expected, tmp_path / "fewer")
