"""`tamis bench parallel`: what a sequence costs that lies in several processes, and what a large model would need.

Measured: forward and backward of one attention layer, causal, against one process with as many threads as each of
several has; the bytes that each process sends; and a token decoded over keys in shards.  Every output is compared with
that of one process before anything is timed.

Computed, from the formulas of `tamis.parallel.cost` and nothing else: a training step of 128k tokens of a 7B model.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from tamis import functional
from tamis.attention.rules import Entmax
from tamis.bench.timing import machine, save
from tamis.parallel import ContextParallel, sharded_attention
from tamis.parallel.cost import Layer

HEADS, HEAD_DIM = 8, 64
KEY_HEADS = (8, 2)
SIZES = (1, 2, 4)
ALPHAS = (1.2, 1.5, 2.0)
"""Alphas of the decoded tokens."""
MODEL: dict[str, int] = {"layers": 32, "width": 4096, "heads": 32, "head_dim": 128, "parameters": 6_738_415_616}
"""The sizes of Llama 2 7B."""
LONG, COMPUTED_SIZES, COMPUTED_KEY_HEADS = 1 << 17, (1, 2, 4, 8, 16, 32), (32, 8)
TOLERANCE = 1e-5


def run(output: Path | None, *, length: int = 4096, repeats: int = 5) -> None:
    """One sequence of `length` tokens; on GPUs one process for each, else on CPUs with one thread each."""
    most = max(SIZES)
    if length < 2 * most or length % (2 * most) or repeats < 1:
        raise ValueError(f"length must be a multiple of {2 * most} and repeats at least 1, got {length} and {repeats}")
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus > 1 else "cpu"
    sizes = [size for size in SIZES if device == "cpu" or size <= gpus]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += _launched(size, device, length, repeats)
    large = computed()
    record = {
        "benchmark": "sequences shared by processes",
        "machine": machine(),
        "settings": {"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "repeats": repeats, "dtype": "fp32"},
        "measured": rows,
        "computed": {"model": MODEL, "length": LONG, "rows": large},
    }
    if output is not None:
        save(output / f"parallel-{'gpu' if device == 'cuda' else 'cpu'}.json", record)
    console = Console(width=120)
    console.print(_measured_table(rows, length, device))
    console.print(_computed_table(large))


def computed() -> list[dict[str, Any]]:
    """Bytes per device of a training step of a long sequence, by formula."""
    rows = []
    for key_heads in COMPUTED_KEY_HEADS:
        for size in COMPUTED_SIZES:
            layer = Layer(length=LONG, size=size, heads=MODEL["heads"], key_heads=key_heads, head_dim=MODEL["head_dim"])
            ways = {
                way: {"sent": MODEL["layers"] * layer.sent(way, True), "held": layer.held(way)}
                for way in ("heads", "keys")
                if way == "keys" or key_heads % size == 0
            }
            rows.append(
                {
                    "key_heads": key_heads,
                    "processes": size,
                    # bf16 weights and gradients; fp32 weights and two moments: 16 bytes, sharded over all
                    "state": 16 * MODEL["parameters"] // size,
                    # one input of each layer in bf16, all else computed anew
                    "activations": 2 * MODEL["layers"] * MODEL["width"] * (LONG // size),
                    # scores and outputs, twice that in the backward pass, half of the keys seen
                    "attention_flops": 3 * MODEL["layers"] * 2 * MODEL["width"] * LONG**2 // size,
                    "ways": ways,
                    "auto": layer.cheaper(True),
                }
            )
    return rows


def _launched(size: int, device: str, length: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_work, (size, device, length, repeats, folder), nprocs=size, start_method="spawn")
        found: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
        return found


def _work(rank: int, size: int, device: str, length: int, repeats: int, folder: str) -> None:
    """One process of several."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/rendezvous", world_size=size, rank=rank)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("context",))
    rows = []
    for key_heads in KEY_HEADS:
        for way in ("heads", "keys") if size > 1 else ("keys",):
            if way == "keys" or key_heads % size == 0:
                rows.append(_layer_row(ContextParallel(mesh, way), key_heads, length, repeats, device))
    for alpha in ALPHAS:
        rows.append(_decode_row(ContextParallel(mesh), alpha, length, repeats, device))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _tensors(key_heads: int, queries: int, length: int, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, queries), (key_heads, length), (key_heads, length)]
    return [torch.randn(1, *shape, HEAD_DIM, generator=draw).to(device) for shape in shapes]


