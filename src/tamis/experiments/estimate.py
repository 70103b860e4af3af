"""How much memory a run will take, found before it starts."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tamis.settings import free_bytes, shown_bytes
from tamis.training import guards
from tamis.training.guards import TrainingError
from tamis.training.trainer import Trainer

LOOKED_AT = 8
"""First updates, the largest part of which is put through the model."""


def describe_cost(trainer: Trainer) -> None:
    """Say what weights and activations will take, and whether there is as much."""
    world = trainer.process.world
    if not trainer.process.leads:
        return
    fixed = fixed_bytes(trainer)
    told = f"memory: {shown_bytes(fixed)} for weights, gradients and optimiser"
    if world > 1:  # a single process cannot run a model that is spread
        trainer.display.say(f"{told}, and activations in each of {world} processes")
        return
    part = largest_part(trainer)
    activations = activation_bytes(trainer, part)
    trainer.display.say(f"{told}, {shown_bytes(activations)} for the activations of {trainer.task.describe(part)}")
    missing, free = fixed - held_bytes(trainer), free_bytes(trainer.process.device)
    if free is not None and missing > free:
        raise TrainingError(
            f"gradients and optimiser take another {shown_bytes(missing)}, and {shown_bytes(free)} are free: "
            "lower the sizes under [model]"
        )
    if free is not None and missing + activations > free:
        trainer.display.say(
            f"that is more than the {shown_bytes(free)} that are free: lower training.device_tokens, "
            f"now {trainer.config.device_tokens or 'all of an update'}"
        )


def fixed_bytes(trainer: Trainer) -> int:
    """Of weights, gradients, what the optimiser remembers, and an average of the weights where one is kept."""
    copies = 4 + (trainer.ema is not None)  # Adam's two; Muon has one of most weights
    shards = trainer.process.world if trainer.config.parallel == "fsdp" else 1
    every = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    return every * copies // shards


def held_bytes(trainer: Trainer) -> int:
    """What of that is there already: the weights, and what a run that goes on has read."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    kept = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    averages = [] if trainer.ema is None else trainer.ema.averages
    return sum(x.numel() * x.element_size() for x in (*trainer.model.parameters(), *kept, *averages))


def largest_part(trainer: Trainer) -> Any:
    """Of the next few updates."""
    updates = itertools.islice(trainer.task.updates.iterate(trainer.state.position), LOOKED_AT)
    parts = [part for _, indices in updates for part in trainer.task.update(indices, trainer.process).parts]
    return max(parts, key=lambda part: sum(x.numel() for x in vars(part).values() if isinstance(x, Tensor)))


def activation_bytes(trainer: Trainer, part: Any) -> int:
    """What a forward pass keeps for the backward pass: counted, not guessed.  The run is left as it was."""
    device = trainer.process.device
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = [device] if device.type == "cuda" else []
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=trainer.config.precision == "bf16")
    # A shape of its own would have layers compiled for it.
    eager = torch.compiler.set_stance("force_eager") if trainer.config.compile else nullcontext()
    explained = guards.memory_explained(f"a batch of {trainer.task.describe(part)}", "training.device_tokens")
    counting = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng(devices), autocast, eager, explained, counting:
        trainer.task.loss(trainer.model, part.to(device))
    return sum(kept.values())
