"""`torch.nn.MultiheadAttention` with another mechanism inside.

This is the one place that follows torch's conventions instead of ours: boolean masks are True where attention is
*forbidden*, and the result is a tuple.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis.mechanisms import Mechanism
from tamis.nn.attention import mechanism_of_layer, start_with_spread
from tamis.settings import check_heads


class MultiheadAttention(nn.Module):
    """A drop-in for `nn.MultiheadAttention(..., batch_first=True)`, with its arguments, state_dict names and results.

    Only `mechanism` and `initial_spread` are new, which are those of :class:`Attention`.  `add_bias_kv` and
    `add_zero_attn` are not supported.  As in torch, weights that are asked for in training come after dropout, and the
    output is made of them.
    """

    # nn.TransformerEncoderLayer has a fused path of its own that would bypass the mechanism; it asks this first.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: Mechanism | None = None,
        initial_spread: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, embed_dim)
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported: sparse weights need no sink")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.bias_k, self.bias_v, self.add_zero_attn = None, None, False  # part of torch's interface
        self.mechanism = mechanism_of_layer(mechanism, embed_dim, num_heads, self.head_dim)
        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **factory))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim, **factory))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.initial_spread = initial_spread
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.initial_spread is not None:
            start_with_spread(self, self.initial_spread)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `nn.MultiheadAttention.forward` does; `is_causal` is a hint about `attn_mask`, which must be given
        with it."""
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested(query, key, value), None
        if is_causal and attn_mask is None:
            raise ValueError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention: it is only a hint about it")
        q, k, v, hidden, mask = self.prepare(query, key, value, key_padding_mask, attn_mask)
        weights = None
        if need_weights:
            weights = self.mechanism.weights(q, k, hidden=hidden, attn_mask=mask)
            weights = F.dropout(weights, self.dropout, self.training)
            context = (weights @ v.to(weights.dtype)).to(v.dtype)
            # In the dtype of torch's own weights, which autocast decides differently on CPUs and GPUs.
            weights = weights.to(torch.softmax(v.new_empty(0), 0).dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            dropout_p = self.dropout if self.training else 0.0
            context = self.mechanism(q, k, v, hidden=hidden, attn_mask=mask, dropout_p=dropout_p)
        out = self.out_proj(self.mechanism.merge(context))
        if query.ndim == 2:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return what the mechanism is given: queries, keys, values by heads, the input (B, Lq, embed_dim) and our
        mask."""
        batched = query.ndim == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        lead = (query.shape[0],) if batched else ()
        mask = self._mask(attn_mask, key_padding_mask, lead, query.shape[1], key.shape[1], query.dtype)
        return *self._project(query, key, value), query, mask

    def _nested(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """nn.TransformerEncoder packs padded batches into nested tensors in evaluation: attend within each sequence."""
        if query is not key or key is not value:
            raise ValueError("nested tensors are supported for self-attention only")
        lengths = [sequence.shape[0] for sequence in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        index = torch.arange(padded.shape[1], device=padded.device)
        padding = index >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = self(padded, padded, padded, key_padding_mask=padding, need_weights=False)
        return torch.nested.as_nested_tensor([row[:length] for row, length in zip(out, lengths, strict=True)])

    def score_projections(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases that make queries, and those that make keys; parts of what holds all three."""
        separate: Any = (self.q_proj_weight, self.k_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)[:2]
        biases = () if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[:2]
        queries, keys = (list(tensors) for tensors in zip(*(pair for pair in (weights, biases) if pair), strict=True))
        return queries, keys

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.in_proj_weight
        separate: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = (self.num_heads, self.head_dim)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, heads).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _mask(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        lead: tuple[int, ...],
        num_queries: int,
        num_keys: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """torch's two masks as one of ours; `lead` is (B,), or () for inputs without a batch."""
        batch = lead[0] if lead else 1
        given = []
        if attn_mask is not None:
            plane = (num_queries, num_keys)
            _check_mask("attn_mask", attn_mask, plane, (batch * self.num_heads, *plane))
            given.append(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, self.num_heads)))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (*lead, num_keys))
            given.append(key_padding_mask.view(batch, 1, 1, num_keys))
        if not given:
            return None
        if all(mask.dtype == torch.bool for mask in given):
            forbidden = given[0] if len(given) == 1 else given[0] | given[1]
            return ~forbidden
        total: Tensor | None = None
        for mask in given:
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
            total = mask if total is None else total + mask
        return total


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be boolean (True = forbidden) or an additive float tensor, got {kind}")
    if not any(mask.shape == shape for shape in shapes):
        raise ValueError(f"{name} must be of shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
