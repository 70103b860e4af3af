"""Configs that check themselves, and models that are saved as safetensors with their config beside them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from tamis.mechanisms.registry import read_spec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
LARGEST_INT = 2**31 - 1
LARGEST_SEED = 2**63 - 1


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


def at_least(config: object, smallest: int, *names: str, largest: int = LARGEST_INT) -> None:
    """Raise unless each named setting is an int from `smallest` to `largest`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {value!r}")
        if value > largest:
            raise ValueError(f"{name} must be an int of at most {largest}, got {value!r}")


def optional_at_least(config: object, smallest: int, *names: str) -> None:
    """The same, for settings that may be None."""
    at_least(config, smallest, *(name for name in names if getattr(config, name) is not None))


def booleans(config: object, *names: str) -> None:
    """Raise unless each named setting is True or False: the string "False" would be true."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def strings(config: object, *names: str) -> None:
    """Raise unless each named setting is a string."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {value!r}")


def optional_strings(config: object, *names: str) -> None:
    """The same, for settings that may be None."""
    strings(config, *(name for name in names if getattr(config, name) is not None))


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
        known = isinstance(value, int | float) and not isinstance(value, bool)
        # An int may be too large for a float, which math.isfinite does not survive.
        if not known or not abs(value) <= sys.float_info.max or (value < 0.0 if above is None else value <= above):
            raise ValueError(f"{name} must be a number {wanted}, got {value!r}")


def mechanisms(config: object, *names: str) -> None:
    """Raise unless each named setting names a mechanism, alone or in a table."""
    for name in names:
        try:
            read_spec(getattr(config, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device of that name if this machine has it; by default a GPU where there is one."""
    mps = torch.backends.mps.is_available()
    counts = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0, "mps": int(mps)}
    if device is None:
        return torch.device("cuda" if counts["cuda"] else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or (found.index or 0) >= counts.get(found.type, 0):
        here = ", ".join(f"{kind} (0 to {count - 1})" if count > 1 else kind for kind, count in counts.items() if count)
        raise ValueError(f"device must be one that is here: {here}; got {str(device)!r}")
    return found


class PretrainedModel(nn.Module):
    """A model that is a config and weights, both kept in a folder."""

    config_class: ClassVar[type[Config]]
    config: Config

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors.  Tied weights are written once."""
        from safetensors.torch import save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(self.described(), encoding="utf-8")
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
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
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
