"""Tamis: Transformers whose attention puts exact zeros on what does not matter.

Nothing but the version is here until it is asked for: `tamis --help` need not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tamis.version import __version__ as __version__

if TYPE_CHECKING:
    from tamis.library import *  # noqa: F403
    from tamis.library import __all__ as __all__


class _Package(ModuleType):
    """The package, whose names are those of `tamis.library`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'tamis' has no attribute {name!r}")
        if name != "attention" and find_spec(f"tamis.{name}") is not None:
            return import_module(f"tamis.{name}")  # before the library: what it consists of imports each other
        library = import_module("tamis.library")
        # All at once: what looks into modules, as torch.compile does, finds them as if they had always been there.
        self.__dict__.update({known: getattr(library, known) for known in (*library.__all__, "__all__")})
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module 'tamis' has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        # `tamis.attention` is the function; what the package of that name holds is imported from its modules.
        if name != "attention" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *import_module("tamis.library").__all__})


sys.modules[__name__].__class__ = _Package
