"""What a compiled kernel lost of what it should keep shows in its machine code."""

import pytest

pytest.importorskip("triton.backends.nvidia")
from tamis.kernels.runtime import machine_code

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
    assert len(list(machine_code.lost_operands(code))) == lost


def test_where_nothing_tells_kernels_count_as_spoilt(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert machine_code.is_spoilt(b"no machine code")  # nvdisasm refuses it
    monkeypatch.setattr(machine_code.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": "another format"}))
    assert machine_code.is_spoilt(b"nor this")
    monkeypatch.setattr(machine_code.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": TWO_LOOPS}))
    assert not machine_code.is_spoilt(b"this is fine")
    monkeypatch.setattr(machine_code, "_disassembled_is_spoilt", None)  # the verdict is in the cache
    machine_code.is_spoilt.cache_clear()
    assert not machine_code.is_spoilt(b"this is fine")
