"""Which build is loaded, or why none is, for every value of TAMIS_NATIVE."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tamis
from tamis.native import library, status

BUILT = library._built()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was loaded is forgotten, before and after."""
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def test_status_is_reachable_from_the_package():
    assert tamis.native.status() == status()
    assert tamis.native.Status is library.Status


@pytest.mark.skipif(not BUILT, reason="no C++ kernels were built")
def test_require_is_met_where_a_build_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAMIS_NATIVE", "require")
    found = status()
    assert found.loaded in BUILT
    assert "the best for this" in found.reason
    assert str(found) == f"{found.loaded}: {found.reason}"
    for value in ("1", None):
        library._load.cache_clear()
        monkeypatch.delenv("TAMIS_NATIVE") if value is None else monkeypatch.setenv("TAMIS_NATIVE", value)
        assert status().loaded == found.loaded


def test_zero_turns_it_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAMIS_NATIVE", "0")
    assert status() == library.Status(None, "TAMIS_NATIVE=0", BUILT)
    z = torch.randn(3, 9)
    assert torch.equal(tamis.entmax(z, 1.5), tamis.entmax(z, 1.5, backend="reference"))
    with pytest.raises(RuntimeError, match=r"no C\+\+ kernels were loaded \(TAMIS_NATIVE=0\)"):
        tamis.entmax(z, 1.5, backend="native")


@pytest.mark.parametrize("name", library.NAMES.values())
def test_a_name_forces_that_build_or_fails(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAMIS_NATIVE", name)
    best = library._level(BUILT) if BUILT else -1
    needed = next(level for level, build in library.NAMES.items() if build == name)
    if name in BUILT and needed <= best:
        assert status() == library.Status(name, f"TAMIS_NATIVE={name}", BUILT)
        weights = tamis.entmax(torch.randn(5, 200), 1.3, backend="native")
        torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    else:
        assert status().loaded is None
        with pytest.raises(RuntimeError, match=f"TAMIS_NATIVE={name}, but no C"):
            library.load()


def test_an_unknown_value_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAMIS_NATIVE", "v5")
    with pytest.raises(RuntimeError, match="TAMIS_NATIVE must be one of 0, 1, require, v4, v3, baseline, generic"):
        tamis.entmax(torch.randn(3, 9), 1.5)


def test_without_a_build_plain_torch_works_and_require_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("TAMIS_NATIVE", "1")
    assert status().loaded is None
    assert "no C++ compiler" in status().reason
    assert tamis.entmax(torch.randn(3, 9), 1.5).sum(-1).allclose(torch.ones(3))
    library._load.cache_clear()
    monkeypatch.setenv("TAMIS_NATIVE", "require")
    with pytest.raises(RuntimeError, match="TAMIS_NATIVE=require, but no C"):
        tamis.entmax(torch.randn(3, 9), 1.5)


@pytest.mark.skipif(not BUILT, reason="no C++ kernels were built")
def test_what_stands_in_the_way_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TAMIS_NATIVE", "1")
    monkeypatch.setattr(library, "_level", lambda built: -1)
    assert "this CPU can run none of those that were built" in status().reason
    library._load.cache_clear()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert "does not export torch_parallel_for" in status().reason
    library._load.cache_clear()
    (tmp_path / "libtamis_baseline.so").write_text("no library")
    monkeypatch.undo()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("TAMIS_NATIVE", "1")
    assert "libtamis_baseline.so cannot be loaded" in status().reason


@pytest.mark.skipif(not BUILT, reason="no C++ kernels were built")
def test_libraries_need_neither_torch_nor_python_nor_threads_of_their_own():
    for name in BUILT:
        ctypes.CDLL(str(library._path(name)))  # with nothing resolved but what the system has
        needed = subprocess.run(["ldd", library._path(name)], capture_output=True, text=True).stdout
        assert not any(word in needed for word in ("torch", "python", "gomp", "omp"))


def test_importing_tamis_loads_no_library():
    code = "import tamis; print(tamis.native.library._load.cache_info().currsize)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"
