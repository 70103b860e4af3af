"""The kinds of experiments, and reading a recipe or a run of any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tamis import plugins
from tamis.experiments.base import Experiment, OpenRun
from tamis.experiments.folder import RunFolder
from tamis.experiments.language_model import LanguageModel
from tamis.experiments.recipe import read_tables
from tamis.experiments.sequence_task import GeneratedSequences
from tamis.experiments.translation import Translation
from tamis.models.pretrained import CONFIG, saved_class

KINDS: plugins.Registry[type[Experiment]] = plugins.Registry(
    {"data": Translation, "text": LanguageModel, "task": GeneratedSequences}
)
"""Kinds of experiments, by the section that tells them."""
WRITES = {"Seq2Seq": "translate", "CausalLM": "generate"}
"""The command by which models write, by the class that a folder of a model alone was saved by."""


def kind_of(tables: Mapping[str, Any]) -> type[Experiment]:
    """The kind that the sections of a recipe tell."""
    found = [name for name in KINDS if name in tables]
    # A kind may have the section of another one among its own.
    whole = [KINDS[name] for name in found if set(found) <= KINDS[name].sections().keys()]
    if len(whole) != 1:
        known = ", ".join(f"[{name}] ({kind.what})" for name, kind in KINDS.items())
        there = " and ".join(f"[{name}]" for name in found) or "none"
        raise ValueError(f"a recipe has one of the sections {known}; this has {there}")
    return whole[0]


def read_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    arms: Sequence[str] | str = (),
    *,
    also: Sequence[str] = (),
    run_plugins: bool = True,
) -> Experiment:
    """Read a recipe of any kind.

    Args:
        overrides: such as ``training.lr=3e-4``; the value is TOML, or a string if it is not.
        arms: of the file's arms, taken one after the other before the overrides.
        also: plugins besides those of the recipe.
        run_plugins: run the code of plugins; otherwise it must have been run already.

    Returns:
        the experiment.
    """
    tables = read_tables(path, overrides, (arms,) if isinstance(arms, str) else arms)
    try:
        names = tables.pop("plugins", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"plugins must be a list of files and names, got {names!r}")
        if run_plugins:
            names = [*plugins.load(names, Path(path).parent), *plugins.load(also)]
        else:
            plugins.check_loaded(names, Path(path).parent)
        if names:
            tables["plugins"] = tuple(dict.fromkeys(names))
        return kind_of(tables).from_dict(tables)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def open_run(folder: str | Path) -> OpenRun:
    """Open a run.  Its plugins must have been named by the user: the folder may be somebody else's.

    Args:
        folder: the run.

    Returns:
        the folder, and the experiment that its recipe describes.
    """
    run = RunFolder(folder)
    return OpenRun(run, read_recipe(run.recipe, run_plugins=False))


def check_writes(folder: Path, how: str) -> None:
    """Raise if a folder is of a run or a model that does not write that way.

    Args:
        folder: of a run or of a model.
        how: "translate" or "generate".
    """
    run = RunFolder(folder)
    if run.recipe.is_file():
        kind = kind_of(read_tables(run.recipe))
        what, writes = kind.what, kind.writes
    elif (folder / CONFIG).is_file() and (saved := saved_class(folder)) in WRITES:
        what, writes = f"a {saved}", WRITES[saved]
    else:
        return  # what is wrong with it is said by who reads it
    if writes != how:
        instead = f"`tamis {writes} {folder}`" if writes else f"`tamis evaluate {folder}` says how well it does"
        raise ValueError(f"{folder} is {what}, which cannot {how}: {instead}")
