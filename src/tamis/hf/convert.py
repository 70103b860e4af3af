"""Dense to sparse and back, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tamis.hf import specs
from tamis.hf.interface import IMPLEMENTATION, LAYER_INPUT, honour_sparse_outputs
from tamis.hf.part import AttentionPart
from tamis.hf.sites import PART, AttentionSite, find_sites, parts_of
from tamis.hf.specs import Spec
from tamis.hf.spread import set_spread
from tamis.mechanisms import Mechanism, SoftmaxAttention

Model = TypeVar("Model", bound=PreTrainedModel)
Factory = Callable[[AttentionSite], Mechanism]
Layers = Iterable[int] | Callable[[str], bool]

VERSION = 1
"""Of what is written to config.json."""


def sparsify(
    model: Model,
    mechanism: str | Mapping[str, Any] | Mechanism | Factory = "entmax",
    *,
    layers: Layers | None = None,
    alpha: float | str | None = None,
    start: float | str | None = None,
    spread: float | None = None,
    **settings: Any,
) -> Model:
    """Give a loaded model another attention mechanism, in place, and return it.

    Args:
        model: any model whose attention goes through the interface of transformers.
        mechanism: a name ("entmax", "rela", "asentmax", or another of `tamis.mechanisms.MECHANISMS`), alone or in a
            table with its settings; an object, of which every layer gets a copy; or a function from an `AttentionSite`
            to an object.
        layers: which layers to change: their numbers, or a function of a site's name such as "decoder.0.cross".  All
            by default.  The others keep what they have, which is softmax if nothing was installed before.
        alpha: of "entmax": "learn" (the default) or a number; of "asentmax": a number.
        start: where learned alphas start; 1.05 by default, near softmax.  "normal" draws them as the paper does.
        spread: rescale queries and keys so that scores start with this standard deviation, for models trained from
            scratch; :func:`tamis.hf.set_spread` measures it on a batch of one's own.  By default nothing is rescaled.
        settings: the mechanism's other arguments, such as `variant="i"` for "rela".

    Parameters are added under the name "tamis" inside each attention module, in fp32.  `save_pretrained` writes them,
    with the settings in config.json; `tamis.hf.from_pretrained` brings both back.
    """
    make = _maker(mechanism, alpha, start, settings)
    sites = find_sites(model)
    chosen = _chosen(sites, layers)
    install(model, sites, {site.name: make(site) for site in sites if site.name in chosen})
    if spread is not None:
        set_spread(model, spread=spread)
    return model


def densify(model: Model) -> Model:
    """Take out all that `sparsify` installed, in place, and return the model: it computes what it did before."""
    remembered = model.__dict__.pop("dense_implementations", None)
    if remembered is None:
        raise ValueError(f"this {type(model).__name__} has no sparse attention to take out")
    for module, part in list(parts_of(model)):
        part.input_hook.remove()
        delattr(module, PART)
    for hook in model.__dict__.pop("sparse_output_hooks", ()):
        hook.remove()
    for config, implementation in remembered:
        config._attn_implementation_internal = implementation
    delattr(model.config, PART)
    return model


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


def _maker(
    mechanism: str | Mapping[str, Any] | Mechanism | Factory,
    alpha: float | str | None,
    start: float | str | None,
    settings: dict[str, Any],
) -> Callable[[AttentionSite], tuple[Mechanism, Spec]]:
    if isinstance(mechanism, str | Mapping):
        spec = specs.make_spec(mechanism, alpha, start, settings)
        return lambda site: (specs.build(spec, site), dict(spec))
    if alpha is not None or start is not None or settings:
        raise ValueError("alpha, start and settings go with a mechanism's name; an object has its own")
    if not isinstance(mechanism, Mechanism) and not callable(mechanism):
        raise TypeError(f"mechanism must be a name, a Mechanism or a function that makes one, got {mechanism!r}")

    def make(site: AttentionSite) -> tuple[Mechanism, Spec]:
        made = copy.deepcopy(mechanism) if isinstance(mechanism, Mechanism) else mechanism(site)
        if not isinstance(made, Mechanism):
            raise TypeError(f"the function given as mechanism must return a Mechanism, got {made!r}")
        made.check_layer(site.embed_dim, site.num_heads, site.head_dim)
        return made, {"name": None, "class": f"{type(made).__module__}.{type(made).__qualname__}"}

    return make


def _chosen(sites: list[AttentionSite], layers: Layers | None) -> set[str]:
    if layers is None:
        return {site.name for site in sites}
    if callable(layers):
        found = {site.name for site in sites if layers(site.name)}
        if not found:
            raise ValueError(f"layers chose none of {', '.join(site.name for site in sites)}")
        return found
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(
            f"layers must be numbers of layers, such as [0, 1], or a function of a site's name, got {layers!r}"
        )
    wanted = set(layers)
    known = {site.layer for site in sites}
    if not wanted or not wanted <= known:
        raise ValueError(f"layers must be some of {sorted(known)}, got {sorted(wanted, key=str)}")
    return {site.name for site in sites if site.layer in wanted}


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
