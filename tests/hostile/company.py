"""Several processes in one folder, and one of several that train together killed.

The ranks are forked here and told what torchrun tells its own; like torchrun's agent, the part ends the others when one
is gone and they do not end by themselves.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.children import PATIENCE, Child, Outcome, kill_at, run, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import KINDS, World, copied, world_of

RANKS = 2
GRACE = 5.0
"""Seconds in which a rank that lost another one may end by itself."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def ranks(arguments: tuple[object, ...], where: Path, before: dict[int, Callable[[], Any]]) -> list[Child]:
    """A command in several processes; `before` by rank."""
    port = free_port()

    def joined(rank: int) -> Callable[[], None]:
        def work() -> None:
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in told.items()}
            before.get(rank, lambda: None)()

        return work

    return [Child(tamis(*arguments, before=joined(rank)), where) for rank in range(RANKS)]


def together(arguments: tuple[object, ...], where: Path, before: Callable[[], Any]) -> Outcome:
    """A command to its end: training in several processes, anything else in one."""
    if arguments[0] != "train":
        return run(tamis(*arguments, before=before), where)
    ends = [child.wait() for child in ranks(arguments, where, {0: before})]
    return max(ends, key=lambda end: abs(end.code))


@functools.cache
def shared_world(kind: str, place: Path) -> World:
    """One whose training is that of several processes."""
    return World(kind, place / f"{kind}-ranks", start=together).build("prepare", "train")


class Company(Part):
    name = "company"
    share = 1.0

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        way = draw.choice((self.crowd, self.lost_rank))
        way(draw, folder, counts)

    def crowd(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        """One stage in several processes at the same time, one of which may be killed."""
        world = world_of(draw.choice(KINDS), self.place)
        stage = draw.choice([*world.stages.values()])
        copied(stage.before, folder)
        number = draw.choice((2, 3))
        killed = draw.randint(1, stage.changes) if draw.random() < 0.5 else None
        children = []
        for place in range(number):
            before = kill_at(killed) if killed is not None and place == 0 else lambda: None
            children.append(Child(tamis(*stage.arguments, before=before), folder))
            time.sleep(draw.uniform(0.0, 0.3 * stage.seconds))
        told = f"{number} processes at once" + ("" if killed is None else f", the first killed at change {killed}")
        for place, outcome in enumerate([child.wait() for child in children]):
            if not (outcome.killed and place == 0 and killed is not None):
                outcome.check(0, 1, what=f"{stage.name} of {world.kind} in {told}")
        world.again(stage, folder, told)
        counts["crowds"] += 1

    def lost_rank(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        """One of two ranks is killed, at a change of a file or at any time."""
        world = shared_world(draw.choice(KINDS), self.place)
        stage = world.stages["train"]
        copied(stage.before, folder)
        rank, change = draw.randrange(RANKS), draw.randint(1, stage.changes)
        moment = draw.uniform(0.0, stage.seconds)
        by_change = rank == 0 and draw.random() < 0.6
        told = f"rank {rank} killed " + (f"at change {change}" if by_change else f"after {moment:.2f} s")
        crew = ranks(stage.arguments, folder, {0: kill_at(change)} if by_change else {})
        first = crew[rank].wait(kill_after=None if by_change else moment)
        ends = []
        for other in (child for child in crew if child is not crew[rank]):
            until = time.monotonic() + GRACE
            while time.monotonic() < until and not other.over():
                time.sleep(0.01)
            if first.killed and not other.over():
                other.kill(signal.SIGTERM)
            ends.append(other.wait(time.monotonic() - other.began + PATIENCE))
        for end in ends:
            if end.code == -signal.SIGTERM:
                counts["ranks that had to be ended"] += 1
            elif first.killed:
                end.check(0, 1, what=f"train of {world.kind} with {told}")
                counts["ranks that ended by themselves"] += 1
            elif end.code or first.code:
                raise WrongError(
                    f"train of {world.kind} on {RANKS} ranks, with {told}, fails before\n{first.err}\n{end.err}"
                )
        counts["lost ranks"] += first.killed
        world.again(stage, folder, told)
