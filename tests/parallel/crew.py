"""Four processes that share sequences, and what their attention differs by from that of one process.

``torchrun --nproc-per-node 4 crew.py OUT`` writes a JSON of relative errors by case; tests read it.  Each process
computes the whole by itself too, compares its own part, and the largest error of all processes counts.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tamis
from tamis.attention.call import Dropout, Part, check_call
from tamis.attention.rules import bind
from tamis.functional.backends import BACKENDS
from tamis.parallel import ContextParallel

HEADS, LENGTH, WIDTH = 4, 48, 8


@dataclass
class Case:
    """One call: its rule and structure, from whole tensors."""

    rule: Any = "entmax"
    options: dict[str, Any] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    """Options of which each process has its part: name of the option, along its last dimension."""
    key_heads: int = HEADS
    keys: int = LENGTH
    dropout: float = 0.0
    batch: int = 2


def packed(*starts: int) -> torch.Tensor:
    return torch.tensor([0, *starts, LENGTH])


SLOPES = torch.tensor([0.5, 0.25, 0.0, 0.0], dtype=torch.float64)
SPLIT = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
SHUFFLED = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
CASES = {
    "entmax": Case(),
    "entmax causal": Case(options={"is_causal": True}),
    "entmax per query": Case("rows", {"is_causal": True}),
    "entmax with slopes": Case(options={"is_causal": True, "alibi_slopes": SLOPES}),
    "entmax with slopes, full": Case(options={"alibi_slopes": SLOPES}),
    "entmax packed": Case(options={"is_causal": True, "cu_seqlens_q": packed(5, 6, 17, 30, 30)}, batch=1),
    "entmax packed, full": Case(options={"alibi_slopes": SLOPES, "cu_seqlens_q": packed(5, 6, 17, 30, 30)}, batch=1),
    "entmax packed, short": Case(options={"is_causal": True, "cu_seqlens_q": torch.tensor([0, 7, 31])}, batch=1),
    "entmax packed, two": Case(
        options={"is_causal": True, "cu_seqlens_q": packed(9, 20), "cu_seqlens_k": packed(4, 31)}, batch=1
    ),
    "entmax of groups": Case(options={"is_causal": True, "enable_gqa": True}, key_heads=2),
    "entmax of one key head": Case(options={"is_causal": True, "enable_gqa": True}, key_heads=1),
    "entmax in a window": Case(options={"window": (5, 3)}),
    "entmax in a causal window": Case(options={"window": 7, "is_causal": True}),
    "entmax of other keys": Case(options={"is_causal": True}, keys=64),
    "entmax masked keys": Case(options={"attn_mask": SPLIT[:, None, None]}, local=("attn_mask",)),
    "entmax masked keys of all": Case(options={"attn_mask": SPLIT[:, None, None], "is_causal": True}),
    "entmax biased": Case(options={"attn_mask": BIAS, "is_causal": True}),
    "entmax key lengths": Case(options={"key_lengths": torch.tensor([11, 40]), "is_causal": True}),
    "entmax positions": Case(
        options={"is_causal": True, "query_positions": SHUFFLED, "key_positions": SHUFFLED, "alibi_slopes": SLOPES},
        local=("query_positions", "key_positions"),
    ),
    "softmax": Case(tamis.Softmax()),
    "softmax causal": Case(tamis.Softmax(), {"is_causal": True}),
    "relu": Case(tamis.Activation()),
    "relu causal by count": Case(tamis.Activation(per_count=True), {"is_causal": True}),
    "softpick causal": Case(tamis.Softpick(), {"is_causal": True}),
    "entmax with dropout": Case(options={"is_causal": True}, dropout=0.3),
    "relu with dropout, packed": Case(
        tamis.Activation(), {"is_causal": True, "cu_seqlens_q": packed(5, 17)}, dropout=0.3, batch=1
    ),
    "softmax with dropout": Case(tamis.Softmax(), dropout=0.3),
}


def tensors(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What has a gradient."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "query": (case.batch, HEADS, LENGTH, WIDTH),
        "key": (case.batch, case.key_heads, case.keys, WIDTH),
        "value": (case.batch, case.key_heads, case.keys, WIDTH + 2),
    }
    made = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    if case.rule == "entmax":
        made["alpha"] = torch.tensor([1.05, 1.4, 1.5, 1.9], dtype=torch.float64)
    if case.rule == "rows":
        made["alpha"] = 1.1 + 0.8 * torch.rand(case.batch, 1, LENGTH, 1, generator=draw, dtype=torch.float64)
    for name in ("alibi_slopes", "attn_mask"):
        if (x := case.options.get(name)) is not None and x.is_floating_point():
            made[name] = x.clone()
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def call(case: Case, made: dict[str, torch.Tensor], options: dict[str, Any], **own: Any) -> torch.Tensor:
    """Attention of these tensors."""
    rule = tamis.Entmax(made["alpha"]) if "alpha" in made else case.rule
    options = options | {name: made[name] for name in ("alibi_slopes", "attn_mask") if name in made}
    return tamis.attention(made["query"], made["key"], made["value"], rule=rule, **options, **own)


def reference(case: Case, made: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """The whole call in this process; with dropout, as one part that is all of it."""
    if not case.dropout:
        return call(case, made, case.options, backend="reference")
    rule = tamis.Entmax(made["alpha"]) if "alpha" in made else case.rule
    checked = check_call(made["query"], made["key"], made["value"], **case.options)
    whole = type(checked)(**vars(checked) | {"dropout": Dropout(case.dropout, None, Part(seed))})
    blocked = next(backend for backend in BACKENDS if backend.name == "blocked")
    return blocked.attend(whole, bind(rule, whole))


def compare(case: Case, context: ContextParallel, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of this process's output and gradients."""
    whole, own = tensors(case, dtype), tensors(case, dtype)
    options = dict(case.options)
    for name in case.local:
        options[name] = context.take(options[name], -1)
    shares = dict(own)
    for name in ("query", "key", "value"):
        shares[name] = context.take(own[name], 2)
    for name, dim in (("alpha", 2), ("attn_mask", 2)):
        if name in own and own[name].ndim == 4:
            shares[name] = context.take(own[name], dim)
    options = {name: x for name, x in options.items() if name not in own}
    torch.manual_seed(7)
    with context:
        out = call(case, shares, options, dropout_p=case.dropout)
        torch.manual_seed(7)
        seed = int(torch.randint(2**62, ()).item())
        factor = torch.randn(case.batch, HEADS, LENGTH, WIDTH + 2, generator=torch.Generator().manual_seed(1))
        (out * context.take(factor.to(dtype), 2)).sum().backward()
    expected = reference(case, whole, seed)
    (expected * factor.to(dtype)).sum().backward()
    found = {"output": difference(context.join(out.detach(), 2), expected.detach())}
    found["bits"] = float(not torch.equal(context.join(out.detach(), 2), expected.detach()))
    for name, x in own.items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        found[name] = difference(context.exchange.total(grad), whole[name].grad)
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    four = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    two = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "context"))
    found: dict[str, dict[str, float]] = {}
    for size, mesh in ((world, four), (2, two)):
        for dtype in (torch.float32, torch.float64):
            for name, case in CASES.items():
                for way in ("heads", "keys"):
                    if way == "heads" and case.key_heads % size:
                        continue
                    errors = compare(case, ContextParallel(mesh, way), dtype)
                    names = list(errors)
                    values = torch.tensor([errors[key] for key in names], dtype=torch.float64)
                    dist.all_reduce(values, dist.ReduceOp.MAX)
                    key = f"{name}, {way}, {size} processes, {str(dtype).removeprefix('torch.')}"
                    found[key] = dict(zip(names, values.tolist(), strict=True))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
