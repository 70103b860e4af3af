"""Loading what `save_pretrained` wrote of a sparsified model, in folders of today and of before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tamis.hf.classes import SparseConfig, sparse_class, sparse_config
from tamis.hf.install import Factory
from tamis.hf.sites import PART

_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def from_pretrained(
    path: str | Path,
    *,
    model_class: Any = None,
    mechanism: Factory | None = None,
    **loading: Any,
) -> Any:
    """Load the model that `save_pretrained` wrote, with its sparse attention.

    For most models `AutoModelForCausalLM.from_pretrained` and its like do the same.  This also reads folders whose
    config.json has the dense `model_type`, as tamis first wrote them, and takes what those have no argument for.

    Args:
        path: a folder or a name on the hub.
        model_class: the class to load it as; by default that which was saved.
        mechanism: makes the mechanism of an `AttentionSite`; needed where they were given as objects or by a function.
        loading: further arguments of transformers' `from_pretrained`, such as `dtype`.

    Returns:
        the model.
    """
    config = _read_config(path, model_class, {name: loading[name] for name in _WHERE if name in loading})
    if not isinstance(getattr(config, PART, None), dict):
        raise ValueError(f"{path} holds no model with sparse attention: load it with transformers, then sparsify it")
    if not isinstance(config, SparseConfig):
        config.__class__ = sparse_config(type(config))
    built = sparse_class(class_of(config) if model_class is None else model_class)
    return built.from_pretrained(path, config=config, mechanism=mechanism, **loading)


def _read_config(path: str | Path, model_class: Any, where: dict[str, Any]) -> PreTrainedConfig:
    if model_class is not None and model_class.config_class.model_type not in transformers.CONFIG_MAPPING:
        return sparse_config(model_class.config_class).from_pretrained(path, **where)
    return AutoConfig.from_pretrained(path, **where)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise ValueError(f"transformers has no class of the saved architecture, {names}: pass model_class=")
    return found
