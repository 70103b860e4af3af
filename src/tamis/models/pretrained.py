"""Models that are saved as safetensors with their config beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from tamis import plugins
from tamis.files import check_sealed, read_table, seal
from tamis.mechanisms.registry import MECHANISMS
from tamis.models.config import ModelConfig
from tamis.positions.registry import POSITIONS

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


class PretrainedModel(nn.Module):
    """A model that is a config and weights, both kept in a folder."""

    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.check_memory()
        self.config = config

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, and their checksums.  Tied weights are written once."""
        from safetensors.torch import save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(self.described(), encoding="utf-8")
        save_model(self, str(folder / WEIGHTS))
        seal(folder)

    def described(self) -> str:
        """Return the text of config.json."""
        config = self.config.to_dict()
        needed = plugins_of(config)
        own = {"plugins": needed} if needed else {}
        return json.dumps({"model": type(self).__name__, **own, **config}, indent=2) + "\n"

    @classmethod
    def from_pretrained(cls, folder: str | Path, **loading: Any) -> Self:
        """Read what save_pretrained wrote, in the dtype it was written in."""
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_model

        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} holds no {name}: is it a folder that save_pretrained wrote?")
        check_sealed(folder, CONFIG, WEIGHTS)
        model = cls(cls._read_config(folder / CONFIG))
        try:
            with safe_open(str(folder / WEIGHTS), "pt") as weights:
                model.to(weights.get_tensor("embedding.weight").dtype)
            load_model(model, str(folder / WEIGHTS), **loading)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{folder / WEIGHTS} cannot be loaded into a {cls.__name__}: {error}") from error
        return model

    @classmethod
    def _read_config(cls, path: Path) -> ModelConfig:
        values = read_table(path)
        kind = values.pop("model", cls.__name__)
        if kind != cls.__name__:
            raise ValueError(f"{path.parent} holds a {kind}, not a {cls.__name__}")
        plugins.check_loaded(values.pop("plugins", []), path.parent)
        try:
            return cls.config_class.from_dict(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def plugins_of(config: dict[str, Any]) -> list[str]:
    """The plugins that the mechanisms and positions of a model's config come from.

    By the names that tell them apart: folders of this machine are nothing to a model that travels.
    """
    found = []
    for name, spec in config.items():
        registry = MECHANISMS if name.endswith("mechanism") else POSITIONS if name == "position" else None
        if registry is not None:
            found.append(registry.plugin_of(spec.get("name") if isinstance(spec, dict) else spec))
    return sorted({plugins.called(plugin) for plugin in found if plugin is not None})


def saved_class(folder: Path) -> str:
    """The name of the class that a folder was saved by; "" if config.json does not say."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}: is it a folder that save_pretrained wrote?")
    return str(read_table(folder / CONFIG).get("model", ""))
