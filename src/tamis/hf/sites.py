"""Where attention is in a Hugging Face model, how large it is and what it is called."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

PART = "tamis"
"""The attribute of an attention module that holds what `sparsify` installed, and our key in a config."""

# Names differ between architectures; the first that a module or its config has counts.
_NUM_HEADS = ("num_heads", "n_heads", "num_attention_heads")
_HEAD_DIM = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_EMBED_DIM = ("embed_dim", "d_model", "hidden_size")

_CANNOT_HONOUR = {"sinks": "attention sinks", "attn_logit_softcapping": "a soft cap of its scores"}


@dataclass(frozen=True)
class AttentionSite:
    """An attention module of a model; what a factory of mechanisms is given."""

    name: str
    """As `tamis.analysis` calls it: "encoder.0.self", "decoder.0.self", "decoder.0.cross", "layers.0.self"."""
    layer: int
    """The number of the layer it belongs to."""
    module: nn.Module
    embed_dim: int
    """Width of the input of the layer."""
    num_heads: int
    head_dim: int


def find_sites(model: PreTrainedModel) -> list[AttentionSite]:
    """Every attention module of a model that goes through the interface of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    found = [(path, module) for path, module in model.named_modules() if _uses_interface(module)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention that goes through transformers' AttentionInterface: "
            "this architecture is not supported"
        )
    names = [_name(path, module, model) for path, module in found]
    repeated = {name for name, count in Counter(names).items() if count > 1}  # towers with a numbering of their own
    return [
        _measured(path if name in repeated else name, path, module)
        for name, (path, module) in zip(names, found, strict=True)
    ]


def parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Attention modules and what `sparsify` installed in them."""
    for module in model.modules():
        part = getattr(module, PART, None)
        if isinstance(part, nn.Module):
            yield module, part


def _uses_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _name(path: str, module: nn.Module, model: PreTrainedModel) -> str:
    layer = _layer(path)
    if _is_cross(path, module):
        return f"decoder.{layer}.cross"
    if not getattr(module, "is_causal", True):
        return f"encoder.{layer}.self"
    return f"{'decoder' if model.config.is_encoder_decoder else 'layers'}.{layer}.self"


def _layer(path: str) -> int:
    """The first number in the path of a module, as in "decoder.block.3.layer.1.EncDecAttention"."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return int(numbers[0]) if numbers else 0


def _is_cross(path: str, module: nn.Module) -> bool:
    """Models spell it encoder_attn, crossattention, cross_attn, EncDecAttention or in the name of a class."""
    spelled = f"{path.rsplit('.', 2)[-2:]} {type(module).__name__}".lower()
    return any(word in spelled for word in ("cross", "encoder_attn", "encdec"))


def _measured(name: str, path: str, module: nn.Module) -> AttentionSite:
    signature = inspect.signature(module.forward)
    first = next(iter(signature.parameters), "")
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if first != "hidden_states" or not open_ended:
        raise ValueError(
            f"{path} ({type(module).__name__}) is not supported: its forward must take hidden_states first "
            f"and further keyword arguments, got {signature}"
        )
    for attribute, what in _CANNOT_HONOUR.items():
        if getattr(module, attribute, None) is not None:
            raise ValueError(f"{path} ({type(module).__name__}) has {what}, which sparse attention cannot honour")
    return AttentionSite(
        name,
        _layer(path),
        module,
        _size(path, module, _EMBED_DIM),
        _size(path, module, _NUM_HEADS),
        _size(path, module, _HEAD_DIM),
    )


def _size(path: str, module: nn.Module, names: tuple[str, ...]) -> int:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    raise ValueError(f"{path} ({type(module).__name__}) is not supported: it has none of {', '.join(names)}")
