"""Parts, each one way to be hostile, and the loop that gives them their time.

A trial is a function of the seed, the part and its number: whatever it finds can be had again by one command.
"""

from __future__ import annotations

import random
import shutil
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar


class WrongError(Exception):
    """What a trial found that must not be."""


class Part(ABC):
    """One way to be hostile.  `place` is a folder of its own, which must be empty."""

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    """Of the time, beside the other parts."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def begin(self) -> None:  # noqa: B027  # most parts need nothing
        """Make ready what all trials share."""

    @abstractmethod
    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        """One attempt, in an empty folder; raises `WrongError`, and notes how much was tried."""


@dataclass
class Failure:
    """What trials found, and how often; the command shows the first."""

    message: str
    command: str
    times: int = 1


@dataclass
class Tally:
    """What became of a part."""

    trials: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    """By the first line of what was found: the same one may come from many trials."""

    def to_dict(self) -> dict[str, Any]:
        failures = [asdict(failure) for failure in self.failures.values()]
        counts = dict(sorted(self.counts.items()))
        return {"trials": self.trials, "seconds": round(self.seconds, 1), "counts": counts, "failures": failures}


class Run:
    """Trials of some parts under one seed."""

    def __init__(self, parts: Sequence[Part], seed: int, say: Callable[[str], None] = print) -> None:
        self.parts, self.seed, self.say = {part.name: part for part in parts}, seed, say
        self.tallies = {part.name: Tally() for part in parts}
        self._ready: set[str] = set()

    def for_seconds(self, seconds: float, told: Callable[[], None] = lambda: None) -> None:
        """Until the time is over, the part next that is furthest behind its share; each has one trial at least."""
        end, said = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end or any(tally.trials == 0 for tally in self.tallies.values()):
            name = min(self.parts, key=lambda name: self.tallies[name].seconds / self.parts[name].share)
            self.one(name, self.tallies[name].trials)
            if time.monotonic() - said > 60.0:
                said = time.monotonic()
                told()

    def trials(self, name: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.one(name, number)

    def one(self, name: str, number: int, keep: bool = False) -> None:
        """One trial, whose folder may be kept to be looked at."""
        part, tally = self.parts[name], self.tallies[name]
        if name not in self._ready:
            shutil.rmtree(part.place, ignore_errors=True)
            part.place.mkdir(parents=True)
            part.begin()
            self._ready.add(name)
        folder = part.place / f"trial-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.monotonic()
        try:
            part.trial(random.Random(f"{self.seed} {name} {number}"), folder, tally.counts)
        except WrongError as wrong:
            self._note(name, number, str(wrong))
        except Exception as error:  # of the harness itself, which goes on
            self._note(name, number, f"the harness: {error!r}\n{traceback.format_exc()}")
        finally:
            tally.trials += 1
            tally.seconds += time.monotonic() - began
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def failed(self) -> bool:
        return any(tally.failures for tally in self.tallies.values())

    def to_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "parts": {name: tally.to_dict() for name, tally in self.tallies.items()}}

    def describe(self) -> str:
        """A line for each part."""
        lines = []
        for name, tally in self.tallies.items():
            counts = ", ".join(f"{number:,} {what}" for what, number in sorted(tally.counts.items()))
            found = sum(failure.times for failure in tally.failures.values())
            lines.append(f"{name:9} {tally.trials:>7,} trials  {tally.seconds:>7.0f} s  {found:>4} failed  {counts}")
        return "\n".join(lines)

    def _note(self, name: str, number: int, message: str) -> None:
        command = f"PYTHONPATH=src:tests python -m hostile {name} --seed {self.seed} --trial {number}"
        failures = self.tallies[name].failures
        known = failures.setdefault(message.partition("\n")[0], Failure(message, command, 0))
        known.times += 1
        if known.times == 1:
            self.say(f"FAILED {name}: {message}\n  again: {command}")
