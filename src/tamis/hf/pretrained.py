"""Loading what `save_pretrained` wrote of a sparsified model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from tamis.hf import specs
from tamis.hf.convert import VERSION, Factory, install
from tamis.hf.sites import PART, AttentionSite, find_sites
from tamis.hf.specs import Spec
from tamis.mechanisms import Mechanism

_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def from_pretrained(
    path: str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    mechanism: Factory | None = None,
    **loading: Any,
) -> Any:
    """The model that `save_pretrained` wrote, with its sparse attention.

    transformers' own `from_pretrained` would drop the alphas, norms and scales, and go back to softmax.

    Args:
        path: a folder or a name on the hub.
        model_class: the class to load it as; by default that which was saved.
        mechanism: makes the mechanism of an `AttentionSite`; needed where they were given as objects or by a function.
        loading: further arguments of transformers' `from_pretrained`, such as `dtype`.
    """
    where = {name: loading[name] for name in _WHERE if name in loading}
    config = AutoConfig.from_pretrained(path, **where)
    written = getattr(config, PART, None)
    if not isinstance(written, dict):
        raise ValueError(f"{path} holds no model with sparse attention: load it with transformers, then sparsify it")
    if written.get("version") != VERSION:
        raise ValueError(f"{path} must have settings of version {VERSION}, got {written.get('version')}: update tamis")
    built = class_of(config) if model_class is None else model_class
    with _not_reporting_ours(built):
        model = built.from_pretrained(path, **loading)
    sites = find_sites(model)
    install(model, sites, {site.name: _rebuild(written["sites"], site, mechanism) for site in sites})
    _load(model, path, where)
    return model


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise ValueError(f"transformers has no class of the saved architecture, {names}: pass model_class=")
    return found


def _rebuild(written: dict[str, Spec], site: AttentionSite, mechanism: Factory | None) -> tuple[Mechanism, Spec]:
    if site.name not in written:
        raise ValueError(f"config.json has no settings for {site.name}, only for {', '.join(written)}")
    spec = written[site.name]
    if spec["name"] is not None:
        return specs.build(spec, site), spec
    if mechanism is None:
        raise ValueError(f"{site.name} was given a {spec['class']} as an object: pass mechanism= to make it again")
    return mechanism(site), spec


def _load(model: PreTrainedModel, path: str | Path, where: dict[str, Any]) -> None:
    """The tensors of what is installed, from the file or files of a checkpoint."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if f".{PART}." in name}
    spelled = {key: name for name in wanted for key in _spellings(name, model.base_model_prefix)}
    for file in _files(path, where):
        with safe_open(file, "pt") as saved:
            for key in set(saved.keys()) & spelled.keys():
                _copy(wanted.pop(spelled[key]), saved.get_tensor(key), key)
    if wanted:
        raise ValueError(f"{path} has no {', '.join(wanted)}")


def _copy(parameter: Tensor, saved: Tensor, key: str) -> None:
    if parameter.shape != saved.shape:
        raise ValueError(f"{key} must be of shape {tuple(parameter.shape)}, got {tuple(saved.shape)}")
    parameter.data.copy_(saved)


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """A model may have been saved with a head on it and be loaded without, or the other way round."""
    return name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")


def _files(path: str | Path, where: dict[str, Any]) -> Iterator[str]:
    quiet = {**where, "_raise_exceptions_for_missing_entries": False}
    if (whole := cached_file(str(path), SAFE_WEIGHTS_NAME, **quiet)) is not None:
        yield whole
    elif (index := cached_file(str(path), SAFE_WEIGHTS_INDEX_NAME, **quiet)) is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        for shard in sorted({file for name, file in shards.items() if f".{PART}." in name}):
            yield str(cached_file(str(path), shard, **where))
    else:
        raise FileNotFoundError(f"{path} holds no {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}")


@contextmanager
def _not_reporting_ours(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """transformers warns of tensors that it has no place for; ours find theirs afterwards."""
    name = "_keys_to_ignore_on_load_unexpected"
    before = getattr(model_class, name)
    own = name in vars(model_class)
    setattr(model_class, name, [*(before or ()), rf"\.{PART}\."])
    try:
        yield
    finally:
        if own:
            setattr(model_class, name, before)
        else:
            delattr(model_class, name)
