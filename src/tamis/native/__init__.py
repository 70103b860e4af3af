"""Kernels for CPUs, in C++: exact sparse rows that are faster than dense ones.

`cpp/` holds the sources, built once for each instruction set when the package is installed; `library` loads the one
that this CPU has; `rows` calls it.  Without a compiler, or with ``TAMIS_NATIVE=0``, everything runs in plain torch.
"""

from tamis.native.library import Status, status

__all__ = ["Status", "status"]
