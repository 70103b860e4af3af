"""Twins of the classes of transformers, which know what `sparsify` installs: what a saved folder is loaded as.

The twin of a config class has a `model_type` of ours, "tamis_llama" for "llama", so that a folder with sparse attention
is never taken for a dense model.  The twin of a model class builds the model and installs what its config says.
Importing `tamis.hf` registers a name for every type that transformers knows; twins are made when one is asked for.

Folders are also read by those who have not imported tamis: see :mod:`tamis.hf.remote`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from tamis.hf.card import write_card
from tamis.hf.install import VERSION, Factory, install, rebuild
from tamis.hf.remote import SavesModule
from tamis.hf.sites import PART, find_sites
from tamis.hf.strict import LoadsWhole

PREFIX, CONFIG_PREFIX = "tamis_", "Tamis"
_configs: dict[Any, Any] = {}
_models: dict[Any, Any] = {}
AUTO_CLASSES = tuple(
    value
    for name, value in vars(modeling_auto).items()
    if name.startswith("AutoModel") and getattr(value, "_model_mapping", None) is not None
)


class SparseConfig(SavesModule):
    """What the twin of a config class has of its own."""

    dense_type: ClassVar[str]
    """The `model_type` of the class that this is a twin of."""

    def to_dict(self) -> dict[str, Any]:
        _tell_peft(type(self))  # which comes for the `model_type`, and looks it up in its tables
        return super().to_dict()  # type: ignore[misc]

    def auto_classes(self) -> dict[str, str]:
        twin: Any = type(self)
        if self.dense_type not in CONFIG_MAPPING_NAMES:
            return {}
        found = {"AutoConfig": twin.__name__}
        for auto in AUTO_CLASSES:
            if twin in auto._model_mapping:
                classes = auto._model_mapping[twin]
                found[auto.__name__] = (classes[0] if isinstance(classes, tuple) else classes).__name__
        return found


class SparseModel(LoadsWhole):
    """What the twin of a model class has of its own."""

    may_not_miss = rf"\.{PART}\."
    dense_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig, *args: Any, mechanism: Factory | None = None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        written = written_settings(config)
        sites = find_sites(self)  # type: ignore[arg-type]
        install(self, sites, {site.name: rebuild(written, site, mechanism) for site in sites})  # type: ignore[arg-type]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with a model card unless there is one."""
        if kwargs.get("is_main_process", True):
            write_card(self, Path(save_directory))  # type: ignore[arg-type]
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def written_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of every site that a config has of ours, checked."""
    written = getattr(config, PART, None)
    if not isinstance(written, dict):
        raise ValueError("this config holds no sparse attention: load the model with transformers, then sparsify it")
    if written.get("version") != VERSION:
        raise ValueError(
            f"config.json must have settings of version {VERSION}, got {written.get('version')!r}: update tamis"
        )
    sites = written.get("sites")
    if not isinstance(sites, dict) or not all(isinstance(spec, dict) and "name" in spec for spec in sites.values()):
        raise ValueError(f"the settings must name a mechanism for each site, got {sites!r:.200}")
    return sites


def sparse_config(dense: Any) -> Any:
    """The twin of a config class, known to the Auto classes if the class itself is."""
    if issubclass(dense, SparseConfig):
        return dense
    if dense not in _configs:
        kind = dense.model_type
        members = {"model_type": PREFIX + kind, "dense_type": kind, "__module__": __name__}
        _configs[dense] = type(CONFIG_PREFIX + dense.__name__, (SparseConfig, dense), members)
        if kind in CONFIG_MAPPING_NAMES:
            _register_twin(dense, _configs[dense])
    return _configs[dense]


def _register_twin(dense: type[PreTrainedConfig], twin: type[PreTrainedConfig]) -> None:
    """Let transformers know for our type what it knows for the dense one."""
    AutoConfig.register(twin.model_type, twin, exist_ok=True)
    for auto in AUTO_CLASSES:
        if dense in auto._model_mapping:
            auto.register(twin, _twins(auto._model_mapping[dense]), exist_ok=True)
    if (tokenizer := TOKENIZER_MAPPING.get(dense, None)) is not None:
        AutoTokenizer.register(twin, tokenizer_class=tokenizer, exist_ok=True)
    if (conversions := get_checkpoint_conversion_mapping(dense.model_type)) is not None:
        register_checkpoint_conversion_mapping(twin.model_type, conversions, overwrite=True)


def sparse_class(dense: Any) -> Any:
    """The twin of a model class, of the same name: the Trainer and pipelines go by that."""
    if issubclass(dense, SparseModel):
        return dense
    if dense in _models:
        return _models[dense]
    strict = {*(dense._keep_in_fp32_modules_strict or ()), PART}
    members = {
        "config_class": sparse_config(dense.config_class),
        "dense_class": dense,
        "_keep_in_fp32_modules_strict": strict,
        "__module__": __name__,
    }
    _models[dense] = type(dense.__name__, (SparseModel, dense), members)
    return _models[dense]


def register_twins() -> None:
    """Make a name known to `AutoConfig` for every type of transformers.  Importing `tamis.hf` calls it."""
    for kind in CONFIG_MAPPING_NAMES:
        promise(PREFIX + kind, functools.partial(_twin_of_type, kind))


def _twin_of_type(kind: str) -> Any:
    return sparse_config(transformers.CONFIG_MAPPING[kind])


def promise(kind: str, make: Callable[[], type[PreTrainedConfig]]) -> None:
    """Register what stands for a config class until it is asked for: to make all would import all of transformers."""

    def from_dict(values: dict[str, Any], **kwargs: Any) -> Any:
        return make().from_dict(values, **kwargs)

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        return make()(*args, **kwargs)

    members = {"__module__": __name__, "from_dict": staticmethod(from_dict), "__new__": made}
    AutoConfig.register(kind, type(f"Promised_{kind}", (), members), exist_ok=True)


def _twins(classes: Any) -> Any:
    return tuple(map(_twins, classes)) if isinstance(classes, tuple | list) else sparse_class(classes)


def _tell_peft(twin: Any) -> None:
    """Let the tables of PEFT have for our type what they have for the dense one: which layers adapters go to."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and twin.dense_type in table:
            table.setdefault(twin.model_type, table[twin.dense_type])


def class_named(name: str) -> Any:
    """A twin by its name: what `auto_map` and pickle of whole models ask for."""
    dense = getattr(transformers, name.removeprefix(CONFIG_PREFIX), None)
    if isinstance(dense, type) and issubclass(dense, PreTrainedConfig) and name.startswith(CONFIG_PREFIX):
        return sparse_config(dense)
    if isinstance(dense, type) and issubclass(dense, PreTrainedModel):
        return sparse_class(dense)
    raise AttributeError(f"tamis.hf has no class {name!r}")


__getattr__ = class_named
