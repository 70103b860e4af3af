"""Code of users that adds to the package, and the registries that it adds to.

A plugin is a Python file, or what an installed package offers in the entry-point group `tamis.plugins`.  It is run
once, and only when the user names it: in a recipe, by ``--plugin``, or by `load`.  What a plugin does is put its kinds
into registries under names of their own:

    tamis.mechanisms.registry.MECHANISMS    tamis.positions.registry.POSITIONS    tamis.data.tasks.TASKS
    tamis.experiments.KINDS                 tamis.training.loggers.LOGGERS

or a backend of attention into the list `tamis.functional.backends.BACKENDS`.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

GROUP = "tamis.plugins"
_loaded: dict[str, str] = {}
"""By what each is called, its full name."""
_running: list[str] = []
"""Those that are being run at the moment, the innermost last."""


class Registry(dict[str, T]):
    """Things by name.  Names that the package gave cannot be given again; others remember the plugin they are of."""

    def __init__(self, own: Mapping[str, T]) -> None:
        super().__init__(own)
        self._own = frozenset(own)
        self._origin: dict[str, str] = {}

    def __setitem__(self, name: str, value: T) -> None:
        if name in self._own:
            raise ValueError(f"{name!r} is a name of the package: take another one")
        super().__setitem__(name, value)
        if _running:
            self._origin[name] = _running[-1]

    def plugin_of(self, name: object) -> str | None:
        """The plugin that put this there, if it was one."""
        return self._origin.get(name) if isinstance(name, str) else None


def load(names: Iterable[str], beside: str | Path = ".") -> tuple[str, ...]:
    """Run plugins, each once, and return their full names; files are looked for in `beside`, then where the user is."""
    return tuple(_load(name, Path(beside)) for name in names)


def loaded() -> list[str]:
    """The full names of those that have been run."""
    return list(_loaded.values())


def missing(names: Iterable[str]) -> list[str]:
    """Those that have not been run."""
    return [name for name in names if called(name) not in _loaded]


def check_loaded(names: Iterable[str], what: object) -> None:
    """Raise if something needs plugins that have not been run, and say how to have them run."""
    if wanted := missing(names):
        options = " ".join(f"--plugin {name}" for name in wanted)
        raise ValueError(
            f"{what} needs {', '.join(wanted)}, whose code is only run when you name it: {options}, "
            f"or tamis.plugins.load({wanted}) in Python"
        )


def called(name: str) -> str:
    """What tells plugins apart: a run finds its plugin in whatever folder that is now."""
    return Path(name).name


def _load(name: str, beside: Path) -> str:
    path = None
    if name.endswith(".py"):
        places = [beside / name, Path(name)]
        path = next((place.resolve() for place in places if place.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"there is no plugin {places[0]}")
    full = name if path is None else str(path)
    known = _loaded.get(called(name))
    if known is not None and known != full:
        raise ValueError(f"plugins are told apart by their names, got {known} and {full}")
    if known is None:
        _running.append(full)
        try:
            _run_entry_point(name) if path is None else _run_file(path)
        finally:
            _running.pop()
        _loaded[called(name)] = full
    return full


def _run_entry_point(name: str) -> None:
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        nearest = difflib.get_close_matches(name, offered, 1, 0.6)
        there = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(offered)) or 'none'}"
        raise ValueError(f"a plugin is a file NAME.py or an entry point of the group {GROUP!r}, got {name!r}; {there}")
    offered[name].load()


def _run_file(path: Path) -> None:
    name = f"tamis_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"the plugin {path} failed: {type(error).__name__}: {error}") from error
