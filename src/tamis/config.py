"""A recipe: everything that makes a run, in one TOML file.

    name = "multi30k-en-de"
    [data]        files, languages, limits            tamis.data.prepare.DataConfig
    [vocabulary]  SentencePiece                       tamis.data.prepare.VocabularyConfig
    [model]       sizes and mechanisms                tamis.models.Seq2SeqConfig
    [training]    the loop                            tamis.training.settings.TrainingConfig
    [decoding]    beam search                         tamis.decoding.DecodingConfig
    [arms.rela]   what one arm of a comparison has different, in the same sections

An unknown key is an error that offers the nearest known one.
"""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tamis.data.prepare import DataConfig, Prepared, VocabularyConfig
from tamis.decoding.settings import DecodingConfig
from tamis.models.seq2seq import Seq2SeqConfig
from tamis.settings import Config, choose, strings
from tamis.training.settings import TrainingConfig

SITES = ("encoder_mechanism", "decoder_mechanism", "cross_mechanism")
OF_THE_DATA = ("vocab_size", "source_vocab_size", "pad_id")


@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """The sections of a recipe, each checked by its own class."""

    name: str
    data: DataConfig
    description: str = ""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of Seq2SeqConfig but for those that the vocabulary decides; `mechanism` stands for all three sites."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        strings(self, "name", "description")
        check_name(self.name)
        model = model_settings(self.model, vocab_size=1)
        known = model.position_limit()
        if known is not None and known < self.data.max_length:
            raise ValueError(
                f"model.max_length = {known} learned positions are fewer than "
                f"data.max_length = {self.data.max_length} subwords"
            )

    def model_config(self, prepared: Prepared) -> Seq2SeqConfig:
        """With the sizes that the vocabularies have."""
        source, target = prepared.source_vocabulary, prepared.target_vocabulary
        return model_settings(
            self.model,
            vocab_size=len(target),
            source_vocab_size=None if source is target else len(source),
            pad_id=source.pad_id,
        )

    def to_toml(self) -> str:
        """As a file that `read_recipe` reads back."""
        return as_toml(self)

    def settings(self) -> dict[str, Any]:
        return flat_settings(self, model_settings(self.model, vocab_size=1))


def check_name(name: str) -> None:
    """Of a recipe."""
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"name must be one that a folder can have, without / or a leading dot, got {name!r}")


def read_recipe(path: str | Path, overrides: Sequence[str] = (), arm: str | None = None) -> Recipe:
    """Read a TOML file.

    Args:
        overrides: such as ``training.lr=3e-4``; the value is TOML, or a string if it is not.
        arm: the name of one of the file's arms; its settings come before the overrides.
    """
    tables = read_tables(path, overrides, () if arm is None else (arm,))
    try:
        return _build(tables)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_tables(path: str | Path, overrides: Sequence[str] = (), chosen: Sequence[str] = ()) -> dict[str, Any]:
    """The sections of a TOML file as they are after the chosen arms, one after the other, and then the overrides."""
    tables, arms = _read(Path(path))
    for arm in chosen:
        if not arms:
            raise ValueError(f"{path} has no arms, so none named {arm!r}")
        _take_arm(tables, arms[choose("arm", arm, arms)], f"{path}: arms.{arm}")
    for override in overrides:
        _apply(tables, override)
    try:
        _refuse_dates(tables)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    return tables


def as_toml(recipe: Config) -> str:
    """Plain values first, then a section for each table."""
    values = recipe.to_dict()
    sections = {name: values.pop(name) for name in list(values) if isinstance(values[name], dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    for name, settings in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"


def flat_settings(recipe: Config, model: Config, *left_out: str) -> dict[str, Any]:
    """All settings of a recipe but those of some sections, as section.key; those of the model with its defaults."""
    sections = {**recipe.to_dict(), "model": model.to_dict()}
    return {
        f"{section}.{key}": value
        for section, table in sections.items()
        if isinstance(table, dict) and section not in left_out
        for key, value in table.items()
    }


def arms_of(path: str | Path) -> list[str]:
    """The names of a recipe's arms."""
    return list(_read(Path(path))[1])


def read_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of one section, such as ``beam=10``."""
    settings: dict[str, Any] = {}
    for override in overrides:
        _apply(settings, override)
    return settings


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The tables of a recipe, and its arms."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no recipe {path}") from None
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


def _build(tables: dict[str, Any]) -> Recipe:
    kinds: dict[str, type[Config]] = {
        "data": DataConfig,
        "vocabulary": VocabularyConfig,
        "training": TrainingConfig,
        "decoding": DecodingConfig,
    }
    values = dict(tables)
    if "text" in values and "data" not in values:
        raise ValueError("this is the recipe of a language model, with a [text] section; translation has a [data] one")
    for section in ("name", "data"):
        if section not in values:
            raise ValueError(f"a recipe needs {section!r}")
    return Recipe.from_dict(build_sections(values, kinds))


def build_sections(
    tables: Mapping[str, Any], kinds: Mapping[str, type[Config]], defaults: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The tables of a recipe, with each section that has a class of its own built by that; what is not there is empty.

    `defaults` are settings of sections that stand in front of what the recipe says.
    """
    values = dict(tables)
    for section in (*kinds, "model"):
        if not isinstance(values.setdefault(section, {}), dict):
            raise ValueError(f"{section} must be a section, got {values[section]!r}")
    for section, kind in kinds.items():
        try:
            values[section] = kind.from_dict({**(defaults or {}).get(section, {}), **values[section]})
        except TypeError as error:  # a setting without a default is missing
            raise ValueError(f"[{section}] {error}") from error
    return values


def model_settings(settings: dict[str, Any], **sizes: Any) -> Seq2SeqConfig:
    """The config of a [model] section and the sizes that the data decide."""
    for name in OF_THE_DATA:
        if name in settings:
            raise ValueError(f"[model] {name} follows from the vocabulary and cannot be set")
    settings = dict(settings)
    everywhere = settings.pop("mechanism", None)
    shared = {} if everywhere is None else dict.fromkeys(SITES, everywhere)
    return Seq2SeqConfig.from_dict({**shared, **settings, **sizes})


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


def _toml(value: Any) -> str:
    """A plain value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON may hold it, TOML may not
