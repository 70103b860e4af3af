"""From dense to sparse: what continued training of a sparsified model needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tamis.hf.sites import parts_of
from tamis.mechanisms import LearnedAlpha
from tamis.mechanisms.schedules import distance_from_sparsest, learned_alphas_of


def added_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that `sparsify` added: alphas, norms, scales.

    Args:
        model: a sparsified model.

    Returns:
        parameters, in the order of the modules.
    """
    return [parameter for _, part in parts_of(model) for parameter in part.parameters()]


def parameter_groups(model: nn.Module, lr: float, added_lr: float) -> list[dict[str, Any]]:
    """Group parameters for an optimiser: those that `sparsify` added get a rate of their own and no weight decay.

    An alpha near 1 moves slowly: its raw value has far to go.  A rate ten to a hundred times that of the weights is
    usual for it.

    Args:
        model: a sparsified model.
        lr: learning rate of the model's own parameters.
        added_lr: learning rate of the added ones.

    Returns:
        groups to give to an optimiser.
    """
    added = added_parameters(model)
    known = {id(parameter) for parameter in added}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [{"params": others, "lr": lr}, {"params": added, "lr": added_lr, "weight_decay": 0.0}]


def sparsity_pressure(model: nn.Module) -> Tensor:
    """Return how far the learned alphas are from their upper end, on average: add some of it to the loss.

    Without it alphas go where the loss sends them, which may be back to 1.

    Args:
        model: a sparsified model.

    Returns:
        a number from 0 to 1, with a gradient.
    """
    alphas = learned(model)
    if not alphas:
        raise ValueError("the model has no learned alphas: call tamis.hf.sparsify first")
    return distance_from_sparsest(alphas)


def learned(model: nn.Module) -> list[LearnedAlpha]:
    """The learned alphas that `sparsify` added."""
    return learned_alphas_of(part for _, part in parts_of(model))
