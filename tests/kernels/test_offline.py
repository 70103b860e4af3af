"""The kernels compiled for an H100 without one: no crash of a compiler, and no reduction that it gets wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


LOOP = """
        /*0000*/                   LDSM.16.M88.4 R88, [R10+UR13] ;  /* 0x... */
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR28], RZ, !UPT ;
        /*0020*/              @!P5 BRA `(.L_x_2) ;
        /*0030*/                   FFMA R120, R108, R28.reuse, R29.reuse ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R56, R120, gdesc[UR20].tnspB, R56 ;
.L_x_2:
        /*0050*/               @P3 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


TWO_LOOPS = """
        /*0000*/                   LDSM.16.M88.4 R88, [R10+UR13] ;
        /*0010*/              @!P5 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   MOV R120, R4 ;
        /*0030*/               @P3 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR28], RZ, !UPT ;
        /*0050*/               @P3 BRA `(.L_x_2) ;
        /*0060*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        (LOOP, 0),
        (LOOP.replace("R120", "R88"), 1),  # what ptxas 12.8 makes of some kernels
        (LOOP.replace("R120", "R91"), 1),
        (LOOP.replace("R120", "R92"), 0),
        (LOOP.replace("FFMA R120", "LDS.128 R88"), 1),
        (LOOP.replace("FFMA R120", "@P1 MOV R88"), 1),
        (LOOP.replace("R120", "R88").replace("@P3 BRA `(.L_x_1)", "NOP"), 0),  # no loop
        (LOOP.replace("R56, R120", "R60, R120"), 1),  # its sums are written over the operand of the other
        (LOOP.replace("FFMA R120", "LDSM.16.MT88.4 R86"), 1),
        (LOOP.replace("FFMA R120, R108", "FSETP.GT.AND P0, PT, R88, R108"), 0),
        (TWO_LOOPS, 0),
        (TWO_LOOPS.replace("MOV R120", "MOV R88"), 1),  # the first loses what the second uses
    ],
)
def test_operands_that_a_loop_loses_are_found(code, lost):
    from tamis.kernels.machine_code import lost_operands

    assert len(list(lost_operands(code))) == lost


def test_kernels_that_lose_operands_do_without_keeping_them(monkeypatch):
    from tamis.kernels import launch

    class Compiled:
        def __init__(self, constants):
            self.asm = {"cubin": constants}

        def __getitem__(self, grid):
            return lambda *arguments: ran.append((self.asm["cubin"], arguments))

    class Kernel(launch.triton.JITFunction):
        def __init__(self):
            self.fn = None

        def __hash__(self):
            return id(self)

        def warmup(self, *arguments, grid):
            return Compiled(arguments)

    ran = []
    monkeypatch.setattr(launch, "is_spoilt", lambda cubin: cubin == ("held", "a"))
    for constants, plain in ((("held", "a"), ("plain",)), (("held", "b"), ("plain",)), (("other",), None)):
        kernel, own = Kernel(), plain if constants == ("held", "a") else constants
        for programs in (1, 2):  # the second finds what the first compiled
            run = launch.Launch(kernel, programs, constants, {}, plain)
            for _ in range(2):
                run(torch.device("cpu"), ())
        assert ran == [(own, own)] * 4
        ran.clear()


def test_where_nothing_tells_kernels_count_as_spoilt(monkeypatch, tmp_path):
    from tamis.kernels import machine_code

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert machine_code.is_spoilt(b"no machine code")  # nvdisasm refuses it
    monkeypatch.setattr(machine_code.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": "another format"}))
    assert machine_code.is_spoilt(b"nor this")
    monkeypatch.setattr(machine_code.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": TWO_LOOPS}))
    assert not machine_code.is_spoilt(b"this is fine")
    monkeypatch.setattr(machine_code, "_disassembled_is_spoilt", None)  # the verdict is in the cache
    machine_code.is_spoilt.cache_clear()
    assert not machine_code.is_spoilt(b"this is fine")


def test_other_gpus_take_tiles_that_fit_them(monkeypatch):
    from tamis.kernels import launch
    from tamis.kernels.arguments import Arguments

    x = torch.empty(1, 1, 2048, 128, dtype=torch.bfloat16)
    a = Arguments._make([x, x, x, *[None] * 10, "squares", 0.5, 0.0, 0.1, -1, 0, 0.0, False])
    assert launch.query_tiles(a).stages == 3
    monkeypatch.setattr(launch, "_is_hopper", lambda device: False)
    for tiles in (launch.query_tiles(a), launch.key_tiles(a), launch.listed_tiles(a)):  # 99 KiB of shared memory
        assert (tiles.rows, tiles.stages, tiles.held) == (64, 2, 0)
    assert launch.scan_tiles(a).held == 0
