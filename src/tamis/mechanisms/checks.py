"""Names and numbers of heads, checked where mechanisms, layers and models are built."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """`name`, or a ValueError that offers the nearest known one."""
    known = list(known)
    if name in known:
        return name
    if not isinstance(name, str):
        raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
    raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}; did you mean {nearest!r}?")


def check_switch(name: str, value: bool) -> bool:
    """A TypeError for what is neither True nor False: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_heads(num_heads: int, embed_dim: int | None = None) -> None:
    """At least one head, each with an equal share of `embed_dim` if that is given."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads must be an int of at least 1, got {num_heads!r}")
    if embed_dim is not None and (embed_dim < 1 or embed_dim % num_heads):
        raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
