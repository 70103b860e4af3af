"""Garbage on the command line: the usage, one clear error, or a command that works; never a traceback."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from hostile.children import run, tamis
from hostile.harness import Part
from hostile.worlds import KINDS, copied, world_of

WORDS = (
    "run", "recipe.toml", "data", "missing", "run/model", "run/checkpoints", "run/config.toml", "run/model/config.json",
    "a=run", "a=run,run", "=run", "a=", "a=run,missing", "=", ",", "", " ", "-", "--", "-x", "--help=3", ".", "..",
    "\u202e", "\U0001f642", "ä ö", "\udcff", "x" * 300, "0", "-1", "1e999", "nan", "9" * 20, "true", "[1", "{}", "cpu",
    "cuda:99", "svg", "hf", "no-such", "training.lr=3", "lr", "beam=0", "lengths=[1", "a.b.c=1", "steps=1e400", "=3",
)  # fmt: skip
LONG = ("demo", "bench", "explore", "serve")
"""Commands that go on for minutes where their arguments are right: these get one that is wrong."""


class Commands(Part):
    name = "commands"
    share = 0.5

    def begin(self) -> None:
        import matplotlib.pyplot  # noqa: F401  # children have it then
        from typer.main import get_command

        from tamis.cli import app

        self.known = described(get_command(app), ())

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        copied(world_of(draw.choice(KINDS), self.place).end, folder)
        path, options = draw.choice(self.known)
        words = list(path)
        for _ in range(draw.choice((0, 1, 1, 2, 3, 5))):
            if options and draw.random() < 0.6:
                words.append(draw.choice(options))
                if draw.random() < 0.8:
                    words.append(draw.choice(WORDS))
            else:
                words.append(draw.choice(("run", "recipe.toml", *WORDS)) if draw.random() < 0.5 else "run")
        if draw.random() < 0.05:
            words = [draw.choice(WORDS) for _ in range(3)]
        if any(word in LONG for word in words):
            words.insert(len(path), "--no-such-option")  # before what may take it for a value
        outcome = run(tamis(*words), folder)
        outcome.check(0, 1, 2, what=f"tamis {words}")
        counts["command lines"] += 1
        counts[f"exit code {outcome.code}"] += 1


def described(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Every command below this one, with the names of its options."""
    found = [(path, [name for option in command.params for name in option.opts if name.startswith("-")])]
    for name, below in getattr(command, "commands", {}).items():
        found += described(below, (*path, name))
    return found
