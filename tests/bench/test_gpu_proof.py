"""`make gpu-proof` without a GPU: its commands are there, and it keeps its records straight."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tamis.cli import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("gpu_proof", ROOT / "benchmarks" / "gpu_proof.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_benchmark_takes_the_options_that_it_is_given(proof, tmp_path):
    """Options are read before help is shown."""
    commands = [command for part in proof.parts(tmp_path, 2) for command in part.commands]
    benchmarks = [list(command[3:]) for command in commands if command[1:3] == ("-m", "tamis")]
    assert len(benchmarks) == 6
    for words in benchmarks:
        found = CliRunner().invoke(app, [*words, "--help"])
        assert found.exit_code == 0, (words, found.output)
    assert CliRunner().invoke(app, [*benchmarks[0], "--longer", "--help"]).exit_code != 0


def test_every_script_is_there(proof, tmp_path):
    commands = [command for part in proof.parts(tmp_path, 2) for command in part.commands]
    scripts = {word for command in commands for word in command if word.endswith(".py")}
    assert scripts == {"tests/kernels/sanitize.py"}
    assert all((ROOT / script).is_file() for script in scripts)


def test_verdicts(proof, tmp_path):
    """One part passes, one fails, one is cut; those that passed are not done again with the same sources."""

    def part(name, text, timed):
        return proof.Part(name, ((sys.executable, "-c", "pass"), (sys.executable, "-c", text)), timed)

    todo = [
        part("good", "print('measured')", timed=True),
        part("bad", "raise SystemExit(3)", timed=False),
        proof.Part("missing", (("no-such-program",),), timed=False),
    ]
    record = proof.read_record(tmp_path)
    proof.prove(todo, tmp_path, record, float("inf"))
    proof.prove([part("slow", "import time; time.sleep(60)", timed=True)], tmp_path, record, time.monotonic() + 0.5)
    written = json.loads((tmp_path / proof.RECORD).read_text())
    verdicts = {name: found["verdict"] for name, found in written["parts"].items()}
    assert verdicts == {"good": "passed", "bad": "failed", "slow": "cut", "missing": "failed"}
    assert written["parts"]["missing"]["reason"] == "there is no no-such-program here"
    assert (tmp_path / "good.log").read_text() == "measured\n"
    assert proof.read_record(tmp_path)["parts"] == written["parts"]
    (tmp_path / proof.RECORD).write_text(json.dumps(written | {"sources": "others"}))
    assert proof.read_record(tmp_path)["parts"] == {}
