"""A model's weights as the C++ kernels want them: packed once, and again when they have changed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tamis.decoding.fingerprint import Kept
from tamis.mechanisms import EntmaxAttention, Mechanism, ReLAttention, SoftmaxAttention
from tamis.mechanisms.entmax import LearnedAlpha
from tamis.mechanisms.rela import EPSILON, ReLANorm
from tamis.models.blocks import Embedding
from tamis.models.seq2seq import Seq2Seq
from tamis.native import layers as native
from tamis.native import product
from tamis.native.product import FUNCTIONS, Matrix, Packed
from tamis.nn.attention import Attention
from tamis.nn.layers import FeedForward, Residual, RMSNorm, TransformerLayer
from tamis.positions import ALiBi, LearnedPositions, NoPE, Sinusoidal
from tamis.positions.nape import NAPE

POSITIONS = (Sinusoidal, LearnedPositions, NoPE, ALiBi, NAPE)
OF_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swiglu": "silu", "geglu": "gelu"}
PLACES: dict[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys(("encoder_position", "decoder_position"), POSITIONS),
    **dict.fromkeys(("encoder_norm", "decoder_norm"), (nn.Identity, nn.LayerNorm, RMSNorm)),
    **dict.fromkeys(("norm", "after"), (nn.LayerNorm, RMSNorm, ReLANorm)),
    **dict.fromkeys(("self_residual", "cross_residual", "feed_residual"), (Residual,)),
    **dict.fromkeys(("self_attention", "cross_attention"), (Attention,)),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj", "up", "gate", "down", "output"), (nn.Linear,)),
    **dict.fromkeys(("embedding", "source_embedding"), (Embedding,)),
    **dict.fromkeys(("encoder", "decoder"), (nn.ModuleList,)),
    "mechanism": (SoftmaxAttention, EntmaxAttention, ReLAttention),
    "position": (NoPE, ALiBi, NAPE),
    "alpha": (LearnedAlpha,),
    "feed_forward": (FeedForward,),
    "dropout": (nn.Dropout,),
    "": (Seq2Seq,),
}
"""What the kernels know, of these kinds exactly, by the last part of a module's name; a number is a layer's."""


def obstacle(model: Seq2Seq) -> str | None:
    """Why the C++ kernels cannot decode with this model, or None."""
    if (reason := product.obstacle()) is not None:
        return reason
    if torch.is_autocast_enabled("cpu"):
        return "autocast decides about precision"
    for name, module in model.named_modules():
        if type(module) not in PLACES.get(name.rpartition(".")[2], (TransformerLayer,)):
            return f"{name or 'the model'} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has a hook"
        if isinstance(module, FeedForward) and module.activation not in OF_ACTIVATIONS:
            return f"{name}: the activation is {module.activation}"
        if isinstance(module, Mechanism) and (reason := _obstacle_of_rule(module)) is not None:
            return f"{name}: {reason}"
    if {"encode", "decode"} & vars(model).keys():
        return "the model's methods were replaced"
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return f"the weights are {parameter.dtype} on {parameter.device}"
    return None


class Prepared:
    """Both stacks of a model, packed.

    Args:
        precision: of the products: "fp32", "bf16" or "int8".
    """

    def __init__(self, model: Seq2Seq, precision: str) -> None:
        self._held: list[Any] = []  # whatever the structures point to
        self._precision = precision
        config = model.config
        self.encoder = self._stack(model, model.encoder, model.encoder_norm, model.encoder_position.slopes())
        self.decoder = self._stack(model, model.decoder, model.decoder_norm, model.decoder_position.slopes())
        table, bias = model.embedding.weight, model.output_bias
        if model.output is not None:
            table, bias = model.output.weight, model.output.bias
        self.decoder.output = self._pack(table, bias)
        self.decoder.embedding = self._pointer(model.embedding.weight)
        self.decoder.embedding_scale = math.sqrt(config.embed_dim)

    def _stack(self, model: Seq2Seq, modules: nn.ModuleList, norm: nn.Module, slopes: Tensor | None) -> native.Stack:
        config = model.config
        layers = (native.Layer * len(modules))(*(self._layer(module) for module in modules))
        self._held.append(layers)
        first: Any = modules[0].self_attention if len(modules) else None
        sizes = (first.num_heads, first.num_kv_heads, first.head_dim) if len(modules) else (1, 1, 1)
        return native.Stack(
            *(layers, len(modules), config.embed_dim, *sizes, config.ffn_dim),
            *(None if slopes is None else self._pointer(slopes), self._norm(norm)),
        )

    def _layer(self, layer: Any) -> native.Layer:
        feed, cross = layer.feed_forward, layer.cross_attention
        return native.Layer(
            self._attention(layer.self_attention),
            native.Attention() if cross is None else self._attention(cross),
            *(self._linear(feed.up), self._linear(feed.gate), self._linear(feed.down)),
            self._around(layer.self_residual),
            native.Sublayer() if cross is None else self._around(layer.cross_residual),
            self._around(layer.feed_residual),
            FUNCTIONS[OF_ACTIVATIONS[feed.activation]],
        )

    def _attention(self, attention: Any) -> native.Attention:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        matrices = (self._linear(getattr(attention, name)) for name in names)
        mechanism = attention.mechanism
        merge = self._merge(mechanism.norm) if isinstance(mechanism, ReLAttention) else native.Merge()
        return native.Attention(*matrices, self._rule(mechanism, attention.num_heads), merge)

    def _rule(self, mechanism: Mechanism, heads: int) -> native.Rectifier:
        if isinstance(mechanism, ReLAttention):
            kind, count = native.WEIGHTS["relu"], int(mechanism.divide_by_count)
            return native.Rectifier(kind, float(mechanism.bias), None, count)
        if isinstance(mechanism, EntmaxAttention):
            powers = _alphas(mechanism).detach().double().expand(heads) - 1.0
            return native.Rectifier(native.WEIGHTS["entmax"], 0.0, self._pointer(powers.clamp(0.0, 1.0).float()), 0)
        return native.Rectifier(native.WEIGHTS["softmax"], 0.0, None, 0)

    def _merge(self, norm: ReLANorm) -> native.Merge:
        if norm.variant == "none":
            return native.Merge()
        layer = norm.variant == "layernorm"
        kind = native.NORMS["layernorm" if layer else "rmsnorm"]
        own = native.Norm(self._pointer(norm.gain), self._pointer(norm.offset), 1e-5 if layer else EPSILON, kind)
        return native.Merge(own, self._pointer(norm.gate))

    def _around(self, residual: Residual) -> native.Sublayer:
        norm, none = self._norm(residual.norm), native.Norm()
        if residual.arrangement == "post":
            return native.Sublayer(none, none, norm)
        return native.Sublayer(norm, none if residual.after is None else self._norm(residual.after), none)

    def _norm(self, norm: nn.Module) -> native.Norm:
        if isinstance(norm, nn.LayerNorm):
            pointers = self._pointer(norm.weight), self._pointer(norm.bias)
            return native.Norm(*pointers, norm.eps, native.NORMS["layernorm"])
        if isinstance(norm, RMSNorm):
            epsilon = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
            return native.Norm(self._pointer(norm.weight), None, epsilon, native.NORMS["rmsnorm"])
        return native.Norm()

    def _linear(self, linear: nn.Linear | None) -> Matrix:
        return Matrix() if linear is None else self._pack(linear.weight, linear.bias)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        packed = Packed(weight, bias, self._precision)
        self._held.append(packed)
        return packed.matrix

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        own = tensor.detach().float().contiguous()
        self._held.append(own)
        return own.data_ptr()


def prepared(model: Seq2Seq, precision: str = "fp32") -> Prepared:
    """The packed weights of a model without an obstacle; those of earlier calls while they are still the model's."""
    return _KEPT.of(model, precision, lambda: Prepared(model, precision))


_KEPT: Kept[Prepared] = Kept()


def _obstacle_of_rule(mechanism: Mechanism) -> str | None:
    if not mechanism.at_rest:
        return f"a schedule moves its {' and '.join(mechanism.movable())}"
    if isinstance(mechanism, EntmaxAttention) and _alphas(mechanism).numel() not in (1, mechanism.num_heads):
        return "alphas differ within a head"
    if isinstance(mechanism, ReLAttention) and mechanism.activation != "relu":
        return f"the activation is {mechanism.activation}"
    return None


def _alphas(mechanism: EntmaxAttention) -> Tensor:
    """One, or one for each head."""
    alpha: Any = mechanism.alpha
    if isinstance(alpha, float):
        return torch.tensor([alpha])
    return (alpha() if isinstance(alpha, nn.Module) else alpha).flatten()
