"""Who computes attention: one list in order of preference, which every function asks."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from tamis.attention.backend import Backend
from tamis.attention.blocked import Blocked
from tamis.attention.call import Call
from tamis.attention.dense import Dense
from tamis.attention.native import Native
from tamis.attention.rules import Rule
from tamis.attention.sdpa import Sdpa
from tamis.kernels.dispatch import Triton

BACKENDS: list[Backend] = [Sdpa(), Triton(), Native(), Blocked(), Dense()]
"""One of your own takes its place here: ``BACKENDS.insert(0, Mine())``."""
REFERENCE = ("blocked", "dense")
"""Plain torch, whose first without an obstacle is what backend="reference" takes."""

_log = logging.getLogger("tamis")


def choose(operation: str, call: Call, rule: Rule, name: str) -> Backend:
    """Who performs an operation of `Backend` on this call: whom `name` names, or the first without an obstacle."""
    if name not in ("auto", "reference"):
        return _insisted(operation, call, rule, name)
    passed: list[tuple[Backend, str]] = []
    for backend in BACKENDS:
        if not backend.has(operation):
            continue
        if not (backend.suits(call, rule) if name == "auto" else backend.name in REFERENCE):
            continue
        if (reason := backend.obstacle(call, rule)) is None:
            if passed and name == "auto" and not torch.compiler.is_compiling():
                for faster, why in passed:
                    _say_once(logging.WARNING if faster.is_fused else logging.INFO, backend.name, faster.name, why)
            return backend
        passed.append((backend, reason))
    raise AssertionError("the last backend takes every call")


@dataclass(frozen=True)
class BackendChoice:
    """Who would compute a call, and why not others."""

    chosen: str
    obstacles: dict[str, str | None]
    """In order of preference; None: it can compute the call."""

    def __str__(self) -> str:
        lines = []
        for name, reason in self.obstacles.items():
            state = "takes the call" if name == self.chosen else "could take it" if reason is None else reason
            lines.append(f"{name:<8} {state}")
        return "\n".join(lines)


def explain(call: Call, rule: Rule) -> BackendChoice:
    """What "auto" would choose for the output."""
    return BackendChoice(
        chosen=choose("attend", call, rule, "auto").name,
        obstacles={backend.name: backend.obstacle(call, rule) for backend in BACKENDS},
    )


def _insisted(operation: str, call: Call, rule: Rule, name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            reason = backend.obstacle(call, rule) if backend.has(operation) else f"it does not do {operation}"
            if reason is not None:
                raise RuntimeError(f'backend="{name}": {reason}; backend="auto" takes one that can')
            return backend
    known = ", ".join(["auto", "reference", *(backend.name for backend in BACKENDS)])
    raise ValueError(f"backend must be one of {known}, got {name!r}")


@functools.cache
def _say_once(level: int, chosen: str, preferred: str, reason: str) -> None:
    _log.log(level, "attention takes the backend %r and not %r: %s", chosen, preferred, reason)
