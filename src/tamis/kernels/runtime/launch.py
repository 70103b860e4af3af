"""Compiling and launching kernels: once for all calls of a kind, planned once for all calls of a layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.kernels.runtime.machine_code import is_spoilt


class Launch:
    """A kernel with its grid and constants.  Once compiled it is called directly, for all arguments of one kind.

    Args:
        plain: the constants that do without operands kept in registers, where `constants` have some.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: tuple[Any, ...],
        options: Mapping[str, int | None],
        plain: tuple[Any, ...] | None = None,
    ) -> None:
        self._kernel, self._grid, self._constants, self._options = kernel, (programs, 1, 1), constants, options
        self._plain = plain
        self._run: Callable[..., object] | None = None

    def __call__(self, device: torch.device, arguments: tuple[Any, ...]) -> None:
        if self._run is None:
            # With a kernel that was compiled for another grid, or by way of Triton, which looks at every argument.
            kind = (self._kernel, device, self._constants, *self._options.values(), *map(_kind, arguments))
            if kind not in _compiled:
                _compiled[kind] = self._compile(arguments)
            compiled, self._constants = _compiled[kind]
            self._run = compiled[self._grid]
        self._run(*arguments, *self._constants)

    def _compile(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The compiled kernel and its constants; in the interpreter, the kernel itself."""
        if not isinstance(self._kernel, triton.JITFunction):
            return self._kernel, self._constants
        compiled = self._kernel.warmup(*arguments, *self._constants, grid=self._grid, **self._options)
        if self._plain is None or not is_spoilt(compiled.asm["cubin"]):
            return compiled, self._constants
        return self._kernel.warmup(*arguments, *self._plain, grid=self._grid, **self._options), self._plain


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _kind(x: Any) -> Any:
    """What Triton compiles a kernel for: types, which pointers and numbers are multiples of 16, which numbers are 1."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return x.value if isinstance(x, tl.constexpr) else type(x)


plans: dict[Any, Any] = {}
Planned = TypeVar("Planned")
MOST_PLANS = 4096


def planned(key: Any, make: Callable[[], Planned]) -> Planned:
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plan = plans[key] = make()
    return plan


def layouts(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]


# A launch has a dozen, and 1 and True are not the same constant.
constant = functools.lru_cache(maxsize=None, typed=True)(tl.constexpr)
