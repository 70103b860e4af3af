"""The Trainer of transformers with sparsity pressure, and with alphas and densities in what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from tamis.analysis.capture import capture
from tamis.analysis.learned import learned_alphas
from tamis.analysis.metrics import AttentionMetrics
from tamis.hf.training import learned
from tamis.mechanisms import Ramp
from tamis.mechanisms.schedules import press
from tamis.nn.modes import evaluating


class SparsityCallback(TrainerCallback):
    """Adds `pressure` times :func:`sparsity_pressure` to the loss of every update, and figures to the logs.

    Args:
        pressure: 0 adds none; a `Ramp` lets it begin later, such as after the warm-up.
        sample: what the model is called with to measure densities; none are measured by default.

    ``SparsityCallback(pressure=0.02).attach(trainer)``.  Logged are "pressure", "alpha/mean", "alpha/min",
    "alpha/max", "alpha/SITE", "density/mean" and "density/SITE", the means over the heads of a site.

    The gradient of the pressure is added where those of the loss are complete: see :func:`press`.
    """

    def __init__(self, pressure: float | Ramp = 0.0, sample: Mapping[str, Any] | None = None) -> None:
        ramp = pressure if isinstance(pressure, Ramp) else Ramp(start=pressure, target=pressure, begin=0, end=0)
        if not (ramp.start >= 0.0 and ramp.target >= 0.0):
            raise ValueError(f"pressure must be at least 0, got {pressure}")
        self.pressure, self.sample = ramp, sample
        self.presses = ramp.start > 0.0 or ramp.target > 0.0

    def attach(self, trainer: Any) -> Any:
        """Put this in front of the callbacks of a Trainer, so that those that report find the figures; returns it.

        Given to the Trainer as `callbacks=` it comes after them, and only `trainer.state.log_history` has the figures.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.presses:
            if not any(alpha.raw.requires_grad for alpha in learned(model)):
                raise ValueError(
                    "pressure needs alphas that are trained, and this model has none: see tamis.hf.sparsify"
                )
            if args.fp16 and not args.max_grad_norm:
                raise ValueError("with fp16 gradients are scaled until they are clipped: set max_grad_norm above 0")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if strength := self.pressure.at(state.global_step + 1):
            press(learned(model), strength)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **_: Any
    ) -> None:
        if logs is None or "loss" not in logs:  # evaluations, and the summary at the end, are logged too
            return
        figures = self.figures(model)
        if self.presses:
            figures["pressure"] = self.pressure.at(state.global_step)
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Return what is added to the logs."""
        found = _named("alpha", learned_alphas(model))
        if self.sample is not None:
            metrics = AttentionMetrics()
            device = next(model.parameters()).device
            fed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.sample.items()}
            with evaluating(model), capture(model, metrics):
                model(**fed)
            found |= _named("density", {site: tuple(part.density) for site, part in metrics.results().items()})
        return found


def _named(figure: str, sites: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    every = [value for heads in sites.values() for value in heads]
    if not every:
        return {}
    summary = {"mean": fmean(every), "min": min(every), "max": max(every)}
    named = {**summary, **{site: fmean(heads) for site, heads in sites.items()}}
    return {f"{figure}/{name}": value for name, value in named.items()}
