"""Configs that check themselves, and models that are saved as safetensors with their config beside them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from tamis.mechanisms.registry import read_spec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


class Config:
    """Base of the frozen config dataclasses."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain values; an unknown key is an error that offers the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, 1, 0.0)[0]
                raise ValueError(f"{cls.__name__} has no setting {key!r}; did you mean {nearest!r}?")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def at_least(config: object, smallest: int, *names: str) -> None:
    """Raise unless each named setting is an int of at least `smallest`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {value!r}")


def optional_at_least(config: object, smallest: int, *names: str) -> None:
    """The same, for settings that may be None."""
    at_least(config, smallest, *(name for name in names if getattr(config, name) is not None))


def shares(config: object, *names: str) -> None:
    """Raise unless each named setting is a number in [0, 1]."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


def numbers(config: object, *names: str, above: float | None = None) -> None:
    """Raise unless each named setting is a finite number, at least 0 or, where `above` is given, greater than that."""
    for name in names:
        value = getattr(config, name)
        wanted = "of at least 0" if above is None else f"above {above:g}"
        known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not known or (value < 0.0 if above is None else value <= above):
            raise ValueError(f"{name} must be a number {wanted}, got {value!r}")


def mechanisms(config: object, *names: str) -> None:
    """Raise unless each named setting names a mechanism, alone or in a table."""
    for name in names:
        try:
            read_spec(getattr(config, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


class PretrainedModel(nn.Module):
    """A model that is a config and weights, both kept in a folder."""

    config_class: ClassVar[type[Config]]
    config: Config

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors.  Tied weights are written once."""
        from safetensors.torch import save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(self.described())
        save_model(self, str(folder / WEIGHTS))

    def described(self) -> str:
        """The text of config.json."""
        return json.dumps({"model": type(self).__name__, **self.config.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_pretrained(cls, folder: str | Path, **loading: Any) -> Self:
        """Read what save_pretrained wrote, in the dtype it was written in."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_model

        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} holds no {name}: is it a folder that save_pretrained wrote?")
        model = cls(cls._read_config(folder / CONFIG))
        try:
            with safe_open(str(folder / WEIGHTS), "pt") as weights:
                model.to(weights.get_tensor("embedding.weight").dtype)
            load_model(model, str(folder / WEIGHTS), **loading)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{folder / WEIGHTS} cannot be loaded into a {cls.__name__}: {error}") from error
        return model

    @classmethod
    def _read_config(cls, path: Path) -> Config:
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of settings, got {type(values).__name__}")
        kind = values.pop("model", cls.__name__)
        if kind != cls.__name__:
            raise ValueError(f"{path.parent} holds a {kind}, not a {cls.__name__}")
        try:
            return cls.config_class.from_dict(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
