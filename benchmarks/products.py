"""Products of a few rows with weights that come from memory: by the C++ kernels, F.linear, and oneDNN's own packing.

    python benchmarks/products.py benchmarks/results

oneDNN's packed weights are reached through operations of torch that are not public: what decided against them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.bench.timing import alternate, machine, save
from tamis.native.product import Packed

SHAPES = ((512, 512), (512, 2048), (2048, 512), (512, 16000), (256, 256), (256, 1024), (256, 16000))
"""Inputs and outputs."""
ROWS = (1, 5, 80, 320)
MEMORY = 60e6
"""Bytes of weights that are gone through, so that none are in a cache."""


def layers(inputs: int, outputs: int, copies: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Each way, with so many weights of its own."""
    weights = [torch.randn(outputs, inputs) * inputs**-0.5 for _ in range(copies)]
    bias = torch.randn(outputs)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
    return {
        "linear": [lambda x, w=w: F.linear(x, w, bias) for w in weights],
        "onednn": [lambda x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "") for w in packed],
        **{name: [Packed(w, bias, name) for w in weights] for name in ("fp32", "bf16", "int8")},
    }


def main(folder: Path) -> None:
    torch.set_num_threads(2)
    rows = []
    for inputs, outputs in SHAPES:
        copies = max(2, int(MEMORY / (4 * inputs * outputs)))
        ways = layers(inputs, outputs, copies)
        for count in ROWS:
            x = torch.randn(count, inputs)
            calls = {name: lambda own=own, x=x: [layer(x) for layer in own] for name, own in ways.items()}
            times = alternate(calls, 8 if count < 80 else 3)
            each = {name: round(time["min_ms"] * 1e3 / copies, 1) for name, time in times.items()}
            rows.append({"inputs": inputs, "outputs": outputs, "rows": count, "us": each})
            print(rows[-1], flush=True)
    save(folder / "products-cpu.json", {"benchmark": "products", "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
