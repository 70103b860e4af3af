"""Decoding as an operation of torch: opaque to torch.compile, with a shape, without a gradient or synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.kernels.attention.arguments import SCHEMA, Arguments, empty_output
from tamis.kernels.runtime.support import unwatched


def _decode(*arguments: Any) -> Tensor:
    from tamis.kernels.decode import launch

    with torch.cuda.device_of(arguments[0]):
        return launch.decode(Arguments(*arguments[:-2]), *arguments[-2:])


decode_forward = torch.library.custom_op(
    "tamis::decode", _decode, mutates_args=(), schema=f"({SCHEMA}, Tensor? table, Tensor? norms) -> Tensor"
)


@decode_forward.register_fake
def _(*arguments: Any) -> Tensor:
    return empty_output(Arguments(*arguments[:-2]))


def decode(arguments: Arguments, table: Tensor | None = None, norms: Tensor | None = None) -> Tensor:
    """The output, without a gradient, of few queries; keys and values may be pages (see `device`)."""
    return (_decode if unwatched(arguments.query) else decode_forward)(*arguments, table, norms)
