"""Positions by name, for configuration files."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from tamis.plugins import Registry
from tamis.positions.alibi import ALiBi
from tamis.positions.base import NoPE, Position
from tamis.positions.learned import LearnedPositions
from tamis.positions.nape import NAPE
from tamis.positions.rope import RoPE
from tamis.positions.sinusoidal import Sinusoidal
from tamis.settings import Spec, check_heads, choose, read_spec


@dataclass(frozen=True)
class Kind:
    """A class of positions, and which size of a layer it is built for: its first argument."""

    make: type[Position]
    size: str | None

    def settings(self) -> list[str]:
        """The arguments that a spec may give: those that are no size."""
        return [name for name in inspect.signature(self.make.__init__).parameters if name not in ("self", self.size)]


POSITIONS: Registry[Kind] = Registry(
    {
        "sinusoidal": Kind(Sinusoidal, "embed_dim"),
        "learned": Kind(LearnedPositions, "embed_dim"),
        "rope": Kind(RoPE, "head_dim"),
        "alibi": Kind(ALiBi, "num_heads"),
        "nape": Kind(NAPE, "num_heads"),
        "none": Kind(NoPE, None),
    }
)


def build_position(spec: Spec | Position, embed_dim: int, num_heads: int, *, head_dim: int | None = None) -> Position:
    """Build the position encoding that a specification names, for layers of these sizes.

    Args:
        spec: a name, or a table with a name and settings: {"name": "rope", "base": 500000, "scaling": 4}.
        head_dim: embed_dim // num_heads by default.

    Returns:
        the position encoding; a `Position` is returned as it is.
    """
    if isinstance(spec, Position):
        return spec
    name, own = read_position(spec)
    check_heads(num_heads, embed_dim if head_dim is None else None)
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim or embed_dim // num_heads}
    kind = POSITIONS[name]
    try:
        return kind.make(**own) if kind.size is None else kind.make(sizes[kind.size], **own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"position {name!r}: {error}") from error


def read_position(spec: object) -> tuple[str, dict[str, Any]]:
    """The name of a known position encoding, and its settings."""
    name, own = read_spec("position", spec, POSITIONS, "rope")
    known = POSITIONS[name].settings()
    for setting in own:
        if not known:
            raise ValueError(f"position {name!r} has no settings, got {setting!r}")
        choose(f"a setting of position {name!r}", setting, known)
    return name, own
