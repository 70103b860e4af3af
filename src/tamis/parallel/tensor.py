"""Tensor parallelism: every process holds some heads, some channels of feed-forward blocks and some tokens' embeddings.

torch's styles divide what is linear: projections to heads and channels by columns, those back by rows, and embeddings
by tokens.  All parameters become DTensors, so that gradients are clipped, optimisers step and checkpoints are written
as for one device.  Code that is not linear computes with plain tensors as ever: while it runs, its module shows it in
the place of each parameter what lies in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tamis.functional.sharding import Heads
from tamis.mechanisms import Mechanism
from tamis.models.blocks import Embedding
from tamis.nn.attention import Attention
from tamis.nn.layers import FeedForward
from tamis.nn.multihead import MultiheadAttention
from tamis.parallel.exchange import Exchange, summed, used_by_all
from tamis.parallel.mesh import exchange_of, mesh_of
from tamis.positions import Position

View = Callable[[Tensor], Tensor]
"""What a process computes with, from the part of a tensor that it holds."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, dim: str = "tensor") -> nn.Module:
    """Divide a model's weights between the processes of one dimension of a mesh, in place::

        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tensor",))
        model = tensor_parallel(CausalLM(config).to("cuda"), mesh)

    Attention layers are divided by heads, with all that their mechanisms and positions learn for each; feed-forward
    blocks by channels; embeddings of `tamis.models`, and output layers, by tokens.  Norms and all else is held whole.
    Inputs and outputs are those of one process, alike in all.  The weights are those of the first process.

    Args:
        model: one of ours, or with our layers; every process builds it whole.
        mesh: one with a dimension named `dim`, or with one dimension.
        dim: of the mesh.

    Returns:
        the same model.
    """
    own, exchange = mesh_of(mesh, dim), exchange_of(mesh, dim)
    plan = _plan(model)
    _check(model, exchange.size, plan)
    parallelize_module(model, own, plan)
    heads = _Heads(own, exchange)
    positions: dict[int, Position] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            _divide_attention(module, heads)
            positions[id(module.position)] = module.position
        elif isinstance(module, FeedForward):
            module.register_forward_pre_hook(partial(_together, own))
            module.dropout = _OwnDropout(module.dropout.p, exchange.layout.rank)
        elif isinstance(module, Embedding):
            _extend(module, {"scores": lambda embedding, x, bias: _scores(own, embedding, x, bias)})
    for position in positions.values():
        position.split_heads(heads)
        heads.hold(position, by_heads=position.inside)
    heads.hold(model, by_heads=False)
    return model


def _check(model: nn.Module, size: int, plan: Mapping[str, ParallelStyle]) -> None:
    """Raise, before anything is changed, for what cannot be divided by so many processes."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model's weights are divided already: tensor_parallel comes first, and once")
    places: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        for own in module.parameters(recurse=False):
            other = places.setdefault(own, path)
            if other != path and {path, other} & plan.keys():
                raise ValueError(f"{path} and {other} share a weight, and what is divided can be nobody else's")
        name = path or "the model"
        if isinstance(module, MultiheadAttention):
            raise ValueError(
                f"{name} is a MultiheadAttention, whose projections are one matrix: only "
                f"tamis.nn.Attention can be divided by heads"
            )
        sizes: dict[str, int] = {}
        if isinstance(module, Attention):
            sizes = {"num_heads": module.num_heads, "num_kv_heads": module.num_kv_heads}
        elif isinstance(module, FeedForward):
            sizes = {"ffn_dim": module.up.out_features}
        for setting, number in sizes.items():
            if number % size:
                raise ValueError(f"{name}: {setting} = {number} must be a multiple of the {size} processes")


def _plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """What torch divides, by name."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Attention):
            plan |= {f"{prefix}{part}": ColwiseParallel() for part in ("q_proj", "k_proj", "v_proj")}
            plan[f"{prefix}out_proj"] = RowwiseParallel()
        elif isinstance(module, FeedForward):
            wide = ("up",) if module.gate is None else ("up", "gate")
            plan |= {f"{prefix}{part}": ColwiseParallel() for part in wide}
            plan[f"{prefix}down"] = RowwiseParallel()
        elif isinstance(module, Embedding):
            plan[name] = RowwiseParallel(input_layouts=Replicate())
    if isinstance(getattr(model, "output", None), nn.Linear):
        plan["output"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def _divide_attention(layer: Attention, heads: _Heads) -> None:
    layer.num_heads //= heads.size
    layer.num_kv_heads //= heads.size
    layer.register_forward_pre_hook(partial(_together, heads.mesh))
    layer.mechanism.register_forward_pre_hook(partial(_of_own_heads, heads), with_kwargs=True)
    layer.mechanism.split_heads(heads)
    heads.hold(layer.mechanism, by_heads=True)


def _together(mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs that several projections read: their gradients are then summed over processes once, not for each."""
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) if _is_plain(x) else x for x in inputs)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def _of_own_heads(
    heads: _Heads, mechanism: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a mechanism is given: the layer's input as a plain tensor, and random numbers that are not other heads'."""
    if isinstance(hidden := options.get("hidden"), DTensor):
        options = options | {"hidden": hidden.to_local(grad_placements=[Partial()])}
    if options.get("dropout_p") and options.get("generator") is None:
        options = options | {"generator": _own_generator(heads.rank, torch.device("cpu"))}
    return inputs, options


def _own_generator(rank: int, device: torch.device) -> torch.Generator:
    """Draws one number, alike in all processes, and goes another way in each."""
    seed = int(torch.randint(2**62, ()).item())
    return torch.Generator(device).manual_seed(seed + rank)


class _OwnDropout(nn.Dropout):
    """Of channels that are another process's neither."""

    def __init__(self, p: float, rank: int) -> None:
        super().__init__(p)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=_own_generator(self.rank, x.device))
        return x * (kept / (1.0 - self.p) if self.p < 1.0 else kept)


def _scores(mesh: DeviceMesh, embedding: nn.Embedding, x: Tensor, bias: Tensor | None) -> Tensor:
    """Those of this process's tokens, gathered."""
    own = F.linear(DTensor.from_local(x, mesh, [Replicate()], run_check=False), embedding.weight)
    logits: Tensor = own.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]
    if bias is None:
        return logits
    return logits + (bias.to_local() if isinstance(bias, DTensor) else bias)


