"""The kernels compiled for an H100 without one: no crash of a compiler, and no reduction that it gets wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
SCRIPT = Path(__file__).with_name("offline.py")


def compiled(*arguments, cache):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("part", "first", "step"),
    [
        ("rows", 0, 8),
        ("norm", 0, 3),
        ("decode", 0, 6),
        ("long", 9, 40),  # the ninth crashed ptxas
        *(pytest.param(part, first, 4, marks=pytest.mark.slow) for part in ("short", "long") for first in range(4)),
        *(pytest.param(part, 0, 1, marks=pytest.mark.slow) for part in ("rows", "paged", "decode", "norm")),
    ],
)
def test_kernels_compile(part, first, step, tmp_path):
    run = compiled(part, first, step, cache=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout.split()[-2]) > 0


def test_reductions_over_scattered_lanes_are_found():
    from kernels.offline import scattered

    lanes = "[[0, 4], [0, 8], [1, 0], [2, 0], [0, 16]]"
    layouts = f"#linear = #ttg.linear<{{register = [[0, 1]], lane = {lanes}, warp = []}}>\n"
    reduction = """%1 = "tt.reduce"(%0) <{axis = AXIS : i32}> ({
    ^bb0(%a: i32, %b: i32):
      tt.reduce.return %c : i32
    }) : (tensor<4x256xi32, #linear>) -> tensor<256xi32>"""
    assert scattered(layouts + reduction.replace("AXIS", "0")) == []
    assert len(scattered(layouts + reduction.replace("AXIS", "1"))) == 1
    sliced = reduction.replace("4x256xi32, #linear", "256xi32, #ttg.slice<{dim = 0, parent = #linear}>")
    assert len(scattered(layouts + sliced.replace("AXIS", "0"))) == 1
