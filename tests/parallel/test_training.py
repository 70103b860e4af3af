"""Runs whose sequences are shared, disturbed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from training import tiny, tiny_language

SETTINGS = {
    "steps": 40,
    "checkpoint_every": 10,
    "batch_tokens": 75,
    "context_parallel": 2,
    "architecture": {"mechanism": "entmax", "position": "rope", "dropout": 0.1, "attention_dropout": 0.1},
}


def started(data: Path, run: Path, **changes: object) -> list[subprocess.Popen]:
    """Four processes, by hand: torchrun would end the others itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "4",
    }
    command = [sys.executable, tiny_language.__file__, str(data), str(run), json.dumps(SETTINGS | changes)]
    return [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]


def ended(crew: list[subprocess.Popen], seconds: float) -> list[str]:
    """What all said, once they have ended."""
    deadline = time.monotonic() + seconds
    try:
        return [one.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for one in crew]
    finally:
        for one in crew:
            one.kill()


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_goes_on_exactly(tmp_path):
    """With dropout of weights and activations: every random number comes again."""
    data = tmp_path / "data"
    tiny_language.prepared(data)
    ended(started(data, tmp_path / "undisturbed"), 300)
    crew = started(data, tmp_path / "killed")
    first = tmp_path / "killed" / "checkpoints" / "step-00000010"
    deadline = time.monotonic() + 300
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    crew[3].send_signal(signal.SIGKILL)
    said = ended(crew, 120)
    assert crew[3].returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "checkpoints" / "step-00000040").exists()
    for rank in range(3):
        assert crew[rank].returncode == 1
        assert f"process {rank} of 4 lost another one" in said[rank]
        assert "they go on from the last checkpoint" in said[rank]
    again = started(data, tmp_path / "killed")
    ended(again, 300)
    assert [one.returncode for one in again] == [0] * 4
    assert tiny.losses(tmp_path / "killed") == tiny.losses(tmp_path / "undisturbed")
    place = Path("checkpoints") / "step-00000040" / "model.safetensors"
    one, other = (load_file(tmp_path / run / place) for run in ("killed", "undisturbed"))
    assert all((one[name] == other[name]).all() for name in one)
