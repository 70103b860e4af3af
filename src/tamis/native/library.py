"""Which build of the C++ kernels runs on this machine, and why none does if that is so.

The environment variable TAMIS_NATIVE chooses: "0" none; "v4", "v3", "baseline" or "generic" that one and no other;
"require" the best, or an error at the first call that there is none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from tamis.native import arguments

FOLDER = Path(__file__).parent
VARIABLE = "TAMIS_NATIVE"

NAMES = {4: "v4", 3: "v3", 1: "baseline", 0: "generic"}
"""Builds by the level of x86-64 that they need; the last is for other processors.  setup.py makes them."""

_ROWS = [c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int32]  # z, dtype, stride, rows, width, e, shared
_NORM = [c_int64, c_int64, c_void_p, c_void_p, c_double]  # rows, width, gain, gate, epsilon
_LOSS = [*_ROWS, c_void_p, c_void_p, c_int64, c_double]  # and target, weight, ignored, smoothing
SIGNATURES = {
    "tamis_forward": [*_ROWS, c_void_p, c_void_p],
    "tamis_backward": [c_void_p, c_void_p, c_void_p, c_int64, *_ROWS[1:2], *_ROWS[3:], c_void_p, c_void_p],
    "tamis_loss_forward": [*_LOSS, c_void_p, c_void_p, c_int32],
    "tamis_loss_backward": [*_LOSS, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    "tamis_rela_norm_forward": [c_void_p, *_NORM, c_void_p],
    "tamis_rela_norm_backward": [c_void_p, c_void_p, *_NORM, c_void_p, c_void_p, c_void_p],
    **arguments.SIGNATURES,
}
"""Signatures of the functions in cpp/rows.cpp, cpp/loss.cpp and cpp/rela_norm.cpp, and those of attention."""


@dataclass(frozen=True)
class Status:
    """Whether the C++ kernels run here."""

    loaded: str | None
    """The build in use: "v4", "v3", "baseline" or "generic"; None for plain torch."""
    reason: str
    """Why this one, or why none."""
    built: tuple[str, ...]
    """The builds that were installed."""

    def __str__(self) -> str:
        return f"{self.loaded or 'not loaded'}: {self.reason}"


def status() -> Status:
    """Say which build of the C++ kernels was loaded, or why none was.

    Returns:
        the build, or the reason.
    """
    try:
        return _load()[1]
    except RuntimeError as error:
        return Status(None, str(error), _built())


def load() -> ctypes.CDLL | None:
    """The library for this CPU, or None where plain torch is to do the work."""
    return _load()[0]


def missing() -> str | None:
    """Why nothing was loaded, or None.  Raises where TAMIS_NATIVE insists."""
    library, found = _load()
    return found.reason if library is None else None


# What torch.compiler.assume_constant_result does; calling that would import the compiler, half the time of an import.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, Status]:
    wanted, built = os.environ.get(VARIABLE, "1"), _built()
    if wanted not in ("0", "1", "require", *NAMES.values()):
        known = ", ".join(("0", "1", "require", *NAMES.values()))
        raise RuntimeError(f"{VARIABLE} must be one of {known}, got {wanted!r}")
    if wanted == "0":
        return None, Status(None, f"{VARIABLE}=0", built)
    insists = wanted != "1"
    try:
        name, library = _open(wanted if wanted in NAMES.values() else None, built)
    except _UnavailableError as error:
        if insists:
            raise RuntimeError(f"{VARIABLE}={wanted}, but no C++ kernels can run: {error}") from error
        return None, Status(None, str(error), built)
    reason = f"{VARIABLE}={wanted}" if wanted in NAMES.values() else f"the best for this {platform.machine()} CPU"
    return library, Status(name, reason, built)


class _UnavailableError(Exception):
    """Why a library cannot be used."""


def _path(name: str) -> Path:
    return FOLDER / f"libtamis_{name}.so"


def _built() -> tuple[str, ...]:
    return tuple(name for name in NAMES.values() if _path(name).is_file())


def _open(wanted: str | None, built: tuple[str, ...]) -> tuple[str, ctypes.CDLL]:
    """The build that is wanted, or the best of those that run here."""
    if not built:
        raise _UnavailableError("none were built: there was no C++ compiler when tamis was installed, or it failed")
    threads = _threads_of_torch()
    level = _level(built)
    fitting = [name for needed, name in NAMES.items() if name in built and needed <= level]
    if wanted is None and not fitting:
        raise _UnavailableError(f"this CPU can run none of those that were built ({', '.join(built)})")
    name = fitting[0] if wanted is None else wanted
    if name not in built:
        raise _UnavailableError(f"{name} was not built; there is {', '.join(built)}")
    if name not in fitting:
        raise _UnavailableError(f"this CPU lacks what {name} needs")
    library = _dlopen(_path(name))
    for function, types in SIGNATURES.items():
        getattr(library, function).argtypes = types
    library.tamis_use_threads_of.argtypes = [c_void_p]
    library.tamis_use_threads_of(threads)
    return name, library


def _level(built: tuple[str, ...]) -> int:
    """The highest level of x86-64 that this CPU has all of.  The plainest build is asked: it runs anywhere."""
    return int(_dlopen(_path(built[-1])).tamis_level())


def _threads_of_torch() -> c_void_p:
    """torch's own loop over threads, which its library exports for C."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"):
        if path.is_file():
            try:
                return ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, c_void_p)
            except AttributeError:
                break
    raise _UnavailableError(f"torch {torch.__version__} does not export torch_parallel_for; 2.11 and later do")


def _dlopen(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _UnavailableError(f"{path.name} cannot be loaded: {error}") from error
