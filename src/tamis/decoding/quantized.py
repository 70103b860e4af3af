"""Models whose linear layers multiply in int8 or bf16, on CPUs."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tamis.decoding.fingerprint import Kept
from tamis.models.causal_lm import CausalLM
from tamis.models.seq2seq import Seq2Seq
from tamis.native import product
from tamis.native.product import Packed
from tamis.settings import choose

PRECISIONS = ("int8", "bf16")
Model = TypeVar("Model", Seq2Seq, CausalLM)


class PackedLinear(nn.Module):
    """A linear layer for inference, whose weights are packed for the C++ kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str) -> None:
        super().__init__()
        self.packed = Packed(weight, bias, precision)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    def extra_repr(self) -> str:
        return f"in_features={self.packed.inputs}, out_features={self.packed.outputs}, {self.packed.precision}"


def check_quantize(quantize: str, model: nn.Module) -> None:
    """Raise unless models can be quantised so, here."""
    choose("quantize", quantize, PRECISIONS)
    if (reason := product.obstacle()) is not None:
        raise ValueError(f"quantize={quantize!r} needs the C++ kernels: {reason}")
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            found = f"{parameter.dtype} on {parameter.device}"
            raise ValueError(f"quantize={quantize!r} is for models in fp32 on the CPU, this one is {found}")


def quantized(model: Model, precision: str) -> Model:
    """A copy of a model with packed linear layers, the output layer too; that of an earlier call while weights stay."""
    made: Model = _KEPT.of(model, precision, lambda: _copy(model, precision))
    return made


_KEPT: Kept[Any] = Kept()


def _copy(model: Model, precision: str) -> Model:
    # What is replaced is not copied first.
    known = {id(linear.weight): linear.weight for linear in model.modules() if type(linear) is nn.Linear}
    made = copy.deepcopy(model, known)
    for module in list(made.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias, precision))
    if made.output is None:  # tied
        made.output = PackedLinear(made.embedding.weight, None, precision)  # type: ignore[assignment]
    return made.eval()
