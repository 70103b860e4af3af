"""What computes attention: a backend takes a checked call and a bound rule, or says why it cannot."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from tamis.attention.call import Call
from tamis.attention.rules import Rule
from tamis.attention.statistics import SparseWeights, Statistics
from tamis.transforms.dispatch import transforming


class Backend:
    """One way to compute attention.  A new one defines `obstacle` and `attend`, and takes its place in the list of
    :mod:`tamis.functional.backends`; the other operations are asked of whoever defines them.
    """

    name: ClassVar[str]
    is_fused: ClassVar[bool] = False
    """Whether it is so much faster than plain torch that to pass it over is worth a warning."""

    def suits(self, call: Call, rule: Rule) -> bool:
        """Whether "auto" thinks of it at all; one that is for another device is passed over without a word."""
        return True

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        """Why it cannot take this call, or None."""
        raise NotImplementedError

    def attend(self, call: Call, rule: Rule) -> Tensor:
        """The output (B, H, Lq, Dv) of a call without an obstacle, in the dtype of the query."""
        raise NotImplementedError

    def attend_with_statistics(self, call: Call, rule: Rule) -> tuple[Tensor, Statistics]:
        """The output, and the statistics of the weights before dropout."""
        raise NotImplementedError

    def statistics(self, call: Call, rule: Rule) -> Statistics:
        """Those of the weights, without a gradient."""
        raise NotImplementedError

    def sparse_weights(self, call: Call, rule: Rule) -> SparseWeights:
        """The non-zeros of the weights, without a gradient."""
        raise NotImplementedError

    def has(self, operation: str) -> bool:
        """Whether it defines an operation: "attend", "statistics" and so on."""
        return getattr(type(self), operation) is not getattr(Backend, operation)


_KINDS = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", float: "float", int: "int", bool: "bool"}


def schema_of(arguments: type) -> str:
    """Of a custom operation, which takes the fields of a named tuple one by one."""
    return ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(arguments).items())


def tracing() -> str | None:
    """Who wants plain operations on whole tensors instead of a loop over blocks or a kernel, or None."""
    return "torch.compile wants plain operations" if torch.compiler.is_compiling() else transforming()


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Autocast has been applied to the inputs; what follows is in the compute dtype."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
