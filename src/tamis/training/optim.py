"""The optimiser: who decays, whose rate differs, how the rate moves, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tamis.mechanisms import Mechanism
from tamis.training.settings import TrainingConfig


def parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict[str, object]]:
    """Matrices decay; vectors do not; what a mechanism learns does not either and has a rate of its own.

    Each group carries `factor`, its rate as a multiple of the schedule's.
    """
    learned = {id(p) for module in model.modules() if isinstance(module, Mechanism) for p in module.parameters()}
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "mechanisms": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = "mechanisms" if id(parameter) in learned else "matrices" if parameter.ndim > 1 else "vectors"
        groups[kind].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if kind == "matrices" else 0.0,
            "factor": config.mechanism_lr if kind == "mechanisms" else 1.0,
        }
        for kind, parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    # Fused: one pass over memory, and it can leave out a step on the device's own word (see `step`).
    return kind(parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def step(optimizer: torch.optim.Optimizer, lr: float, wrong: Tensor) -> None:
    """One update at this rate, unless `wrong` (fp32, one element) is not 0: then weights and state stay.

    The host does not wait to learn which.
    """
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
