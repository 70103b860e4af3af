"""Recipes as TOML: reading a file with its arms and overrides into tables, and writing tables.

name = "multi30k-en-de"
plugins = ["mine.py"]     code of the user to run first: tamis.plugins
[data]                    the section that tells the kind; each section is checked by its own class
[model]
[training]
[arms.rela]               what one arm of a comparison has different, in the same sections; arms may be combined
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tamis.files import check_file
from tamis.settings import choose


def read_tables(path: str | Path, overrides: Sequence[str] = (), arms: Sequence[str] = ()) -> dict[str, Any]:
    """The sections of a TOML file as they are after the chosen arms, one after the other, and then the overrides."""
    tables, known = _read(Path(path))
    for arm in arms:
        if not known:
            raise ValueError(f"{path} has no arms, so none named {arm!r}")
        _take_arm(tables, known[choose("arm", arm, known)], f"{path}: arms.{arm}")
    for override in overrides:
        _apply(tables, override)
    try:
        _refuse_dates(tables)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    return tables


def as_toml(values: Mapping[str, Any]) -> str:
    """Plain values first, then a section for each table; what is None is left out."""
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [
        f"{_key(key)} = {_toml(value)}" for key, value in values.items() if key not in sections and value is not None
    ]
    for name, settings in sections.items():
        lines += ["", f"[{_key(name)}]"]
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"


def arms_of(path: str | Path) -> list[str]:
    """The names of a recipe's arms."""
    return list(_read(Path(path))[1])


def read_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of one section, such as ``beam=10``."""
    settings: dict[str, Any] = {}
    for override in overrides:
        _apply(settings, override)
    return settings


def check_name(name: str) -> None:
    """Raise unless it can be a folder: one is made of it."""
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"name must be one that a folder can have, without / or a leading dot, got {name!r}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The tables of a recipe, and its arms."""
    if not path.exists():
        raise FileNotFoundError(f"there is no recipe {path}")
    check_file(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    arms = tables.pop("arms", {})
    if not isinstance(arms, dict):
        raise ValueError(f"{path}: arms must be a section with a table for each arm, got {arms!r}")
    for name, arm in arms.items():
        if not isinstance(arm, dict):
            raise ValueError(f"{path}: arms.{name} must be a table of what the arm has different, got {arm!r}")
    return tables, arms


def _take_arm(tables: dict[str, Any], arm: dict[str, Any], name: str) -> None:
    """Sections are changed setting by setting; a plain value takes the place of another."""
    for key, value in arm.items():
        before = tables.get(key)
        if before is not None and isinstance(before, dict) != isinstance(value, dict):
            kinds = "a section, got the value" if isinstance(before, dict) else "a value, got the section"
            raise ValueError(f"{name}.{key} must be {kinds} {value!r}")
        tables[key] = {**(before or {}), **value} if isinstance(value, dict) else value


def _refuse_dates(value: Any, name: str = "") -> None:
    """TOML has dates, and no setting is one."""
    if isinstance(value, datetime.date | datetime.time):
        raise ValueError(f"{name} is a date or a time, which no setting is, got {value}: put a string in quotes")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_dates(item, f"{name}.{key}" if name else key)
    if isinstance(value, list):
        for item in value:
            _refuse_dates(item, name)


def _apply(tables: dict[str, Any], override: str) -> None:
    name, given, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not given or not key:
        raise ValueError(f"an override looks like training.lr=3e-4, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{override!r:.100} cannot be read: {error}") from error
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            raise ValueError(f"{override!r}: {section} is not a section")
    tables[key] = value


def _key(name: str) -> str:
    """As it is where TOML allows that, or in quotes."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A plain value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON may hold it, TOML may not
