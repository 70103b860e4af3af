"""The transforms of `tamis.functional` as modules."""

from __future__ import annotations

from torch import Tensor, nn

from tamis import functional

Parameter = float | Tensor | nn.Module
"""A number, a tensor (an `nn.Parameter` is learned), or a module such as `LearnedAlpha` that returns a tensor."""


class Parametrised(nn.Module):
    """A module with one parameter, kept as what it is: numbers stay numbers, tensors and modules are registered."""

    def __init__(self, name: str, value: Parameter) -> None:
        super().__init__()
        self.name = name
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)

    def value(self) -> float | Tensor:
        value: Parameter = getattr(self, self.name)
        return value() if isinstance(value, nn.Module) else value

    def describe(self, **rest: object) -> str:
        """Return for extra_repr: numbers as they are, tensors by their shape, modules not at all (they show
        themselves)."""
        value = getattr(self, self.name)
        if not isinstance(value, nn.Module):
            rest = {self.name: tuple(value.shape) if isinstance(value, Tensor) else value, **rest}
        return ", ".join(f"{name}={setting!r}" for name, setting in rest.items())


class _Transform(Parametrised):
    def __init__(self, name: str, value: Parameter, dim: int) -> None:
        super().__init__(name, value)
        self.dim = dim

    def extra_repr(self) -> str:
        return self.describe(dim=self.dim)


class Entmax(_Transform):
    """:func:`tamis.entmax` as a module; `alpha` may be a number, a tensor, an `nn.Parameter` or a `LearnedAlpha`."""

    def __init__(self, alpha: Parameter = 1.5, dim: int = -1) -> None:
        super().__init__("alpha", alpha, dim)

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return functional.entmax(input, self.value(), self.dim, mask=mask)


class Normmax(_Transform):
    """:func:`tamis.normmax` as a module."""

    def __init__(self, alpha: Parameter = 2.0, dim: int = -1) -> None:
        super().__init__("alpha", alpha, dim)

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return functional.normmax(input, self.value(), self.dim, mask=mask)


class Budgetmax(_Transform):
    """:func:`tamis.budgetmax` as a module."""

    def __init__(self, budget: Parameter = 2.0, dim: int = -1) -> None:
        super().__init__("budget", budget, dim)

    def forward(self, input: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return functional.budgetmax(input, self.value(), self.dim, mask=mask)


class Sparsemax(Entmax):
    """:func:`tamis.sparsemax` as a module."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(2.0, dim)


class Entmax15(Entmax):
    """:func:`tamis.entmax15` as a module."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(1.5, dim)
