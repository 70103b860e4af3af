"""Microseconds of the transforms of narrow rows on a GPU with other tiles: rows at a time, and warps.

    python benchmarks/row_tiles.py --output benchmarks/results/row-tiles-gpu.json

Replays of CUDA graphs, which leave the host out, and as an eager loop launches them.  Kernels take seconds to compile
and less to time: `--compile` only compiles, for a process beforehand.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis import functional
from tamis.bench.kernels import graph_time
from tamis.bench.timing import event_times, machine, save
from tamis.kernels.rows import launch
from tamis.kernels.runtime.launch import plans
from tamis.kernels.runtime.sizes import power_of_two

TILES: dict[tuple[int, int], list[tuple[int, int]]] = {
    (65536, 128): [(32, 4), (8, 1), (4, 1), (16, 2), (16, 4)],
    (65536, 512): [(8, 4), (2, 1), (2, 2), (1, 1)],
    (32768, 1024): [(4, 4), (1, 1), (2, 2), (1, 2)],
    (16384, 2048): [(2, 4), (1, 2), (1, 4)],
    (8192, 4096): [(1, 4), (1, 8), (1, 16)],
}
"""By shape: rows of a tile and its warps."""
Timed = tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/row_tiles.py needs a CUDA device")
    rows: list[dict[str, object]] = []
    for shape, tiles in TILES.items():
        for dtype in (torch.float32, torch.bfloat16):
            kinds, dense = calls(shape, dtype)
            dense_us = {name: measure(*call, options.compile) for name, call in dense.items()}
            for tile in tiles:
                launch.Rows.tile = functools.partialmethod(change, tile)  # type: ignore[assignment]
                plans.clear()
                us = {name: measure(*call, options.compile) for name, call in kinds.items()}
                label = {"width": shape[1], "rows": shape[0], "dtype": str(dtype), "tile": tile}
                rows.append({**label, "us": us, "dense_us": dense_us})
                print(json.dumps(rows[-1]), flush=True)
                if options.output is not None and not options.compile:
                    record = {"benchmark": "row transforms: tiles of narrow rows", "machine": machine()}
                    save(options.output, {**record, "rows": rows})


def change(rows: launch.Rows, tile: tuple[int, int], width: int) -> tuple[int, int, int]:
    """In place of `Rows.tile`."""
    return math.gcd(tile[0], rows.group), power_of_two(width), tile[1]


def calls(shape: tuple[int, int], dtype: torch.dtype) -> tuple[dict[str, Timed], dict[str, Timed]]:
    torch.manual_seed(0)
    z = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    g, target = torch.randn_like(z), torch.randint(shape[1], shape[:1], device="cuda")
    alpha = torch.tensor(1.5, device="cuda", requires_grad=True)
    ours: dict[str, Timed] = {
        "alpha 1.5": (lambda: functional.entmax(z, 1.5), (z,), g),
        "alpha 1.3": (lambda: functional.entmax(z, 1.3), (z,), g),
        "learned": (lambda: functional.entmax(z, alpha), (z, alpha), g),
        "loss": (lambda: functional.entmax_loss(z, target, 1.5), (z,), None),
    }
    dense: dict[str, Timed] = {
        "softmax": (lambda: z.softmax(-1), (z,), g),
        "cross entropy": (lambda: F.cross_entropy(z, target), (z,), None),
    }
    return ours, dense


def measure(
    call: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor | None, only_compile: bool
) -> dict[str, float]:
    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(), leaves, grad)

    if only_compile:
        both()
        return {}
    with torch.no_grad():
        forward = graph_time(call)
    launched = {f"{name}_launched": event_times(x, 30)["median_us"] for name, x in (("forward", call), ("both", both))}
    return {"forward": forward, "both": graph_time(both), **launched}


if __name__ == "__main__":
    main()
