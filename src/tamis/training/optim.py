"""The optimisers: who decays, whose rate differs, how the rate moves, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tamis.mechanisms import Mechanism
from tamis.nn.layers import TransformerLayer
from tamis.training.muon import Muon
from tamis.training.settings import TrainingConfig


def parameter_groups(model: nn.Module, config: TrainingConfig) -> dict[str, dict[str, Any]]:
    """Matrices decay; vectors do not; what a mechanism learns does not either and has a rate of its own, as have the
    matrices inside of layers under Muon.

    Each group carries `factor`, its rate as a multiple of the schedule's.
    """
    learned = {id(p) for module in model.modules() if isinstance(module, Mechanism) for p in module.parameters()}
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    inside = {id(p) for layer in layers for p in layer.parameters()} if config.optimizer == "muon" else set()
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"weight_decay": config.weight_decay, "factor": 1.0},
        "vectors": {"weight_decay": 0.0, "factor": 1.0},
        "mechanisms": {"weight_decay": 0.0, "factor": config.mechanism_lr},
        "inside": {"weight_decay": config.weight_decay, "factor": config.muon_lr / config.lr},
    }
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        matrix = "inside" if id(parameter) in inside and parameter.ndim == 2 else "matrices"
        kind = "mechanisms" if id(parameter) in learned else matrix if parameter.ndim > 1 else "vectors"
        groups[kind].setdefault("params", []).append(parameter)
    return {kind: group for kind, group in groups.items() if "params" in group}


def build_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """One, or Muon and one for what is not Muon's."""
    groups = parameter_groups(model, config)
    inside = groups.pop("inside", None)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    # Fused: one pass over memory, and it can leave out a step on the device's own word (see `step`).
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    plain = kind(list(groups.values()), **settings)
    return [plain] if inside is None else [plain, Muon([inside])]


def step(optimizers: Iterable[torch.optim.Optimizer], lr: float, wrong: Tensor) -> None:
    """One update at this rate, unless `wrong` (fp32, one element) is not 0: then weights and state stay.

    The host does not wait to learn which.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        optimizer.grad_scale, optimizer.found_inf = None, wrong  # type: ignore[attr-defined]
        optimizer.step()


def learning_rate(config: TrainingConfig, step: int, embed_dim: int) -> float:
    """The rate of update `step`, counted from 1."""
    warmup = max(config.warmup, 1)
    if config.schedule == "noam":
        return config.lr * embed_dim**-0.5 * min(step**-0.5, step * warmup**-1.5)
    if step < config.warmup:
        return config.lr * step / warmup
    if config.schedule == "inverse-sqrt":
        return config.lr * math.sqrt(warmup / max(step, warmup))
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(config.steps - config.warmup, 1)
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return config.lr


class MovingAverage:
    """An exponential moving average of a model's parameters, in fp32.

    It starts as the weights themselves and its memory grows with the steps, so that the first random weights are
    forgotten: decay_t = min(decay, (1 + t) / (10 + t)).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.model = decay, model
        self.averages = [parameter.detach().float().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        current = [parameter.detach().float() for parameter in self.model.parameters()]
        torch._foreach_lerp_(self.averages, current, 1.0 - decay)

    def named(self) -> dict[str, Tensor]:
        return dict(zip((name for name, _ in self.model.named_parameters()), self.averages, strict=True))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages; again, and all is as before."""
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
