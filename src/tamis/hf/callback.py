"""The Trainer of transformers with sparsity pressure, and with alphas and densities in what it logs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tamis.analysis.capture import capture
from tamis.analysis.learned import learned_alphas
from tamis.analysis.metrics import AttentionMetrics
from tamis.hf.training import learned, sparsity_pressure
from tamis.nn.modes import evaluating


class SparsityCallback(TrainerCallback):
    """Adds `pressure` times :func:`sparsity_pressure` to the loss of every update, and figures to the logs.

    Args:
        pressure: 0 adds none.
        sample: what the model is called with to measure densities; none are measured by default.

    ``SparsityCallback(pressure=0.02).attach(trainer)``.  Logged are "alpha/mean", "alpha/min", "alpha/max",
    "alpha/SITE", "density/mean" and "density/SITE", the means over the heads of a site.

    The pressure depends on nothing but the alphas, so its gradient is added where those of the loss are complete: after
    clipping, once for each update, whatever the accumulation and the number of processes.
    """

    def __init__(self, pressure: float = 0.0, sample: Mapping[str, Any] | None = None) -> None:
        if not pressure >= 0.0:
            raise ValueError(f"pressure must be at least 0, got {pressure}")
        self.pressure, self.sample = pressure, sample

    def attach(self, trainer: Any) -> Any:
        """Put this in front of the callbacks of a Trainer, so that those that report find the figures; returns it.

        Given to the Trainer as `callbacks=` it comes after them, and only `trainer.state.log_history` has the figures.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.pressure:
            if not any(parameter.requires_grad for parameter in _raw_alphas(model)):
                raise ValueError(
                    "pressure needs alphas that are trained, and this model has none: see tamis.hf.sparsify"
                )
            if args.fp16 and not args.max_grad_norm:
                raise ValueError("with fp16 gradients are scaled until they are clipped: set max_grad_norm above 0")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.pressure:
            alphas = [parameter for parameter in _raw_alphas(model) if parameter.requires_grad]
            with torch.enable_grad():
                gradients = torch.autograd.grad(self.pressure * sparsity_pressure(model), alphas)
            for parameter, gradient in zip(alphas, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **_: Any
    ) -> None:
        if logs is None or "loss" not in logs:  # evaluations, and the summary at the end, are logged too
            return
        figures = self.figures(model)
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


def _raw_alphas(model: nn.Module) -> list[nn.Parameter]:
    return [alpha.raw for alpha in learned(model)]
