"""Every setting of a recipe, read off the classes that check them."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import typing
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from tamis.experiments.kinds import KINDS
from tamis.settings import Config


class Setting(NamedTuple):
    """One setting of a section."""

    name: str
    default: str
    takes: str
    meaning: str


def sections() -> dict[str, dict[str, type[Config]]]:
    """The classes of each section of a recipe, each with the kind of recipes that has it so."""
    found: dict[str, dict[str, type[Config]]] = {}
    for kind in KINDS.values():
        for name, config in {**kind.sections(), "model": kind.model_class}.items():
            found.setdefault(name, {})[kind.what] = config
    return found


def settings_of(config: type[Config]) -> list[Setting]:
    """All of a class, in its order, those that it takes over included."""
    hints, meanings = typing.get_type_hints(config), _meanings(config)
    return [
        Setting(known.name, _default(known), _takes(hints[known.name]), meanings.get(known.name, ""))
        for known in fields(config)  # type: ignore[arg-type]
        if known.name not in OF_THE_DATA
    ]


OF_THE_DATA = ("vocab_size", "source_vocab_size", "pad_id")
"""What no recipe says."""


def as_text(wanted: str | None = None) -> str:
    """For a terminal: a section, a setting such as "lr" or "training.lr" wherever there is one, or all."""
    parts, names = [], []
    for name, configs in sections().items():
        for config, whose in _grouped(configs):
            settings = settings_of(config)
            names += [name, *(setting.name for setting in settings)]
            shown = [x for x in settings if wanted in (None, name, x.name, f"{name}.{x.name}")]
            lines = [f"[{name}]  {whose}: {_first(config)}"]
            for setting in shown:
                lines.append(f"  {setting.name} = {setting.default}    {setting.takes}")
                lines += textwrap.wrap(setting.meaning, 100, initial_indent="      ", subsequent_indent="      ")
            parts += ["\n".join(lines)] if shown else []
    if not parts:
        (nearest,) = difflib.get_close_matches(str(wanted), names, 1, 0.0)
        raise ValueError(f"there is no section and no setting {wanted!r}; did you mean {nearest!r}?")
    return "\n\n".join(parts)


def as_markdown() -> str:
    """For docs/settings.md."""
    parts = [
        "# Settings",
        "Every setting of a recipe with its default, what it takes and what it means, as `tamis settings` prints them: "
        "read off the classes that check them. `tamis settings --markdown > docs/settings.md` writes this page anew.",
    ]
    for name, configs in sections().items():
        for config, whose in _grouped(configs):
            rows = [
                f"| `{row.name}` | `{row.default}` | {row.takes} | {row.meaning} |".replace("|", "|")
                for row in (Setting(*(text.replace("|", "\\|") for text in found)) for found in settings_of(config))
            ]
            parts.append(f"## [{name}] of {whose}")
            parts.append(_first(config))
            parts.append("\n".join(["| Setting | Default | Takes | Meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _grouped(configs: dict[str, type[Config]]) -> list[tuple[type[Config], str]]:
    """Each class once, with all the kinds that have it."""
    kinds: dict[type[Config], list[str]] = {}
    for whose, config in configs.items():
        kinds.setdefault(config, []).append(whose)
    return [(config, " and ".join(whose)) for config, whose in kinds.items()]


def _first(config: type[Config]) -> str:
    return inspect.cleandoc(config.__doc__ or "").partition("\n")[0]


def _default(known: Any) -> str:
    if known.default is MISSING and known.default_factory is MISSING:
        return "(required)"
    value = known.default if known.default is not MISSING else known.default_factory()
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _takes(hint: Any) -> str:
    """A type in plain words."""
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}
    if hint in words:
        return words[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple):
        known = [word for kind in dict.fromkeys(inside) if kind is not ... and (word := _takes(kind))]
        return f"list of: {', '.join(known)}"
    if origin in (dict, typing.Mapping) or getattr(origin, "__name__", "") in ("dict", "Mapping"):
        return "table"
    return " or ".join(dict.fromkeys(word for kind in inside if (word := _takes(kind))))


def _meanings(config: type[Config]) -> dict[str, str]:
    """The text below each attribute, of this class or of one that it builds on."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not issubclass(base, Config) or base is Config:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                told = after.value if isinstance(after, ast.Expr) else None
                if isinstance(told, ast.Constant) and isinstance(told.value, str):
                    found[node.target.id] = " ".join(told.value.split())
    return found