def _layer_row(context: ContextParallel, key_heads: int, length: int, repeats: int, device: str) -> dict[str, Any]:
    whole = _tensors(key_heads, length, length, device)
    query, key, value = (context.take(x, 2).requires_grad_() for x in whole)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "rule": Entmax(1.5)}

    def step() -> Tensor:
        with context:
            out = functional.attention(query, key, value, **options)
            out.sum().backward()
        return out.detach()

    _check(context.join(step(), 2), functional.attention(whole[0], whole[1], whole[2], **options))
    before = context.exchange.sent
    step()
    sent = context.exchange.sent - before
    layer = Layer(length=length, size=context.layout.size, heads=HEADS, key_heads=key_heads, head_dim=HEAD_DIM, bytes=4)
    return {
        "what": "layer",
        "way": context.context if context.layout.size > 1 else "whole",
        "processes": context.layout.size,
        "key_heads": key_heads,
        "sent": sent,
        "formula": layer.sent(context.context, True),
        "seconds": _seconds(step, repeats, device),
    }


def _decode_row(context: ContextParallel, alpha: float, length: int, repeats: int, device: str) -> dict[str, Any]:
    query, key, value = _tensors(KEY_HEADS[-1], 1, length, device)
    size, rank = context.layout.size, context.layout.rank
    own_key, own_value = (x.chunk(size, 2)[rank] for x in (key, value))
    exchange = context.exchange

    def step() -> Tensor:
        return sharded_attention(query, [own_key], [own_value], enable_gqa=True, rule=Entmax(alpha), mesh=exchange)

    _check(step(), functional.attention(query, key, value, enable_gqa=True, rule=Entmax(alpha)))
    before = exchange.sent
    step()
    return {
        "what": "decode",
        "way": "shards" if size > 1 else "whole",
        "processes": size,
        "alpha": alpha,
        "sent": exchange.sent - before,
        "gathered": (key.numel() + value.numel()) * key.element_size() // size * (size - 1),
        "seconds": _seconds(step, repeats, device),
    }


def _check(out: Tensor, expected: Tensor) -> None:
    """Nothing that is wrong is timed."""
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"the output differs from that of one process by {error:.1e}")


def _seconds(step: Any, repeats: int, device: str) -> float:
    """The least of some, each from when all processes are ready until all are done."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - began)
    return min(times)


def _measured_table(rows: list[dict[str, Any]], length: int, device: str) -> Table:
    table = Table(title=f"measured: {length:,} tokens, {HEADS} heads of {HEAD_DIM}, on {device}, one thread a process")
    for column in ("what", "way", "processes", "ms", "time / one process", "MB sent by each"):
        table.add_column(column, justify="left" if column in ("what", "way") else "right")
    alone = {_kind(row): row["seconds"] for row in rows if row["processes"] == 1}
    for row in rows:
        ratio = row["seconds"] / alone[_kind(row)]
        cells = (row["way"], str(row["processes"]), f"{row['seconds'] * 1e3:.1f}", f"{ratio:.2f}")
        table.add_row(_kind(row), *cells, f"{row['sent'] / 1e6:.3f}")
    return table


def _kind(row: dict[str, Any]) -> str:
    if row["what"] == "layer":
        return f"layer, {row['key_heads']} key heads"
    return f"decode, alpha {row['alpha']:g}"


def _computed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"COMPUTED, not measured: a step of {LONG:,} tokens of a 7B model, GB per device")
    for column in ("key heads", "processes", "weights, optimiser", "layer inputs", "sent, heads", "sent, keys",
                   "q k v out, heads", "q k v out, keys", "auto"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[name] / 1e9:.1f}" for name in ("state", "activations")]
        for name in ("sent", "held"):
            cells += [f"{row['ways'][way][name] / 1e9:.2f}" if way in row["ways"] else "-" for way in ("heads", "keys")]
        table.add_row(str(row["key_heads"]), str(row["processes"]), *cells, row["auto"])
    return table
