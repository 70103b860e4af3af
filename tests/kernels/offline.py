"""Compiles kernels for an H100 on a machine without one, and looks at what came out: `offline.py PART [FIRST [STEP]]`.

The interpreter runs what the kernels say; this finds what the compilers make of it: errors and crashes of Triton and
ptxas, and reductions that Triton 3.6 gets wrong, see `scattered`.  What is wrong is printed, a line each.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import tamis
from kernels.cases import FACTORS, Problem, covering, decoded, describe, fused
from kernels.decode import paged_cases
from kernels.sanitize import FEW, LONGER
from tamis.kernels.attention import arguments
from tamis.kernels.attention import launch as attention_launch
from tamis.kernels.rela_norm.ops import rela_norm
from tamis.kernels.runtime import launch, support
from tamis.kernels.runtime.machine_code import is_spoilt
from tamis.mechanisms.rela import EPSILON, ReLANorm, plain_norm


class NoDevice:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def scattered(ttgir: str) -> list[str]:
    """Reductions over lanes that do not follow each other.

    A reshape can leave neighbours in lanes 0, 1, 2, 3, 16, 17, ...; Triton 3.6 adds up lanes 0 to 7 of these.
    """
    linear = {
        name: [[int(x) for x in base.split(",")] for base in re.findall(r"\[([\d, ]+)\]", lanes)]
        for name, lanes in re.findall(r"^(#\w+) = #ttg\.linear<\{.*?lane = \[(.*?)\], warp", ttgir, re.MULTILINE)
    }

    def bases(layout: str) -> list[list[int]]:
        cut = re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout)
        if cut is None:
            return linear.get(layout, [])  # lanes of all other layouts follow each other
        return [[x for dim, x in enumerate(base) if dim != int(cut[1])] for base in bases(cut[2])]

    found = []
    operation = r'"tt\.(?:reduce|scan)"\([^)]*\) <\{axis = (\d+).*?\}\) : \(tensor<[\dx]+x\w+, (.*?)>[,)]'
    for axis, layout in re.findall(operation, ttgir, re.DOTALL):
        lanes = [bit for bit, base in enumerate(bases(layout)) if base[int(axis)]]
        if lanes and lanes != list(range(lanes[0], lanes[-1] + 1)):
            found.append(f"a reduction over bits {lanes} of the lane, {layout}")
    return found


def short(case: dict[str, Any]) -> None:
    fused(Problem(case, torch.bfloat16))


def long(case: dict[str, Any]) -> None:
    arguments.LONG = 1
    fused(Problem(case, torch.bfloat16))


def decode(case: dict[str, Any]) -> None:
    arguments.MANY = 1
    decoded(Problem(case, torch.bfloat16))


def paged(case: dict[str, Any]) -> None:
    paged_cases.Paged(case, torch.bfloat16, "cpu").run(backend="triton")


def rows(case: dict[str, Any]) -> None:
    scores = torch.randn(5, case["width"], dtype=case["dtype"], requires_grad=True)
    alpha = torch.full((5, 1), 1.5, requires_grad=True) if case["alpha"] == "learned" else case["alpha"]
    tamis.entmax(scores, alpha, backend="triton").sum().backward()
    tamis.entmax_loss(scores, torch.zeros(5, dtype=torch.long), case["alpha_of_loss"], backend="triton").backward()


def norm(case: dict[str, Any]) -> None:
    norm = ReLANorm(case["width"], 8, case["variant"]).to(case["parameters"])
    z = torch.randn(40, case["width"], dtype=case["dtype"], requires_grad=True)
    rela_norm(z, norm.gain, norm.gate, EPSILON, plain_norm).sum().backward()


ROWS: dict[str, tuple[Any, ...]] = {
    "width": (100, 1000, 3000, 40000),
    "alpha": (1.5, 2.0, 1.3, 3.0, "learned"),
    "alpha_of_loss": (1.5, 2.0, 1.3),
    "dtype": (torch.float32, torch.bfloat16),
}
NORMS: dict[str, tuple[Any, ...]] = {
    "width": (24, 512, 1000, 8192),
    "variant": ("g", "i", "rms"),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "parameters": (torch.float32, torch.float64),
}
PARTS = {
    "short": (short, FACTORS),
    "long": (long, LONGER),
    "decode": (decode, FEW),
    "paged": (paged, paged_cases.FACTORS),
    "rows": (rows, ROWS),
    "norm": (norm, NORMS),
}


def main(part: str, first: int = 0, step: int = 1) -> None:
    problems: list[str] = []
    counted = 0

    def compile_only(self: launch.Launch, device: torch.device, values: tuple[Any, ...]) -> None:
        nonlocal counted
        counted += 1
        try:
            made, _ = self._compile(values)
            problems.extend(f"{self._kernel.__name__}: {each}" for each in scattered(made.asm["ttgir"]))
            if is_spoilt(made.asm["cubin"]):
                problems.append(f"{self._kernel.__name__}: an operand is lost in a loop")
        except Exception as error:
            problems.append(f"{self._kernel.__name__}: {type(error).__name__} {str(error).strip().splitlines()[:1]}")

    driver.set_active(NoDevice())
    launch.Launch.__call__ = compile_only  # type: ignore[method-assign]
    constants = attention_launch._constants
    attention_launch._constants = lambda a, tiles: constants(a, tiles) | {"FAST": a.query.dtype != torch.float32}
    support._machine = lambda device: None
    run, factors = PARTS[part]
    for case in covering(factors)[first::step]:
        before = len(problems)
        launch.plans.clear()
        run(case)
        for problem in problems[before:]:
            print(f"{part} {describe(case)}: {problem}", flush=True)
    print(f"{counted} kernels")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
