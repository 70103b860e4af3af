"""Be hostile to the project for some minutes: ``python -m hostile --minutes 5 [PART ...]``.

Prints the seed, what is found and the command that shows it again, and how much was tried; the exit code is 1 if
anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "200", "NO_COLOR": "1"}

import torch

import tamis
import tamis.decoding
import tamis.exchange.export
import tamis.experiments
import tamis.hf.models
from hostile.calls import Calls
from hostile.commands import Commands
from hostile.company import Company
from hostile.damage import Damage
from hostile.disk import Disk
from hostile.faults import FAULTS
from hostile.harness import Part, Run
from hostile.kill import Kill
from hostile.recipes import Recipes
from hostile.text import Text
from hostile.worlds import KINDS, world_of
from tamis.bench.timing import machine

PARTS: tuple[type[Part], ...] = (Kill, Damage, Recipes, Commands, Calls, Disk, Company, Text)


def warm_up() -> None:
    """Have all imported that commands import when they are called: children have it then."""
    from tamis.cli import app

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for command in (
            "prepare",
            "train",
            "evaluate",
            "analyze",
            "report",
            "translate",
            "generate",
            "compare",
            "export",
        ):
            with contextlib.suppress(SystemExit):
                app([command, "/nowhere", *(["--to", "hf"] if command == "export" else [])])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile", description="Be hostile to the project.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--trial", type=int, help="only this one, and keep its folder")
    parser.add_argument("--faults", action="store_true", help="break the project on purpose, to see that it is found")
    parser.add_argument("--output", type=Path, help="a JSON file for the counts")
    wanted = parser.parse_args()
    if unknown := set(wanted.parts) - {part.name for part in PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is mounted and written goes even then
    warm_up()
    gc.freeze()  # children share what they do not touch
    memory = Path("/dev/shm")  # where fsync takes no time
    place = Path(tempfile.mkdtemp(prefix="hostile-", dir=memory if os.access(memory, os.W_OK) else None))
    place.chmod(0o755)  # a trial may be another user
    try:
        return _run(
            [part(place / part.name) for part in PARTS if not wanted.parts or part.name in wanted.parts], wanted
        )
    finally:
        if wanted.trial is None:
            shutil.rmtree(place)


def _run(parts: list[Part], wanted: argparse.Namespace) -> int:
    print(f"seed {wanted.seed}", flush=True)
    if wanted.faults:
        return int(sum(not _found(part, wanted.seed) for part in parts) > 0)
    run = Run(parts, wanted.seed, lambda text: print(text, flush=True))
    if wanted.trial is not None:
        for part in parts:
            run.one(part.name, wanted.trial, keep=True)
            print(f"{part.name}: see {part.place}/trial-{wanted.trial}")
    else:
        run.for_seconds(60.0 * wanted.minutes, lambda: _write(run, wanted))
    _write(run, wanted)
    print(run.describe())
    return int(run.failed)


def _write(run: Run, wanted: argparse.Namespace) -> None:
    if wanted.output is not None:
        found = {"benchmark": "hostile", "machine": machine(), "tamis": tamis.__version__, "minutes": wanted.minutes}
        wanted.output.write_text(json.dumps(found | run.to_dict(), indent=1) + "\n")


def _found(part: Part, seed: int) -> bool:
    """Whether a fault that is made on purpose is noticed in a few trials."""
    run = Run([part], seed, lambda text: None)
    for kind in KINDS:  # what is undisturbed is made before
        world_of(kind, part.place)
    run.one(part.name, 0)
    if run.failed:
        print(f"{part.name}: fails without a fault: {run.to_dict()}")
        return False
    with FAULTS[part.name]():
        for number in range(200):
            run.one(part.name, number)
            if run.failed:
                [failure, *_] = run.tallies[part.name].failures.values()
                print(f"{part.name}: noticed at trial {number}: {failure.message.splitlines()[0]}", flush=True)
                return True
    print(f"{part.name}: NOT noticed in 200 trials: {FAULTS[part.name].__doc__}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
