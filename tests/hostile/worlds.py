"""Tiny experiments of every kind, the stages that they go through, and what a folder holds after each."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile.children import Outcome, run, tamis, watch
from hostile.harness import WrongError

SMALL = """
[model]
embed_dim = 8
num_heads = 2
ffn_dim = 8
LAYERS
[training]
steps = 6
checkpoint_every = 2
log_every = 1
warmup = 2
MORE
"""
RECIPES = {
    "translation": """
name = "translation"
[data]
train = "grammar:train:60"
valid = "grammar:valid:6"
test = "grammar:test:4"
gold = "grammar:test:4"
folder = "data"
[vocabulary]
size = 110
kind = "bpe"
[decoding]
beam = 2
max_length = 8
"""
    + SMALL.replace("LAYERS", "encoder_layers = 1\ndecoder_layers = 1").replace(
        "MORE", "batch_tokens = 300\naverage = 2\nema = 0.9"
    ),
    "language": """
name = "language"
[text]
train = "grammar:train:64"
valid = "grammar:valid:16"
test = "grammar:test:32"
folder = "data"
length = 24
[vocabulary]
size = 320
kind = "bpe"
byte_fallback = true
[evaluation]
lengths = [24, 48]
tokens = 96
across_documents = true
passkey_samples = 0
"""
    + SMALL.replace("LAYERS", "num_layers = 1").replace("MORE", "batch_tokens = 96\ndevice_tokens = 48"),
    "task": """
name = "task"
[task]
name = "copy"
lengths = [3, 5]
batch_size = 8
validation_size = 8
[evaluation]
multiples = [1, 2]
samples = 4
"""
    + SMALL.replace("LAYERS", "num_layers = 1").replace("MORE", ""),
}
KINDS = tuple(RECIPES)
STAGES: dict[str, tuple[object, ...]] = {
    "prepare": ("prepare", "recipe.toml"),
    "train": ("train", "recipe.toml", "--output", "run", "--device", "cpu"),
    "evaluate": ("evaluate", "run", "--device", "cpu"),
    "analyze": ("analyze", "run", "--device", "cpu", "--shown", 2),
    "export": ("export", "run", "--to", "hf"),
}
LACKING = {"task": ("prepare", "export")}
"""Stages that a kind has nothing to do in."""
TIMED = ("seconds", "tokens_per_second", "sentences_per_second", "data_wait", "journal", "sha256")
"""Keys of what takes another time each time, and the checksums of files that hold some."""


@dataclass
class Stage:
    """One stage as it goes undisturbed."""

    name: str
    arguments: tuple[object, ...]
    before: Path
    """The folder that it starts from."""
    after: Path
    changes: int = 0
    """Of files, as `watch` counts them."""
    seconds: float = 0.0


@dataclass
class World:
    """One tiny experiment, gone through once without disturbance."""

    kind: str
    place: Path
    stages: dict[str, Stage] = field(default_factory=dict)
    start: Callable[[tuple[object, ...], Path, Callable[[], Any]], Outcome] = field(
        default=lambda arguments, where, before: run(tamis(*arguments, before=before), where)
    )
    """How a stage is run to its end."""

    def build(self, *names: str) -> World:
        """Go through these stages, or through all."""
        shutil.rmtree(self.place, ignore_errors=True)
        now = self.place / "0"
        now.mkdir(parents=True)
        (now / "recipe.toml").write_text(RECIPES[self.kind])
        for number, (name, arguments) in enumerate(STAGES.items(), 1):
            if name in LACKING.get(self.kind, ()) or (names and name not in names):
                continue
            after = self.place / str(number)
            shutil.copytree(now, after)
            stage = self.stages[name] = Stage(name, arguments, now, after)
            counted = self.place / f"{number}.count"
            began = time.monotonic()
            outcome = self.start(arguments, after, counting(counted))
            outcome.check(0, what=f"{name} of {self.kind}, undisturbed,")
            stage.seconds = time.monotonic() - began
            stage.changes = int(counted.read_text())
            now = after
        return self

    @property
    def end(self) -> Path:
        """What a folder holds after all stages."""
        return [*self.stages.values()][-1].after

    def again(self, stage: Stage, folder: Path, after: str) -> None:
        """Run a stage in a folder where it was disturbed: the end must be the same as without that."""
        what = f"{stage.name} of {self.kind} after {after}"
        self.start(stage.arguments, folder, lambda: None).check(0, what=what)
        if different := differences(stage.after, folder):
            raise WrongError(f"{what}: {'; '.join(different)}")


def world_of(kind: str, beside: Path) -> World:
    """That of a kind, which all parts share, made when one asks for it first."""
    return _world(kind, beside.parent / "worlds")


@functools.cache
def _world(kind: str, place: Path) -> World:
    return World(kind, place / kind).build()


def counting(path: Path) -> Callable[[], None]:
    """Keep the number of changes of files in a file."""

    def before() -> None:
        file = path.open("w")

        def act(number: int, changed: str) -> None:
            file.seek(0)
            file.write(str(number))
            file.flush()

        watch(act)

    return before


def copied(source: Path, target: Path) -> Path:
    """A copy, in place of the empty folder that may be there."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def differences(expected: Path, found: Path) -> list[str]:
    """What two folders do not share, but for times."""
    here, there = contents(expected), contents(found)
    missing = [f"{name} is missing" for name in sorted(here.keys() - there.keys())]
    left = [f"{_without_number(name)} is left behind" for name in sorted(there.keys() - here.keys())]
    return (
        missing + left + [f"{name} differs" for name in sorted(here.keys() & there.keys()) if here[name] != there[name]]
    )


def contents(folder: Path) -> dict[str, Any]:
    """What the files of a folder hold, but for times."""
    files = (Path(base, name) for base, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): _timeless(path) for path in files}


def _timeless(path: Path) -> Any:
    content = path.read_bytes()
    if path.name == "README.md":  # the card of a model
        return [line for line in content.splitlines() if not line.startswith(b"| speed |")]
    try:
        if path.name == "metrics.jsonl":
            return [_without_times(json.loads(line)) for line in content.splitlines()]
        return _without_times(json.loads(content)) if path.suffix == ".json" else content
    except (ValueError, RecursionError):  # a damaged one
        return content


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMED}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _without_number(name: str) -> str:
    """Files that are being written have the number of their process in their name."""
    return ".".join("PID" if part.isdecimal() else part for part in name.split("."))
