"""Mechanisms as plain values, which config.json can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tamis.hf.sites import AttentionSite
from tamis.mechanisms import Mechanism, build_mechanism
from tamis.mechanisms.registry import read_mechanism

Spec = dict[str, Any]
"""{"name": "entmax", "alpha": 1.5}; learned alphas have a "start" too.  A name of None: an object nobody can name."""

START = 1.05
"""Where learned alphas start: near softmax, so that a trained model goes on where it was."""


def make_spec(
    mechanism: str | Mapping[str, Any], alpha: float | str | None, start: float | str | None, settings: dict[str, Any]
) -> Spec:
    """The spec of a mechanism given by name, alone or in a table, and of its settings."""
    name, own = read_mechanism(mechanism)
    spec = {"name": name, **own, **settings}
    alpha = spec.pop("alpha", None) if alpha is None else alpha
    start = spec.pop("start", None) if start is None else start
    if alpha is not None and not isinstance(alpha, int | float | str):
        raise TypeError(f'alpha must be a number or "learn", got {type(alpha).__name__}; else give a mechanism object')
    learned = name == "entmax" and alpha in (None, "learn")
    if start is not None and not learned:
        raise ValueError(f"start is where the learned alphas of entmax start, got start={start} without them")
    if learned:
        spec.update(alpha="learn", start=START if start is None else start)
    elif alpha is not None:
        spec["alpha"] = alpha
    try:
        json.dumps(spec)
    except TypeError as error:
        raise TypeError(f"settings must be plain values, which config.json can hold: {error}") from error
    return spec


def build(spec: Spec, site: AttentionSite) -> Mechanism:
    """The mechanism of a spec for one attention module."""
    return build_mechanism(spec, site.embed_dim, site.num_heads, head_dim=site.head_dim)
