"""How wide scores lie at the start, measured on data and set there: for models of one's own.

The spread of a head is the standard deviation of its scores over the keys that a query sees, as the root mean square
over queries.  Scores are q k^T times their scale, before biases and before what a mechanism multiplies them by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn

from tamis import functional
from tamis.attention.call import Options
from tamis.mechanisms import Mechanism
from tamis.nn.attention import Attention
from tamis.nn.modes import evaluating
from tamis.nn.multihead import MultiheadAttention

TOLERANCE = 0.02  # of what a rescaled site may be off; half precision rounds weights that much
_OF_SCORES = {"attn_mask", "is_causal", "enable_gqa", *get_type_hints(Options)} - {"alibi_slopes"}


class Site(NamedTuple):
    """A place where a model attends."""

    mechanism: Mechanism
    projections: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]
    """Weights and biases that make queries and those that make keys, each (heads * head_dim, ...), not copied."""


def measure_spread(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return the spread of the scores of every head on one batch.

    Args:
        model: any module with :class:`tamis.nn.Attention` or :class:`tamis.nn.MultiheadAttention` in it.
        args, kwargs: what the model is called with.

    Returns:
        tensors (H,) by the path of the attention layer.
    """
    return measure_sites(sites_of(model), model, lambda: model(*args, **kwargs))


def set_spread(model: nn.Module, *args: Any, spread: float | None = None, **kwargs: Any) -> dict[str, Tensor]:
    """Rescale query and key projections so that the scores of every head have a spread on one batch, in place.

    Args:
        model, args, kwargs: as in :func:`measure_spread`.
        spread: the one that is wanted; by default what each mechanism learns best from, its `initial_spread`.

    Returns:
        The spreads that were there before.
    """
    return set_on_sites(sites_of(model), model, lambda: model(*args, **kwargs), spread)


def sites_of(model: nn.Module) -> dict[str, Site]:
    """The attention layers of ours in a model, by their paths."""
    return {
        path: Site(module.mechanism, module.score_projections)
        for path, module in model.named_modules()
        if isinstance(module, Attention | MultiheadAttention)
    }


def measure_sites(sites: Mapping[str, Site], model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """`measure_spread` of given sites, while `run` runs the model."""
    found: dict[str, Tensor] = {}

    def note(name: str, spread: Tensor) -> None:
        found.setdefault(name, spread)

    _run(sites, model, run, note)
    return found


def set_on_sites(
    sites: Mapping[str, Site], model: nn.Module, run: Callable[[], object], spread: float | None
) -> dict[str, Tensor]:
    """`set_spread` of given sites, while `run` runs the model."""
    if spread is not None and not (isinstance(spread, int | float) and 0.0 < spread < math.inf):
        raise ValueError(f"spread must be a number above 0, got {spread!r}")
    before: dict[str, Tensor] = {}

    def rescale(name: str, found: Tensor) -> Tensor | None:
        if name in before:  # a layer that is used again has its spread already
            return None
        if not bool(((found > 0.0) & (found < math.inf)).all()):
            raise ValueError(f"the scores of {name} must differ to have a spread, got {found.tolist()} for its heads")
        before[name] = found
        factor = wanted(name) / found
        _scale(*sites[name].projections(), factor)
        return factor

    def wanted(name: str) -> float:
        return sites[name].mechanism.initial_spread if spread is None else spread

    _run(sites, model, run, rescale)
    for name, found in measure_sites(sites, model, run).items():
        if not bool(((found / wanted(name) - 1.0).abs() < TOLERANCE).all()):
            raise ValueError(
                f"the scores of {name} should have a spread of {wanted(name):g} now, got {found.tolist()}: "
                "something between its projections and its scores, such as a norm, undoes their scale"
            )
    return before


def _run(
    sites: Mapping[str, Site],
    model: nn.Module,
    run: Callable[[], object],
    seen: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Run the model and hand over each site's spread as it comes; what is returned multiplies its scores (H,)."""
    if not sites:
        raise ValueError(f"{type(model).__name__} has no attention layer of tamis to measure")
    with torch.no_grad(), evaluating(model), _intercepted(sites, seen):
        run()


@contextmanager
def _intercepted(sites: Mapping[str, Site], seen: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Put ourselves where a mechanism turns queries and keys into what is computed."""

    def intercept(name: str, mechanism: Mechanism) -> None:
        resolve = mechanism.resolve

        def resolved(query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> Any:
            factor = seen(name, _spread(query, key, options))
            if factor is not None:
                query = query * factor.to(query.dtype)[:, None, None]
            return resolve(query, key, hidden, options)

        mechanism.__dict__["resolve"] = resolved

    try:
        for name, site in sites.items():
            intercept(name, site.mechanism)
        yield
    finally:
        for site in sites.values():
            site.mechanism.__dict__.pop("resolve", None)


def _spread(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor:
    """(H,)"""
    about = {name: value for name, value in options.items() if name in _OF_SCORES}
    _, visible = functional.attention_scores(query, key, **about)
    groups = query.shape[1] // key.shape[1]
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.double() @ key.double().repeat_interleave(groups, 1).mT * scale
    visible = visible.expand(scores.shape)
    count = visible.sum(-1, keepdim=True)
    mean = torch.where(visible, scores, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(visible, scores - mean, 0.0).square().sum(-1) / count.squeeze(-1).clamp(min=1)
    several = count.squeeze(-1) > 1  # a single key has nothing to differ from
    total = torch.where(several, squares, 0.0).transpose(0, 1).flatten(1).sum(-1)
    return (total / several.transpose(0, 1).flatten(1).sum(-1)).sqrt()


def _scale(queries: Sequence[Tensor], keys: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the scores of each head by a factor: both sides by its root, or queries alone if heads share keys."""
    if queries[0].shape[0] != keys[0].shape[0]:
        scaled = [(tensor, factor) for tensor in queries]
    else:
        scaled = [(tensor, factor.sqrt()) for tensor in (*queries, *keys)]
    for tensor, share in scaled:
        by_head = tensor.data.unflatten(0, (len(factor), -1))
        by_head.mul_(share.to(tensor.dtype).view(-1, *[1] * (by_head.ndim - 1)))
