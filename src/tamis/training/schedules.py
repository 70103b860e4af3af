"""What moves in the course of training, but for the rate: a fixed alpha, the slope of ReLA, pressure towards sparsity.

    [training]
    schedules = [
        { name = "alpha", start = 1.0, end = 4000 },     from softmax to the alpha of [model]
        { name = "slope", start = 1.0, end = 600 },      leaky at first, then the rectifier of ReLA
        { name = "pressure", target = 0.02 },            on learned alphas, from the end of the warm-up on
    ]

Each is a function of the step alone, so a run that goes on is the run that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tamis.mechanisms import Mechanism, Ramp
from tamis.mechanisms.schedules import learned_alphas_of, press
from tamis.settings import choose

MOVED = ("alpha", "slope")
"""What a mechanism has, each with the range it may lie in; where it ends is what [model] says."""
NAMES = (*MOVED, "pressure")
RANGES = {"alpha": (1.0, 2.0), "slope": (0.0, 1.0), "pressure": (0.0, math.inf)}
SETTINGS = ("name", "start", "target", "begin", "end")


def read_schedules(specs: Any, steps: int, warmup: int) -> dict[str, Callable[[float], Ramp]]:
    """By name, each as a function of the target that [model] has; raises where a recipe says what cannot be."""
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, dict) for spec in specs):
        raise ValueError(f'schedules must be a list of tables, such as {{ name = "slope", end = 600 }}, got {specs!r}')
    found: dict[str, Callable[[float], Ramp]] = {}
    for spec in specs:
        for key in spec:
            choose("a setting of a schedule", key, SETTINGS)
        name = choose("the name of a schedule", spec.get("name", "(none)"), NAMES)
        if name in found:
            raise ValueError(f"one schedule of {name} is enough, got two")
        found[name] = _read(name, spec, steps, warmup)
    return found


def _read(name: str, spec: dict[str, Any], steps: int, warmup: int) -> Callable[[float], Ramp]:
    presses = name == "pressure"
    if presses and "target" not in spec:
        raise ValueError("a schedule of pressure needs a target, such as 0.02")
    if not presses and "target" in spec:
        raise ValueError(f"a schedule of {name} ends where [model] has it: leave out its target, {spec['target']!r}")
    if not presses and "end" not in spec:
        raise ValueError(f"a schedule of {name} needs an end, the step from which on it is what [model] has")
    for key in ("start", "target"):
        low, high = RANGES[name]
        value = spec.get(key, low)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not low <= value <= high or value == math.inf:
            raise ValueError(f"{key} of a schedule of {name} must be a number from {low:g} to {high:g}, got {value!r}")
    begin = spec.get("begin", warmup if presses else 0)
    end = spec.get("end", begin)
    for key, step in (("begin", begin), ("end", end)):
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= steps:
            raise ValueError(f"{key} of a schedule of {name} must be a step, 0 to steps = {steps}, got {step!r}")
    if begin > end:
        raise ValueError(f"a schedule of {name} must not end before it begins, got begin = {begin} and end = {end}")
    start = float(spec.get("start", {"alpha": 1.0, "slope": 1.0, "pressure": 0.0}[name]))
    return lambda target: Ramp(start=start, target=float(spec.get("target", target)), begin=begin, end=end)


class Schedules:
    """Those of a run, and what they move."""

    def __init__(self, model: nn.Module, specs: Sequence[Any], steps: int, warmup: int) -> None:
        read = read_schedules(specs, steps, warmup)
        self.ramps: dict[str, Ramp] = {}
        for name in (name for name in read if name in MOVED):
            self.ramps[name] = read[name](self._target(model, name))
        self.pressure = read["pressure"](0.0) if "pressure" in read else None
        self._alphas = learned_alphas_of([model])
        if self.pressure is not None and not any(alpha.raw.requires_grad for alpha in self._alphas):
            raise ValueError(
                'a schedule of pressure is for learned alphas, and this model has none: mechanism = "entmax"'
            )

    @staticmethod
    def _target(model: nn.Module, name: str) -> float:
        """Where the mechanisms that have such a thing want it in the end."""
        ends = {module.movable()[name] for module in _movable(model, name)}
        if not ends:
            instead = {"alpha": 'a fixed one: { name = "entmax", alpha = 1.5 }', "slope": 'a rectifier: "rela"'}[name]
            raise ValueError(f"a schedule of {name} needs a mechanism with {instead}; this model has none")
        if len(ends) > 1:
            raise ValueError(f"a schedule of {name} has one end, and this model has {sorted(ends)}")
        return ends.pop()

    def place(self, model: nn.Module, step: int) -> None:
        """Move what there is in a model to where it is at a step."""
        for name, ramp in self.ramps.items():
            for module in _movable(model, name):
                module.move(name, ramp.at(step))

    def press(self, step: int) -> None:
        """Add the gradient of the pressure, where those of the loss are complete."""
        if self.pressure is not None and (strength := self.pressure.at(step)):
            press(self._alphas, strength)

    def values(self, step: int) -> dict[str, float]:
        """For the journal."""
        every = self.ramps if self.pressure is None else {**self.ramps, "pressure": self.pressure}
        return {name: ramp.at(step) for name, ramp in every.items()}

    def at_rest(self, step: int) -> bool:
        """Whether the model computes what its config says: before, no checkpoint is one to export."""
        return all(step >= ramp.end for ramp in self.ramps.values())


def _movable(model: nn.Module, name: str) -> list[Mechanism]:
    return [module for module in model.modules() if isinstance(module, Mechanism) and name in module.movable()]
