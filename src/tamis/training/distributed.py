"""One process or many: who am I, what is shared, and how a model is spread."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tamis.nn.layers import TransformerLayer
from tamis.parallel import ContextParallel
from tamis.settings import choose_device
from tamis.training.guards import TrainingError
from tamis.training.settings import TrainingConfig


@dataclass(frozen=True)
class Process:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device
    per_row: int = 1
    """Processes that share each sequence; `rank` and `world` are then those of such groups, for tasks."""

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and shows."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def alike(self, settings: dict[str, Any]) -> None:
        """Raise, in every process, unless all were given the same settings."""
        if self.world == 1:
            return
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, {name: repr(value) for name, value in settings.items()})
        for rank, theirs in enumerate(everybody):
            for name in sorted(everybody[0].keys() | theirs.keys()):
                if theirs.get(name) != everybody[0].get(name):
                    raise ValueError(
                        f"all processes must be given one recipe, and process {rank} has {name} = {theirs.get(name)}, "
                        f"but process 0 {everybody[0].get(name)}"
                    )

    def group_of(self, per_row: int) -> Process:
        """Return the place of those that share its sequences among all such groups: tasks give each group rows of its
        own."""
        return Process(self.rank // per_row, self.world // per_row, self.device, per_row)

    def agree(self, value: Any) -> Any:
        """Return what the leading process says."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def process(device: str | None = None) -> Iterator[Process]:
    """Join the processes that torchrun started, or be alone.

    Args:
        device: "cpu" or "cuda"; by default what there is.

    Returns:
        a context with this :class:`Process`.
    """
    alone = choose_device(device)
    if "RANK" not in os.environ:
        yield Process(0, 1, alone)
        return
    kind = alone.type
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), place)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _LOST):
            raise
        atexit.register(_leave)
        raise TrainingError(
            f"process {dist.get_rank()} of {dist.get_world_size()} lost another one, which was ended or does not "
            f"answer: start all of them again, and they go on from the last checkpoint ({error})"
        ) from error
    finally:
        dist.destroy_process_group()


def _leave() -> None:
    """End at once: what was sent to a process that is gone would be waited for until its time-out, half an hour."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timed out")
"""How gloo says that another process is gone."""


def context_of(config: TrainingConfig, process: Process) -> ContextParallel | None:
    """What shares sequences between processes; None where each has its own."""
    per_row = config.context_parallel
    if process.world % per_row:
        raise TrainingError(
            f"training.context_parallel = {per_row} does not divide the number of processes, {process.world}: start "
            f"a multiple of it with torchrun --nproc-per-node"
        )
    if per_row == 1:
        return None
    mesh = init_device_mesh(
        process.device.type, (process.world // per_row, per_row), mesh_dim_names=("data", "context")
    )
    return ContextParallel(mesh, config.context)


@contextmanager
def sharing(context: ContextParallel | None, part: Any) -> Iterator[Any]:
    """What this process puts through the model of a part, within the context in which it does."""
    if context is None:
        yield part
        return
    with context.of_length(part.length) as own:
        yield part.shared(own)


def spread(model: nn.Module, config: TrainingConfig, process: Process) -> nn.Module:
    """The model to call: itself if alone, copies that add their gradients ("ddp"), or shards ("fsdp")."""
    if process.world == 1:
        return model
    if config.parallel == "ddp":
        devices = [process.device.index] if process.device.type == "cuda" else None
        # After its first step DDP lays out what it sends anew, unless it looks for unused parameters.  In which order
        # more than two numbers are added depends on the layout, so the first step of a run that goes on would differ.
        fixed = process.world > 2 and (config.deterministic or devices is None)
        if fixed:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=fixed)
    mesh = init_device_mesh(process.device.type, (process.world,))
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)  # changes the model itself
    return model


@contextmanager
def part_of_update(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged after the last part of an update only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    own = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
    with own:
        yield


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers that are saved, themselves and each once, by name."""
    seen: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}


def optimizer_tensors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """What optimisers remember of each parameter, by the names of both."""
    return {
        f"{name}.{key}": value
        for optimizer in optimizers
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizers(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """The reverse: fill the empty state of the optimiser that each parameter has."""
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        for key, value in tensors.items():
            if key.rpartition(".")[0] == name:
                # Counts of steps are the same in every process; the rest lies as its parameter does.
                owner[parameter].state[parameter][key.rpartition(".")[2]] = laid_out_as(parameter, value)


def save_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write what this process has of tensors that lie in several; every process has to call it."""
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # which no `except Exception` sees
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{folder} cannot be written by process {rank}: {cause}") from error


def load_shards(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The reverse, for any number of processes: each tensor laid out as the parameter that its name begins with."""
    reader = HuggingFaceStorageReader(str(folder))
    written: dict[str, Any] = reader.read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, about in written.items():
        like = parameters[name.rpartition(".")[0]]
        sharded = isinstance(like, DTensor) and like.shape == about.size
        empty = torch.empty_like(like) if sharded else torch.empty(about.size)
        tensors[name] = empty.detach().to(about.properties.dtype)
    with warnings.catch_warnings():  # that a single process reads is what is wanted
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(tensors, storage_reader=reader)
    return tensors


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def gathered(tensor: Tensor) -> Tensor:
    """Without shards; every process has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU and without shards; every process has to call it."""
    return {name: gathered(tensor).cpu() for name, tensor in tensors.items()}


def laid_out_as(like: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, which every process has read, on the device and in the shards of another one; or one that lies
    so already."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor) and tensor.shape == like.shape and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


@torch.no_grad()
def restore(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy what was saved into tensors of the same names and shapes."""
    if tensors.keys() != saved.keys():
        wrong = ", ".join(sorted(tensors.keys() ^ saved.keys())[:5])
        raise ValueError(f"these are the weights of another model: {wrong} is on one side only")
    for name, tensor in tensors.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, expected {tuple(tensor.shape)}")
        tensor.copy_(laid_out_as(tensor, saved[name]))
