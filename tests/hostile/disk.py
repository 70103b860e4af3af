"""A disk that is full, fails or is read-only, and a clock that goes back: a clear error, or the same end as always.

Whatever a stage says meanwhile, run again with all in order it ends as if nothing had been.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hostile.children import FULL, fail_from, run, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import KINDS, Stage, World, copied, differences, world_of

ROOM = "256m"
"""Of a small disk in order: more than a run takes."""


def mounts() -> bool:
    """Whether this process may mount file systems."""
    return os.geteuid() == 0 and subprocess.run(["mount", "--version"], capture_output=True).returncode == 0


@contextmanager
def disk(folder: Path) -> Iterator[Callable[[str], None]]:
    """A file system of its own in a folder; gives what changes its options."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "hostile", folder], check=True)
    try:
        yield lambda options: _remount(folder, options)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def used(folder: Path) -> int:
    """Bytes of a file system that are taken."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Disk(Part):
    name = "disk"
    share = 1.5

    def begin(self) -> None:
        self.ways = [self.failing, self.limited, self.clock]
        probe = self.place / "probe"
        probe.mkdir()
        if mounts() and subprocess.run(["mount", "-t", "tmpfs", "hostile", probe], capture_output=True).returncode == 0:
            subprocess.run(["umount", probe], check=True)
            self.ways += [self.full, self.read_only]

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        world = world_of(draw.choice(KINDS), self.place)
        stage = draw.choice([*world.stages.values()])
        draw.choice(self.ways)(draw, world, stage, folder, counts)

    def disturbed(self, world: World, stage: Stage, folder: Path, before: Callable[[], Any], told: str) -> None:
        """A clear error or a right result."""
        what = f"{stage.name} of {world.kind} with {told}"
        outcome = run(tamis(*stage.arguments, before=before), folder)
        outcome.check(0, 1, what=what)
        if outcome.code == 0 and (different := differences(stage.after, folder)):
            raise WrongError(f"{what} says nothing, and: {'; '.join(different)}")

    def failing(self, draw: random.Random, world: World, stage: Stage, folder: Path, counts: Counter[str]) -> None:
        """Changes of files fail, one or all from some point on."""
        copied(stage.before, folder)
        number, count, code = draw.randint(1, stage.changes), draw.choice((1, 2, 10**9)), draw.choice(FULL)
        told = f"'{os.strerror(code)}' at change {number}" + (" and after" if count > 2 else "")
        self.disturbed(world, stage, folder, fail_from(number, count, code), told)
        world.again(stage, folder, told)
        counts["failing changes of files"] += 1

    def limited(self, draw: random.Random, world: World, stage: Stage, folder: Path, counts: Counter[str]) -> None:
        """No file may be larger than some size, so that writes end in the middle."""
        copied(stage.before, folder)
        size = draw.choice((draw.randint(0, 3000), draw.randint(0, 300_000)))
        told = f"files of at most {size} bytes"

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        outcome = run(tamis(*stage.arguments, before=limit), folder)
        # What a child says is written to files too, so a message may be cut short.
        if not 0 <= outcome.code <= 1 or "Traceback" in outcome.err:
            outcome.check(0, 1, what=f"{stage.name} of {world.kind} with {told}")
        world.again(stage, folder, told)
        counts["writes cut short"] += 1

    def full(self, draw: random.Random, world: World, stage: Stage, folder: Path, counts: Counter[str]) -> None:
        """A real file system with little room."""
        with disk(folder) as change:
            copied(stage.before, folder)
            room = used(folder) + draw.choice((4096, 20_000, 100_000, 400_000))
            told = "a full disk"
            change(f"size={room}")
            self.disturbed(world, stage, folder, lambda: None, told)
            change(f"size={ROOM}")
            world.again(stage, folder, told)
        counts["full disks"] += 1

    def read_only(self, draw: random.Random, world: World, stage: Stage, folder: Path, counts: Counter[str]) -> None:
        with disk(folder) as change:
            copied(stage.before, folder)
            change("ro")
            self.disturbed(world, stage, folder, lambda: None, "a read-only disk")
            change("rw")
            world.again(stage, folder, "a read-only disk")
        counts["read-only disks"] += 1

    def clock(self, draw: random.Random, world: World, stage: Stage, folder: Path, counts: Counter[str]) -> None:
        """The time of day jumps back and forth, and files come from the future."""
        copied(stage.before, folder)
        jumps = random.Random(draw.randrange(2**31))
        real = time.time
        for path in folder.rglob("*"):
            moment = real() + jumps.uniform(-1e8, 1e8)
            os.utime(path, (moment, moment))

        def before() -> None:
            time.time = lambda: real() + jumps.uniform(-1e8, 1e5)
            time.time_ns = lambda: int(1e9 * time.time())

        self.disturbed(world, stage, folder, before, "a clock that goes back")
        world.again(stage, folder, "a clock that goes back")
        counts["clocks going back"] += 1
