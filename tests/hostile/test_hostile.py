"""A short form of `make hostile`, and that what is found is told."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hostile.faults import FAULTS
from hostile.harness import Part, Run, WrongError

TESTS = Path(__file__).parents[1]


def hostile(*arguments: str) -> subprocess.CompletedProcess:
    found = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), *([found] if found else [])])
    command = [sys.executable, "-m", "hostile", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)


def test_a_little_of_everything():
    found = hostile("--minutes", "0.25", "--seed", "38")
    assert found.returncode == 0, found.stdout + found.stderr
    for name in FAULTS:
        assert re.search(rf"^{name} +\d+ trials .* 0 failed", found.stdout, re.MULTILINE), found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name):
    found = hostile(name, "--faults", "--seed", "1")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{name}: noticed at trial" in found.stdout


class Dice(Part):
    """Finds something with every third trial, and says which."""

    name = "dice"

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        counts["throws"] += 1
        thrown = draw.randrange(1000)
        if folder.name.endswith(("0", "3")):
            raise WrongError(f"something\nthrown {thrown}")


def test_what_is_found_is_told_once_with_the_command_that_shows_it_again(tmp_path):
    told: list[str] = []
    run = Run([Dice(tmp_path / "dice")], 7, told.append)
    run.trials("dice", range(4))
    assert run.failed
    assert len(told) == 1
    first, command = told[0].splitlines()[1], "python -m hostile dice --seed 7 --trial 0"
    assert command in told[0]
    [failure] = run.to_dict()["parts"]["dice"]["failures"]
    assert failure["times"] == 2
    assert "4 trials" in run.describe()
    assert "2 failed  4 throws" in run.describe()
    again = Run([Dice(tmp_path / "dice")], 7, told.append)
    again.one("dice", 0, keep=True)
    assert told[1].splitlines()[1] == first
    assert (tmp_path / "dice" / "trial-0").is_dir()


def test_time_is_shared_and_nobody_is_left_out(tmp_path):
    class Other(Dice):
        name = "other"
        share = 3.0

        def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
            counts["throws"] += 1

    run = Run([Dice(tmp_path / "dice"), Other(tmp_path / "other")], 7, lambda text: None)
    run.for_seconds(0.0)
    assert {tally.trials for tally in run.tallies.values()} == {1}
    run.for_seconds(0.3)
    assert run.tallies["other"].seconds > run.tallies["dice"].seconds


@pytest.mark.parametrize("name", ["hostile-cpu", "hostile-more-cpu"])
def test_the_counts_of_the_docs_are_those_of_the_last_long_runs(name):
    found = json.loads((TESTS.parent / f"benchmarks/results/{name}.json").read_text())
    page = (TESTS.parent / "docs/reliability.md").read_text()
    assert f"--seed {found['seed']}" in page
    for part_name, part in found["parts"].items():
        counts = ", ".join(f"{number:,} {what}" for what, number in part["counts"].items())
        failed = sum(failure["times"] for failure in part["failures"])
        assert f"| {part_name} | {part['trials']:,} | {counts} | {failed} |" in page
