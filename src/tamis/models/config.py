"""What the configs of all models share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from tamis.positions import Position, build_position
from tamis.positions.registry import read_position
from tamis.settings import (
    Config,
    Spec,
    at_least,
    booleans,
    check_memory,
    describe_spec,
    numbers,
    optional_at_least,
    optional_numbers,
    readable,
    shares,
    strings,
)

MOST_LAYERS = 4096
"""Each is a module of its own, and takes 5 ms to build; nobody has trained a model of half as many."""
OF_POSITIONS = {"rope": ("base", "rope_base"), "learned": ("max_length", "max_length")}
"""Settings of positions that have a field of the config beside them, which names alone are built with."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Sizes and kinds of layers; which are the default is a model's own choice."""

    vocab_size: int
    embed_dim: int
    """Width of what goes from layer to layer."""
    num_heads: int = 8
    """Heads of each attention; embed_dim is a multiple of it."""
    num_kv_heads: int | None = None
    """None: as many as num_heads."""
    head_dim: int | None = None
    """None: embed_dim // num_heads."""
    ffn_dim: int
    """Width inside of the feed-forward networks."""
    position: Spec
    """A name, or a table with a name and settings: {"name": "rope", "base": 500000, "scaling": 4}."""
    max_length: int = 1024
    """The number of learned positions; the others have no bound."""
    rope_base: float = 10000.0
    """Base of rotary positions that do not say it themselves."""
    activation: str
    """Activation of the feed-forward networks: "relu", "gelu", "swiglu" or "geglu"."""
    norm: str
    """"layernorm" or "rmsnorm"."""
    arrangement: str = "pre"
    """Norms before ("pre") or after ("post") each sublayer, or around it ("both")."""
    bias: bool
    """Whether linear layers have biases."""
    dropout: float
    """Share of the output of sublayers and embeddings that is dropped in training."""
    attention_dropout: float
    """Share of attention's weights that is dropped in training."""
    norm_eps: float | None = None
    """What norms add to a variance.  None: as torch has it."""
    tie_embeddings: bool = True
    """The output layer is the embedding of what is written."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    initial_spread: float | None = None
    """Standard deviation of attention's scores at the start, about.  None: what each mechanism learns best from.  The
    table of a mechanism may have one of its own: {"name": "entmax", "initial_spread": 0.5}."""

    def __post_init__(self) -> None:
        at_least(self, 1, "vocab_size", "embed_dim", "num_heads", "ffn_dim", "max_length")
        optional_at_least(self, 1, "num_kv_heads", "head_dim")
        shares(self, "dropout", "attention_dropout")
        strings(self, "activation", "norm", "arrangement")
        booleans(self, "bias", "tie_embeddings", "output_bias")
        numbers(self, "rope_base", above=0.0)
        optional_numbers(self, "initial_spread", "norm_eps", above=0.0)
        readable(self, read_position, "position")
        self._positions()

    @property
    def depth(self) -> tuple[int, int]:
        """How many attentions and how many feed-forward networks all layers have."""
        raise NotImplementedError

    def num_weights(self) -> int:
        """About how many there are: of embeddings, attention and feed-forward networks."""
        attentions, networks = self.depth
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        of_attention = 2 * self.embed_dim * head_dim * (self.num_heads + (self.num_kv_heads or self.num_heads))
        of_network = self.embed_dim * self.ffn_dim * (3 if self.activation.endswith("glu") else 2)
        return self.embedded() * self.embed_dim + attentions * of_attention + networks * of_network

    def embedded(self) -> int:
        """Rows of the embeddings, of learned positions and of an output layer of its own."""
        return self.vocab_size * (1 if self.tie_embeddings else 2) + (self.position_limit() or 0)

    def check_memory(self) -> None:
        """Raise if the weights alone take more memory than is free where models are built."""
        device, size = torch.get_default_device(), torch.get_default_dtype().itemsize
        what = f"a model of about {self.num_weights():,} weights"
        check_memory(self.num_weights() * size, device, what, "the sizes under [model]")

    def build_position(self) -> Position:
        """Return the position encoding of one stack of layers."""
        name, own = self._positions()
        return build_position({"name": name, **own}, self.embed_dim, self.num_heads, head_dim=self.head_dim)

    def position_limit(self) -> int | None:
        """Return how many positions there are, where they are learned; None: there is no bound."""
        name, own = self._positions()
        return own["max_length"] if name == "learned" else None

    def describe_position(self) -> str:
        return describe_spec(*read_position(self.position))

    def _positions(self) -> tuple[str, dict[str, Any]]:
        """The name of the position encoding, and its settings with those that the config has of its own."""
        name, own = read_position(self.position)
        if name not in OF_POSITIONS:
            return name, own
        setting, beside = OF_POSITIONS[name]
        value, default = getattr(self, beside), _default(beside)
        if setting in own and value not in (default, own[setting]):
            raise ValueError(
                f"position says {setting} = {own[setting]!r}, and {beside} = {value!r}: leave out {beside}"
            )
        return name, {setting: value, **own}


def _default(name: str) -> Any:
    return next(field.default for field in fields(ModelConfig) if field.name == name)
