"""Microseconds that each kernel of long rows takes on a GPU with other tiles, warps, stages and registers.

    python benchmarks/tiles.py variants.json --output benchmarks/results/kernels-long-tiles-gpu.json

variants.json is a list such as [{}, {"dims": [64], "tiles": {"scan_tiles": {"stages": 2, "registers": null}}}]: what a
function of tamis.kernels.attention.tuning gives is changed so, at these head sizes.  Kernels take seconds to compile
and less to time: `--shard 3/8` only compiles every eighth variant from the third on, for eight processes at once
beforehand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tamis.bench import long
from tamis.bench.relu import ReluInputs
from tamis.bench.timing import kernel_times, machine, save
from tamis.kernels.attention import tuning
from tamis.kernels.runtime.launch import plans

KERNELS = ("scan", "forward", "backward_queries", "backward_keys")
DEFAULTS = {
    name: getattr(tuning, name) for name in ("scan_tiles", "listed_tiles", "pass_tiles", "query_tiles", "key_tiles")
}
LENGTH = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shard")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/tiles.py needs a CUDA device")
    variants = json.loads(options.variants.read_text())
    if options.shard is not None:
        first, step = map(int, options.shard.split("/"))
        variants = variants[first::step]
    rows: list[dict[str, Any]] = []
    for dim in (64, 128):
        kinds = {
            f"topics {topics}": (long.Inputs(long.Case(LENGTH, dim, True, topics)), "alpha 1.5") for topics in (20, 2)
        }
        kinds["learned alpha, topics 2"] = (kinds["topics 2"][0], "learned alpha")
        kinds["relu, topics 2"] = (ReluInputs(long.Case(LENGTH, dim, True, 2)), "relu")
        for variant in variants:
            if dim not in variant.get("dims", (64, 128)):
                continue
            change(variant.get("tiles", {}))
            times = {name: measure(inputs, rule, options.shard is None) for name, (inputs, rule) in kinds.items()}
            rows.append({"dim": dim, "variant": variant, "us": times})
            print(json.dumps(rows[-1]), flush=True)
            if options.output is not None:
                save(options.output, {"benchmark": "kernels, long rows: tiles", "machine": machine(), "rows": rows})


def change(tiles: dict[str, dict[str, Any]]) -> None:
    """Have functions of `tuning` give other tiles."""
    unknown = tiles.keys() - DEFAULTS.keys()
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: variants may change {', '.join(DEFAULTS)}")
    for name, default in DEFAULTS.items():
        changes = tiles.get(name, {})
        setattr(tuning, name, lambda a, default=default, changes=changes: default(a)._replace(**changes))
    plans.clear()


def measure(inputs: long.Inputs, rule: str, timed: bool) -> dict[str, int]:
    leaves = (inputs.query, inputs.key, inputs.value, *((inputs.alphas,) if rule == "learned alpha" else ()))

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(inputs._ours(rule), leaves, inputs.grad)

    if not timed:
        both()
        return {}
    return {name: round(us) for name, us in kernel_times(both, 3).items() if name in KERNELS}


if __name__ == "__main__":
    main()