class _Heads(Heads):
    def __init__(self, mesh: DeviceMesh, exchange: Exchange) -> None:
        self.mesh, self.exchange = mesh, exchange
        self.size, self.rank = exchange.size, exchange.layout.rank
        self.divided: dict[Tensor, Tensor] = {}
        """What has taken the place of each tensor: one that two modules share goes on being shared."""
        self.computing = False
        """Whether code runs that is to see what lies in this process; everybody else sees parameters as they are."""

    def split(self, module: nn.Module, *names: str, dim: int = 0) -> None:
        for name in names:
            tensor = getattr(module, name)
            if tensor.shape[dim] % self.size:
                raise ValueError(
                    f"{name} of {type(module).__name__} must have a multiple of the {self.size} processes along "
                    f"dimension {dim}, got shape {tuple(tensor.shape)}"
                )
        self.lay_out(module, {name: Shard(dim) for name in names}, _as_it_is)

    def choose(self, module: nn.Module, *names: str, blocks: int) -> None:
        def rows(x: Tensor) -> Tensor:
            width = x.shape[0] // blocks // self.size
            every = used_by_all(self.exchange, x).unflatten(0, (blocks, -1))
            return every.narrow(1, self.rank * width, width).flatten(0, 1)

        self.lay_out(module, dict.fromkeys(names, Replicate()), rows)

    def mean(self, x: Tensor) -> Tensor:
        return summed(self.exchange, x.mean(-1, keepdim=True)) / self.size

    def hold(self, root: nn.Module, by_heads: bool) -> None:
        """Hold whole what is not divided; `by_heads`: each process uses it for its own heads."""
        view = partial(used_by_all, self.exchange) if by_heads else _as_it_is
        for module in root.modules():
            own = [name for name, tensor in module._parameters.items() if _is_plain(tensor)]
            if own:
                self.lay_out(module, dict.fromkeys(own, Replicate()), view)

    def lay_out(self, module: nn.Module, placements: Mapping[str, Placement], view: View) -> None:
        """Make parameters or buffers DTensors, of which the module's own code sees `view` of this process's part."""
        members: dict[str, Any] = {name: self._entered(getattr(type(module), name)) for name in _entries(type(module))}
        for name, placement in placements.items():
            tensors: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            tensors[name] = self._divided(tensors[name], placement)
            members[name] = self._shown(name, view)
        _extend(module, members)

    def _divided(self, tensor: Tensor, placement: Placement) -> Tensor:
        if tensor not in self.divided:
            parts = distribute_tensor(tensor.detach(), self.mesh, [placement])
            is_parameter = isinstance(tensor, nn.Parameter)
            self.divided[tensor] = nn.Parameter(parts, tensor.requires_grad) if is_parameter else parts
        return self.divided[tensor]

    def _shown(self, name: str, view: View) -> property:
        def shown(module: nn.Module) -> Tensor:
            held: Any = (module._parameters if name in module._parameters else module._buffers)[name]
            return view(held.to_local()) if self.computing else held

        return property(shown)

    def _entered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def entered(*arguments: Any, **options: Any) -> Any:
            before, self.computing = self.computing, True
            try:
                return method(*arguments, **options)
            finally:
                self.computing = before

        return entered


def _entries(kind: type[nn.Module]) -> list[str]:
    """The methods by which others have a module compute."""
    if issubclass(kind, Mechanism):
        own = [name for name in ("forward",) if getattr(kind, name) is not getattr(Mechanism, name)]
        return ["resolve", "merge", "learned_alphas", "scale_parts", *own]
    if issubclass(kind, Position):
        return [name for name in ("embed", "rotate", "slopes") if getattr(kind, name) is not getattr(Position, name)]
    return ["forward"]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _extend(module: nn.Module, members: dict[str, Any]) -> None:
    """Give one module a class of its own."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), members)
