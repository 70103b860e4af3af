"""What is made of a model's weights, kept for as long as the model has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tamis.native import product

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """One thing per model and precision; made anew when weights have changed, gone with the model."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[object, Any]]] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module, precision: str, make: Callable[[], Made]) -> Made:
        kept = self._of.setdefault(model, {})
        now = fingerprint(model)
        if precision not in kept or kept[precision][0] != now:
            with torch.inference_mode():
                kept[precision] = now, make()
        made: Made = kept[precision][1]
        return made


def fingerprint(model: nn.Module) -> object:
    """What changes when weights do: their versions, and a sample of values for those changes that versions miss."""
    tensors = [*model.parameters(), *model.buffers()]
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors], versions, product.sample(tensors)
