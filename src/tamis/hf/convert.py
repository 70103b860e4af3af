"""Dense to sparse and back, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from tamis.hf import specs
from tamis.hf.classes import SparseModel, sparse_class
from tamis.hf.install import Factory, install
from tamis.hf.sites import PART, AttentionSite, find_sites, parts_of
from tamis.hf.specs import Spec
from tamis.hf.spread import set_spread
from tamis.mechanisms import Mechanism

Model = TypeVar("Model", bound=PreTrainedModel)
Layers = Iterable[int] | Callable[[str], bool]


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
    with the settings in config.json; the Auto classes of transformers bring both back (:mod:`tamis.hf.classes`).
    """
    make = _maker(mechanism, alpha, start, settings)
    sites = find_sites(model)
    chosen = _chosen(sites, layers)
    install(model, sites, {site.name: make(site) for site in sites if site.name in chosen})
    _turn_into(model, sparse_class(type(model)))
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
    for name in (PART, "auto_map"):
        vars(model.config).pop(name, None)
    if isinstance(model, SparseModel):
        _turn_into(model, model.dense_class)
    return model


def _turn_into(model: Any, other: Any) -> None:
    """Let a model be of another class, and its config, which is its own, of that which goes with it."""
    model.__class__, model.config.__class__ = other, other.config_class


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
    if not wanted or not wanted <= known or any(isinstance(layer, bool) for layer in wanted):
        raise ValueError(f"layers must be some of {sorted(known)}, got {sorted(wanted, key=str)}")
    return {site.name for site in sites if site.layer in wanted}
