"""The losses of `tamis.functional` as modules with the arguments of `nn.CrossEntropyLoss`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tamis import functional
from tamis.nn.transforms import Parameter, Parametrised


class _FenchelYoungLoss(Parametrised):
    weight: Tensor | None
    loss: Callable[..., Tensor]

    def __init__(
        self,
        alpha: Parameter,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> None:
        super().__init__("alpha", alpha)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return type(self).loss(
            input,
            target,
            self.value(),
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        return self.describe(
            ignore_index=self.ignore_index, reduction=self.reduction, label_smoothing=self.label_smoothing
        )


class EntmaxLoss(_FenchelYoungLoss):
    """:func:`tamis.entmax_loss` as a module."""

    loss = staticmethod(functional.entmax_loss)

    def __init__(
        self,
        alpha: Parameter = 1.5,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(alpha, weight, ignore_index, reduction, label_smoothing)


class SparsemaxLoss(EntmaxLoss):
    """:func:`tamis.sparsemax_loss` as a module."""

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        _FenchelYoungLoss.__init__(self, 2.0, weight, ignore_index, reduction, label_smoothing)


class NormmaxLoss(_FenchelYoungLoss):
    """:func:`tamis.normmax_loss` as a module."""

    loss = staticmethod(functional.normmax_loss)

    def __init__(
        self,
        alpha: Parameter = 2.0,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(alpha, weight, ignore_index, reduction, label_smoothing)
