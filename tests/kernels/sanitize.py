"""Every kernel once or more on odd sizes, to be watched by compute-sanitizer (`make sanitize`); parts by name.

A script rather than a test: the sanitizer is slow to start and watches all children, the compilers and workers of a
test run among them.  What the kernels compute is checked by the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import tamis
from kernels.cases import FACTORS, Problem, covering, decoded, describe, fused
from kernels.decode import paged_cases
from tamis.kernels.attention import arguments
from tamis.kernels.decode import launch
from tamis.kernels.runtime.launch import plans

LONGER: dict[str, tuple[Any, ...]] = {**FACTORS, "lengths": ((300, 300), (1, 900), (200, 1100), (700, 130))}
LONGER["structure"] = ("full", "causal", "window", "causal alibi", "positions")
FEW: dict[str, tuple[Any, ...]] = {**FACTORS, "lengths": ((1, 50), (3, 900), (16, 1100)), "dropout": (0.0,)}
FEW["groups"] = (1, 2, 4)
FEW["structure"] = ("full", "causal", "window", "causal alibi")


def short() -> None:
    for case in covering(FACTORS)[:20]:
        print("short", describe(case), flush=True)
        fused(Problem(case, torch.bfloat16, "cuda"))


def long() -> None:
    arguments.LONG = 1
    plans.clear()
    for case in covering(LONGER)[:16]:
        print("long", describe(case), flush=True)
        fused(Problem(case, torch.bfloat16, "cuda"))


def decode() -> None:
    arguments.MANY = 1
    launch.SPANS = (64, 256)
    plans.clear()
    for case in covering(FEW)[:12]:
        print("decode", describe(case), flush=True)
        decoded(Problem(case, torch.bfloat16, "cuda"))
    for case in covering(paged_cases.FACTORS)[:6]:
        print("paged", describe(case), flush=True)
        paged_cases.Paged(case, torch.bfloat16, "cuda").run()


def rows() -> None:
    for width in (1, 100, 5001, 40000):
        for alpha in (1.5, 1.3, 2.0, torch.linspace(1.0, 3.0, 5, device="cuda").unsqueeze(-1).requires_grad_()):
            print("rows", width, "learned" if isinstance(alpha, torch.Tensor) else alpha, flush=True)
            scores = torch.randn(5, width, device="cuda", requires_grad=True)
            tamis.entmax(scores, alpha, backend="triton").square().sum().backward()
            target = torch.arange(5, device="cuda") % width
            tamis.entmax_loss(scores, target, 1.5, backend="triton").sum().backward()


PARTS = {part.__name__: part for part in (short, long, decode, rows)}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    torch.cuda.synchronize()
    print("done")
