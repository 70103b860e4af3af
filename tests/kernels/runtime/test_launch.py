"""Kernels are compiled once, and again without what their machine code would lose."""

import pytest
import torch

pytest.importorskip("triton")
from tamis.kernels.runtime import launch


def test_kernels_that_lose_operands_do_without_keeping_them(monkeypatch):
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
