"""The function that transformers calls in place of its own attention.

Masks are those of SDPA, as `sdpa_mask` makes them: boolean, True = attend, with causality, padding and windows in
them.  None means that nothing is hidden, or, for a causal module, that it is ours to hide what comes later; the first
query then sits on the first key, as in the prefill of a static cache.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

# Not public, but all there is: GPT-2 does not tell its layers that the caller asked for weights.
from transformers.utils.output_capturing import _active_collector

from tamis.functional import SparseWeights
from tamis.functional.sharding import active
from tamis.hf.part import AttentionPart
from tamis.hf.sites import PART
from tamis.mechanisms import EntmaxAttention

IMPLEMENTATION = "tamis"
"""The `attn_implementation` of a sparsified model: each attention module runs what is installed in it."""
BY_NAME = "tamis_entmax"
NEEDS_PARAMETERS = (IMPLEMENTATION, "tamis_rela", "tamis_asentmax")

LAYER_INPUT = "tamis_layer_input"
"""The keyword by which a pre-hook hands the input of a layer to the function below."""

_CANNOT_HONOUR = {
    "s_aux": "attention sinks (s_aux)",
    "softcap": "a soft cap of the scores (softcap)",
    "indices": "a choice of keys (indices)",
    "block_indices": "a choice of keys (block_indices)",
}
_FIXED = AttentionPart(EntmaxAttention(1, 1.5), "", 0, 0, {})


def register() -> None:
    """Make the implementations known to transformers, each with its mask function.  Importing `tamis.hf` calls it."""
    for name in (BY_NAME, *NEEDS_PARAMETERS):
        AttentionInterface.register(name, functools.partial(attention_forward, implementation=name))
        AttentionMaskInterface.register(name, mask_of_tokens)


def mask_of_tokens(*sizes: Any, **options: Any) -> Tensor | None:
    """`sdpa_mask`; where processes share sequences, None: transformers takes the places of tokens for packed texts."""
    if active() is None:
        return sdpa_mask(*sizes, **options)
    given = [name for name in ("attention_mask", "local_size") if options.get(name) is not None]
    if given or options.get("use_vmap"):
        raise ValueError(
            f"where processes share sequences, models of transformers take no padding, window or mask of their own, "
            f"got {', '.join(given) or 'a mask function'}"
        )
    return None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | SparseWeights | None]:
    """(B, H, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv) to (B, Lq, H, Dv), and weights if the caller asked for them."""
    for name, what in _CANNOT_HONOUR.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {what}, which sparse attention cannot honour")
    part = _part(module, implementation)
    heads, num_queries, num_keys = query.shape[1], query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and num_queries > 1
    if causal and num_keys > num_queries:  # a static cache, of which only the first keys are filled
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        position_bias = None if position_bias is None else position_bias[..., :num_queries]
    options: dict[str, Any] = {
        "hidden": kwargs.get(LAYER_INPUT),
        "attn_mask": _mask(attention_mask, position_bias),
        "is_causal": causal,
        "scale": scaling,
        "enable_gqa": key.shape[1] != heads,
    }
    merged = part(query, key, value, dropout_p=dropout, **options)
    weights: Tensor | SparseWeights | None = None
    if _wants_weights(kwargs) and _wants_non_zeros():
        found = part.mechanism.sparse_weights(query, key, **options)
        weights = SparseWeights(found.crow, found.col, found.val.to(query.dtype), (*found.shape[:3], num_keys))
    elif _wants_weights(kwargs):
        weights = part.mechanism.weights(query, key, **options).to(query.dtype)
        weights = F.pad(weights, (0, num_keys - key.shape[2]))
    return merged.unflatten(-1, (heads, value.shape[3])), weights


_asked_for_non_zeros: ContextVar[nn.Module | None] = ContextVar("asked_for_non_zeros", default=None)
"""The model that is being called with ``output_attentions="sparse"``."""


def honour_sparse_outputs(model: nn.Module) -> list[RemovableHandle]:
    """Let a model of transformers take ``output_attentions="sparse"``; the hooks, to be removed."""
    return [
        model.register_forward_pre_hook(_note_non_zeros, with_kwargs=True),
        model.register_forward_hook(_forget_non_zeros, always_call=True),
    ]


def _note_non_zeros(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    wanted = kwargs.get("output_attentions")
    if not isinstance(wanted, str):
        return None
    if wanted != "sparse":
        raise ValueError(f'output_attentions must be True, False or "sparse", got {wanted!r}')
    if torch.compiler.is_compiling():
        raise ValueError('output_attentions="sparse" is not for compiled models: how many non-zeros there are varies')
    _asked_for_non_zeros.set(model)
    return args, {**kwargs, "output_attentions": True}


def _forget_non_zeros(model: nn.Module, *_: Any) -> None:
    if _wants_non_zeros() and _asked_for_non_zeros.get() is model:
        _asked_for_non_zeros.set(None)


def _wants_non_zeros() -> bool:
    """A compiler cannot follow the context variable, and is refused where it would be set."""
    return not torch.compiler.is_compiling() and _asked_for_non_zeros.get() is not None


def _part(module: nn.Module, implementation: str) -> AttentionPart:
    part = getattr(module, PART, None)
    if isinstance(part, AttentionPart):
        return part
    if getattr(getattr(module, "config", None), PART, None) is not None:
        raise RuntimeError("this model was saved with sparse attention: load it with tamis.hf.from_pretrained")
    if implementation != BY_NAME:
        raise RuntimeError(f'attn_implementation="{implementation}" has parameters: call tamis.hf.sparsify first')
    return _FIXED


def _mask(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """One mask, boolean or additive, of all that hides keys and biases scores."""
    if mask is not None and mask.dtype != torch.bool:
        # "As low as the dtype goes" is what transformers writes for hidden; for us such a key would count as seen.
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))
    if position_bias is None:
        return mask
    if mask is None:
        return position_bias
    return torch.where(mask, position_bias, float("-inf")) if mask.dtype == torch.bool else position_bias + mask


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    # A compiler cannot follow the context variable, and transformers does not use it then.
    collected = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)
