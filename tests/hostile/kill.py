"""Every stage of every kind of experiment is killed, at any time and at any change of a file, and run again."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from hostile.children import Child, kill_at, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import KINDS, copied, world_of


class Kill(Part):
    name = "kill"
    share = 10.0

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        world = world_of(draw.choice(KINDS), self.place)
        stage = draw.choice([*world.stages.values(), world.stages["train"]])
        copied(stage.before, folder)
        told = []
        for _ in range(draw.choice((1, 2, 4, 6))):  # who was killed may be killed again while it goes on
            number = draw.randint(1, stage.changes) if draw.random() < 0.7 else None
            moment = draw.uniform(0.0, 1.2 * stage.seconds)
            if number is not None:
                told.append(f"a kill at change {number}")
                outcome = Child(tamis(*stage.arguments, before=kill_at(number)), folder).wait()
            else:
                told.append(f"a kill after {moment:.3f} s")
                outcome = Child(tamis(*stage.arguments), folder).wait(kill_after=moment)
            if outcome.killed:
                counts["kills at changes of files" if number is not None else "kills at any time"] += 1
            elif outcome.code:
                outcome.check(0, what=f"{stage.name} of {world.kind} before {told[-1]}")
                raise WrongError(f"{stage.name} of {world.kind} fails before {told[-1]}")
        world.again(stage, folder, " and ".join(told))
        counts[f"{stage.name} resumed"] += 1
