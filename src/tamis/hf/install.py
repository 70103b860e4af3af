"""Putting mechanisms into the attention modules of a model, and building them again from a config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tamis.hf import specs
from tamis.hf.interface import IMPLEMENTATION, LAYER_INPUT, honour_sparse_outputs
from tamis.hf.part import AttentionPart
from tamis.hf.sites import PART, AttentionSite, parts_of
from tamis.hf.specs import Spec
from tamis.mechanisms import Mechanism, SoftmaxAttention

Factory = Callable[[AttentionSite], Mechanism]

VERSION = 1
"""Version of what is written to config.json."""


def install(model: PreTrainedModel, sites: list[AttentionSite], chosen: Mapping[str, tuple[Mechanism, Spec]]) -> None:
    """Put mechanisms into the sites of those names; a site that has none gets softmax."""
    if model.config.output_attentions:
        raise ValueError(
            "config.output_attentions is for eager attention alone: set it to False and pass output_attentions=True "
            "when calling the model"
        )
    _own_config(model)
    for site in sites:
        if site.name in chosen:
            _put(site, *chosen[site.name])
        elif not hasattr(site.module, PART):
            _put(site, SoftmaxAttention(), {"name": "softmax"})
    _switch(model, sites)
    if "sparse_output_hooks" not in model.__dict__:
        inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        model.__dict__["sparse_output_hooks"] = [hook for module in inner for hook in honour_sparse_outputs(module)]
    written = {part.site: part.spec for _, part in parts_of(model)}
    setattr(model.config, PART, {"version": VERSION, "sites": written})


def rebuild(written: Mapping[str, Spec], site: AttentionSite, mechanism: Factory | None) -> tuple[Mechanism, Spec]:
    """The mechanism that a config names for a site; those that it cannot name are made by `mechanism`."""
    if site.name not in written:
        raise ValueError(f"config.json has no settings for {site.name}, only for {', '.join(written)}")
    spec = written[site.name]
    if spec["name"] is not None:
        return specs.build(spec, site), spec
    if mechanism is None:
        raise ValueError(f"{site.name} was given a {spec.get('class')} as an object: pass mechanism= to make it again")
    return mechanism(site), spec


def _put(site: AttentionSite, mechanism: Mechanism, spec: Spec) -> None:
    part = AttentionPart(mechanism, site.name, site.num_heads, site.head_dim, spec)
    part.to(next(site.module.parameters()).device)
    part.train(site.module.training)
    before = getattr(site.module, PART, None)
    if before is None:
        part.input_hook = site.module.register_forward_pre_hook(_hand_over_input, with_kwargs=True)
    else:
        part.input_hook = before.input_hook
    setattr(site.module, PART, part)


def _hand_over_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention modules pass on keywords they do not know, so the input of the layer reaches our function as one."""
    return args, {**kwargs, LAYER_INPUT: args[0] if args else kwargs["hidden_states"]}


def _own_config(model: PreTrainedModel) -> None:
    """Give a model that shares its config with others a copy: what is written there is true of this model alone."""
    if "dense_implementations" in model.__dict__:  # it has one already
        return
    memo: dict[int, Any] = {}  # parts that one object describes go on sharing one
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, memo)


def _switch(model: PreTrainedModel, sites: list[AttentionSite]) -> None:
    """Point every config that attention or masks are read off to our function, and remember what it said.

    `model.set_attn_implementation` does not reach copies of a config, such as that of T5's encoder.
    """
    remembered = model.__dict__.setdefault("dense_implementations", [])
    attention = {site.module for site in sites}
    for module in model.modules():
        if module in attention or (isinstance(module, PreTrainedModel) and not attention.isdisjoint(module.modules())):
            config: Any = module.config
            if config._attn_implementation != IMPLEMENTATION:
                remembered.append((config, config._attn_implementation))
                config._attn_implementation_internal = IMPLEMENTATION
