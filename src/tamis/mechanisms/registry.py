"""Mechanisms by name, for configuration files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tamis.mechanisms.asentmax import ASEntmaxAttention, ASSMaxAttention, ScalableSoftmaxAttention
from tamis.mechanisms.base import Mechanism
from tamis.mechanisms.entmax import EntmaxAttention
from tamis.mechanisms.rela import ReLAttention
from tamis.mechanisms.softmax import SoftmaxAttention
from tamis.mechanisms.softpick import SoftpickAttention
from tamis.plugins import Registry
from tamis.settings import Spec, check_heads, numbers, read_spec


@dataclass(frozen=True)
class LayerSizes:
    """What a mechanism may have to know about the layer it is for."""

    embed_dim: int
    """Width of the layer's input, which the scales of ASEntmax read."""
    num_heads: int
    width: int
    """Channels of all heads together, which ReLA normalises; embed_dim unless the layer has a head_dim of its own."""
    scaled_heads: Tensor | None

    @property
    def scaled(self) -> dict[str, Any]:
        return {"scaled_heads": self.scaled_heads}


# Each takes the sizes of the layer and the mechanism's own arguments.
MECHANISMS: Registry[Callable[..., Mechanism]] = Registry(
    {
        "softmax": lambda layer: SoftmaxAttention(),
        "entmax": lambda layer, **own: EntmaxAttention(layer.num_heads, **own),
        "entmax15": lambda layer: EntmaxAttention(layer.num_heads, 1.5),
        "sparsemax": lambda layer: EntmaxAttention(layer.num_heads, 2.0),
        "rela": lambda layer, **own: ReLAttention(layer.width, layer.num_heads, **own),
        "softpick": lambda layer, **own: SoftpickAttention(**own),
        "asentmax": lambda layer, **own: ASEntmaxAttention(layer.embed_dim, layer.num_heads, **{**layer.scaled, **own}),
        "assmax": lambda layer, **own: ASSMaxAttention(layer.embed_dim, layer.num_heads, **{**layer.scaled, **own}),
        "ssmax": lambda layer, **own: ScalableSoftmaxAttention(layer.num_heads, **{**layer.scaled, **own}),
    }
)


def build_mechanism(
    spec: Spec | Mechanism,
    embed_dim: int,
    num_heads: int,
    scaled_heads: Tensor | None = None,
    *,
    head_dim: int | None = None,
) -> Mechanism:
    """Build the mechanism that a specification names, for a layer of these sizes.

    Args:
        spec: a name, a table with a name and settings, or a `Mechanism`, which is returned as it is.
        embed_dim, num_heads: of the layer.
        scaled_heads: which heads :class:`ASEntmaxAttention` scales; all by default.
        head_dim: embed_dim // num_heads by default.

    Every table may have an `initial_spread`, in place of that which the mechanism asks for.

    Returns:
        the mechanism.
    """
    if isinstance(spec, Mechanism):
        return spec
    name, own = read_mechanism(spec)
    spread = own.pop("initial_spread", None)
    check_heads(num_heads, embed_dim if head_dim is None else None)
    width = embed_dim if head_dim is None else num_heads * head_dim
    try:
        mechanism = MECHANISMS[name](LayerSizes(embed_dim, num_heads, width, scaled_heads), **own)
    except TypeError as error:
        raise ValueError(f"mechanism {name!r} does not take {own}: {error}") from error
    if spread is not None:
        mechanism.initial_spread = spread
        numbers(mechanism, "initial_spread", above=0.0)
    return mechanism


def read_mechanism(spec: object) -> tuple[str, dict[str, Any]]:
    """The name of a known mechanism, and its own arguments."""
    return read_spec("mechanism", spec, MECHANISMS, "entmax")
