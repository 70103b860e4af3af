"""Every file that a run writes is damaged, and then read by every command: noticed, or the same result.

Recipes and what else people write carry no checksums: in those of `PLAIN` a digit that became another digit cannot be
noticed.  There a clear end is all that is asked for.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hostile.children import Outcome, run, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import KINDS, contents, copied, world_of

PLAIN = (
    "recipe.toml",
    "run/config.toml",
    "run/model/README.md",
    "run/export-hf/*",
)
"""Files without a checksum of ours; export-hf belongs to transformers."""
TEXT = "text.txt"
LINES = "the old man reads a newspaper\na small dog sleeps\n1 2 3\n"
MORE = ("--set", "training.steps=8")
READERS: dict[str, tuple[tuple[tuple[object, ...], tuple[str, ...]], ...]] = {
    "translation": (
        (("translate", "run", TEXT, "--device", "cpu"), ("run/config.toml", "run/model/*")),
        (("compare", "a=run"), ("run/config.toml", "run/evaluation.json", "run/test.hypotheses.txt")),
    ),
    "language": (
        (
            ("generate", "run", TEXT, "--set", "max_length=6", "--set", "method=greedy", "--device", "cpu"),
            ("run/config.toml", "run/model/*"),
        ),
        (("compare", "a=run"), ("run/config.toml", "run/evaluation.json")),
    ),
    "task": (
        (("tasks", "heads", "run", "--device", "cpu"), ("run/config.toml", "run/model/*")),
        (("compare", "a=run"), ("run/config.toml", "run/evaluation.json")),
    ),
}
"""What reads a run, and which of its files."""
OF_ALL: tuple[tuple[tuple[object, ...], tuple[str, ...]], ...] = (
    (("prepare", "recipe.toml"), ("recipe.toml", "data/*")),
    (("train", "recipe.toml", "--output", "run", "--device", "cpu"), ("*",)),
    (
        ("train", "recipe.toml", "--output", "run", "--device", "cpu", *MORE),
        ("recipe.toml", "data/*", "run/config.toml", "run/metrics.jsonl", "run/checkpoints/*"),
    ),
    (("evaluate", "run", "--device", "cpu"), ("run/config.toml", "run/model/*", "data/*")),
    (
        ("analyze", "run", "--device", "cpu", "--shown", 2),
        ("run/config.toml", "run/metrics.jsonl", "run/model/*", "data/*"),
    ),
    (
        ("report", "run"),
        ("run/config.toml", "run/metrics.jsonl", "run/evaluation.json", "run/analysis.json", "run/analysis.npz"),
    ),
    (("export", "run", "--to", "hf"), ("run/config.toml", "run/model/*")),
)


@dataclass(frozen=True)
class Found:
    """What a command said and left."""

    outcome: Outcome
    files: dict[str, Any]


class Damage(Part):
    name = "damage"
    share = 2.0

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._undamaged: dict[tuple[str, tuple[object, ...]], Found] = {}

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        kind = draw.choice(KINDS)
        end = world_of(kind, self.place).end
        files = sorted(str(path.relative_to(end)) for path in end.rglob("*") if path.is_file() and path.stat().st_size)
        # As many trials for each folder, whatever it holds.
        groups = sorted({name.rpartition("/")[0] for name in files})
        group = draw.choice(groups)
        name = draw.choice([name for name in files if name.rpartition("/")[0] == group])
        readers = [
            command
            for command, reads in (*OF_ALL, *READERS[kind])
            if any(fnmatch(name, pattern) for pattern in reads)
            and (kind != "task" or command[0] not in ("prepare", "export"))
        ]
        if not readers:
            return
        command = draw.choice(readers)
        expected = self._expected(kind, command)
        copied(end, folder)
        told = harm(draw, folder / name)
        left = contents(folder).get(name)
        found = self._run(command, folder)
        words = " ".join(map(str, command))
        what = f"{words} of {kind} with {name} {told}"
        found.outcome.check(0, 1, what=what)
        counts["damaged files"] += 1
        if found.outcome.code == 1:
            counts["clear errors"] += 1
            return
        if (name, told) == ("run/evaluation.json", "gone"):
            counts["runs that are not evaluated"] += 1
            return
        if any(fnmatch(name, pattern) for pattern in PLAIN):
            counts["files without a checksum, a clear end"] += 1
            return
        said = set((found.outcome.out + found.outcome.err).splitlines())
        new = " ".join(said - set((expected.outcome.out + expected.outcome.err).splitlines()))
        if different := self._different(expected, found, name, left):
            # A torn checkpoint is passed over, and said so, for the one before it.
            if any(part in new for part in Path(name).parts if part.startswith("step-") or part == Path(name).name):
                counts["other results, and said why"] += 1
                return
            raise WrongError(f"{words} of {kind} does not notice that {name} is {told}\n{'; '.join(different)}")
        counts["same results"] += 1

    def _different(self, expected: Found, found: Found, damaged: str, left: Any) -> list[str]:
        """Files that are not as they are without damage, but for the damaged one where nobody has written it."""
        names = expected.files.keys() | found.files.keys()
        different = {name for name in names if expected.files.get(name) != found.files.get(name)}
        return sorted(different - ({damaged} if found.files.get(damaged) == left else set()))

    def _expected(self, kind: str, command: tuple[object, ...]) -> Found:
        if (kind, command) not in self._undamaged:
            place = self.place / f"undamaged-{len(self._undamaged)}"
            copied(world_of(kind, self.place).end, place)
            found = self._undamaged[kind, command] = self._run(command, place)
            found.outcome.check(0, what=f"{' '.join(map(str, command))} of {kind}, undamaged,")
        return self._undamaged[kind, command]

    def _run(self, command: tuple[object, ...], folder: Path) -> Found:
        (folder / TEXT).write_text(LINES)
        outcome = run(tamis(*command), folder)
        said = [line for line in outcome.out.splitlines() if command[0] in ("translate", "generate", "compare")]
        return Found(outcome, {**(contents(folder) if outcome.code == 0 else {}), "standard output": said})


def harm(draw: random.Random, path: Path) -> str:
    """Damage a file; returns how, in words."""
    content = bytearray(path.read_bytes())
    size = len(content)
    place = draw.randrange(size)
    match draw.choice(("bit", "bit", "cut", "zeros", "swap", "noise", "longer", "gone")):
        case "bit":
            content[place] ^= 1 << draw.randrange(8)
            told = "with another bit"
        case "cut":
            del content[draw.choice((0, place, size - 1)) :]
            told = "cut short"
        case "zeros":
            stop = min(size, place + draw.choice((1, 64, 4096)))
            content[place:stop] = bytes(stop - place)
            told = "with zeros"
        case "swap":
            half = size // 2
            content = content[half:] + content[:half]
            told = "with its halves swapped"
        case "noise":
            stop = min(size, place + draw.choice((4, 512)))
            content[place:stop] = draw.randbytes(stop - place)
            told = "with noise"
        case "longer":
            content += draw.choice((b"\0", b"x", b"\n{}", bytes(64)))
            told = "longer"
        case _:
            path.unlink()
            return "gone"
    path.write_bytes(content)
    return told
