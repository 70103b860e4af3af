"""Which way a batch is decoded: by the C++ kernels where they can, else by the model itself."""

from __future__ import annotations

from torch import Tensor

from tamis.decoding.native import NativeState
from tamis.decoding.prepared import obstacle, prepared
from tamis.decoding.quantized import check_quantize, quantized
from tamis.decoding.state import DecodingState, State
from tamis.models.seq2seq import Seq2Seq


def start(model: Seq2Seq, source: Tensor, quantize: str | None = None) -> State:
    """The state of a batch of sources (B, Ls) of which nothing is translated yet; `model` is in evaluation mode."""
    if quantize is not None:
        check_quantize(quantize, model)
    if source.device.type == "cpu" and obstacle(model) is None:
        return NativeState(model, source, prepared(model, quantize or "fp32"))
    return DecodingState(model if quantize is None else quantized(model, quantize), source)
