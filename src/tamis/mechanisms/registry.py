"""Mechanisms by name, for configuration files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from tamis.mechanisms.asentmax import ASEntmaxAttention, ASSMaxAttention, ScalableSoftmax
from tamis.mechanisms.base import Mechanism
from tamis.mechanisms.entmax import EntmaxAttention
from tamis.mechanisms.rela import ReLAttention
from tamis.mechanisms.softmax import SoftmaxAttention
from tamis.mechanisms.softpick import SoftpickAttention

Spec = str | Mapping[str, Any]
"""A name, or a table with a name and the mechanism's own arguments: {"name": "entmax", "alpha": 1.5}."""

# Each takes (embed_dim, num_heads, scaled_heads) and the mechanism's own arguments.
MECHANISMS: dict[str, Callable[..., Mechanism]] = {
    "softmax": lambda dim, heads, scaled: SoftmaxAttention(),
    "entmax": lambda dim, heads, scaled, **own: EntmaxAttention(heads, **own),
    "entmax15": lambda dim, heads, scaled: EntmaxAttention(heads, 1.5),
    "sparsemax": lambda dim, heads, scaled: EntmaxAttention(heads, 2.0),
    "rela": lambda dim, heads, scaled, **own: ReLAttention(dim, heads, **own),
    "softpick": lambda dim, heads, scaled, **own: SoftpickAttention(**own),
    "asentmax": lambda dim, heads, scaled, **own: ASEntmaxAttention(dim, heads, **{"scaled_heads": scaled, **own}),
    "assmax": lambda dim, heads, scaled, **own: ASSMaxAttention(dim, heads, **{"scaled_heads": scaled, **own}),
    "ssmax": lambda dim, heads, scaled, **own: ScalableSoftmax(heads, **{"scaled_heads": scaled, **own}),
}


def build_mechanism(
    spec: Spec | Mechanism, embed_dim: int, num_heads: int, scaled_heads: Tensor | None = None
) -> Mechanism:
    """The mechanism that a specification names; a `Mechanism` is returned as it is."""
    if isinstance(spec, Mechanism):
        return spec
    own = dict(spec) if isinstance(spec, Mapping) else {}
    name = own.pop("name", None) if isinstance(spec, Mapping) else spec
    if not isinstance(name, str):
        raise ValueError(f'a mechanism is given by its name or a table with one, {{"name": "entmax"}}; got {spec!r}')
    factory = MECHANISMS[choose("mechanism", name, MECHANISMS)]
    try:
        return factory(embed_dim, num_heads, scaled_heads, **own)
    except TypeError as error:
        raise ValueError(f"mechanism {name!r} does not take {own}: {error}") from error


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """`name`, or a ValueError that offers the nearest known one."""
    known = list(known)
    if name in known:
        return name
    if not isinstance(name, str):
        raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
    raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}; did you mean {nearest!r}?")
