"""Dense attention by torch, through `F.scaled_dot_product_attention`, wherever that agrees with our contract."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.attention.backend import Backend
from tamis.attention.call import Call
from tamis.attention.dropout import NO_PARTS
from tamis.attention.rules import BoundSoftmax, Rule
from tamis.transforms.dispatch import forward_mode
from tamis.transforms.parameters import values_known


class Sdpa(Backend):
    """Softmax alone, of calls without structure beyond a causal or boolean mask."""

    name = "sdpa"

    def suits(self, call: Call, rule: Rule) -> bool:
        return isinstance(rule, BoundSoftmax)

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        if not isinstance(rule, BoundSoftmax):
            return "it computes softmax and nothing else"
        if forward_mode():
            return "it has no forward-mode derivative"
        if (reason := _structure(call)) is not None:
            return reason
        if call.shape[3] == 0:
            return "it gives NaN without keys"
        if values_known(call.query) and not (_is_finite(call.query) and _is_finite(call.key)):
            return "it gives zeros to a query of NaN"
        return None

    def attend(self, call: Call, rule: Rule) -> Tensor:
        """A query that sees nothing gives zeros and has no gradient."""
        key, mask, seeing = call.key, call.visibility.attn_mask, None
        if mask is not None:
            seeing = mask.any(-1, keepdim=True)
            seen = mask.any(-2).unsqueeze(-1)  # (B or 1, H or 1, Lk, 1)
            if seen.shape[1] == 1:  # whatever a key holds that nobody sees, NaN even, torch would multiply it by 0
                key = torch.where(seen, key, 0.0)
            # A query that sees nothing is shown everything: what comes of it is dropped, and nothing is divided by 0.
            mask = mask | ~seeing
        out = F.scaled_dot_product_attention(
            call.query,
            key,
            call.value,
            mask,
            dropout_p=call.dropout.p,
            is_causal=call.visibility.is_causal and call.shape[2] > 1,
            scale=call.scale,
            enable_gqa=call.groups > 1,
        )
        if not call.query.is_cuda and not values_known(call.query):
            out = torch.where(call.query.isnan().any(-1, keepdim=True), math.nan, out)
        return out if seeing is None else torch.where(seeing, out, 0.0)


def _structure(call: Call) -> str | None:
    """What it has no argument for, or takes otherwise than we do."""
    visibility = call.visibility
    if call.dropout.generator is not None:
        return "it takes no generator"
    if call.dropout.part is not None and call.dropout.p > 0.0:
        return NO_PARTS
    if call.pages is not None:
        return "it takes no pages"
    for name in ("window", "alibi_slopes", "key_lengths", "cu_seqlens"):
        if getattr(visibility, name) is not None:
            return f"it takes no {name}"
    if call.key.stride(3) != 1:
        return "it is slow where keys lie in memory as caches have them on the CPU"
    mask = visibility.attn_mask
    if not visibility.is_causal:
        return None if mask is None or mask.dtype == torch.bool else "what hides all keys with -inf gives NaN there"
    if call.scale <= 0.0:
        return "it hides later keys with -inf before it scales"
    if mask is not None:
        return "it takes a mask or a causal one, not both"
    if visibility.query_positions is not None or visibility.key_positions is not None:
        return "it takes no positions"
    if call.shape[2] == call.shape[3] or call.shape[2] == 1:  # a single query, the last, sees all keys
        return None
    return "it aligns causal masks at the first key"


def _is_finite(x: Tensor) -> bool:
    # A sum overflows at most: then each number is looked at.
    return bool(x.detach().sum().isfinite()) or bool(x.detach().isfinite().all())
