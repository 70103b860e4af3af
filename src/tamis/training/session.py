"""One run in its folder, from a recipe to a model, whatever it is that is learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tamis.decoding.settings import DecodingConfig
from tamis.files import replace_folder, replacing
from tamis.training.distributed import Process, process
from tamis.training.guards import alone_in
from tamis.training.journal import Display
from tamis.training.trainer import Trainer

RECIPE, MODEL = "config.toml", "model"
MAY_CHANGE = {
    "training": {
        "steps",
        "patience",
        "keep",
        "average",
        "log_every",
        "tensorboard",
        "device_tokens",
        "compile",
        "cuda_graphs",
        "context_parallel",
        "context",
    },
    "data": {"test", "gold", "folder"},
    "text": {"test", "folder"},
    "decoding": {field.name for field in dataclasses.fields(DecodingConfig)},
}
"""Settings that a run may go on with after they were changed."""

T = TypeVar("T")
R = TypeVar("R", bound="RunRecipe")
Save = Callable[[Path], None]
"""Writes the final model into a folder."""


class RunRecipe(Protocol):
    """What a run is made of."""

    def to_toml(self) -> str:
        """As a file to read it back from."""

    def settings(self) -> dict[str, Any]:
        """All that the weights depend on, as section.key, defaults included."""


def train_in(
    folder: Path,
    recipe: R,
    read: Callable[[Path], R],
    build: Callable[[Process, Display], tuple[Trainer, Save]],
    device: str | None = None,
    display: Display | None = None,
) -> Path:
    """Train, from where an earlier call was interrupted if one was; returns the folder of the model.

    Args:
        read: reads the recipe of an earlier call.
        build: makes the trainer, and what will save its model; in every process.
    """
    with ExitStack() as stack:
        own = stack.enter_context(process(device))
        own.alike(recipe.settings())
        display = display or Display(quiet=not own.leads)
        if own.leads:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(folder))
            _check_recipe(folder, recipe, read)
        own.wait()
        trainer, save = build(own, display)
        if own.leads:  # not before: a recipe that cannot be built does not claim the folder
            with replacing(folder / RECIPE) as file:
                file.write(recipe.to_toml().encode())
        trainer.run()
        if own.leads:
            replace_folder(folder / MODEL, save)
            display.say(f"model: {folder / MODEL}")
        own.wait()
    return folder / MODEL


def leader_first(own: Process, display: Display, work: Callable[[Callable[[str], None]], T]) -> T:
    """What `work` returns, in every process; the leading one does it first, and says what there is to say."""
    if own.leads:
        done = work(display.say)
        own.wait()
        return done
    own.wait()
    return work(lambda text: None)


def _check_recipe(folder: Path, recipe: R, read: Callable[[Path], R]) -> None:
    """Raise if the folder belongs to a run with other settings, one that has a checkpoint to go on from."""
    if not (folder / RECIPE).exists() or not any((folder / "checkpoints").glob("step-*")):
        return
    before, now = read(folder / RECIPE).settings(), recipe.settings()
    differences = [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now" for name in different_settings(before, now)
    ]
    if differences:
        raise ValueError(f"{folder} holds a run with other settings ({'; '.join(differences)}): use another folder")


def different_settings(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Of two runs, those that make their weights different."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name) and name.partition(".")[2] not in MAY_CHANGE.get(name.partition(".")[0], ())
    ]
