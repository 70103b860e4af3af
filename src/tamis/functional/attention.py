"""Attention functions: the first eight parameters of each are those of `F.scaled_dot_product_attention`."""

from __future__ import annotations

import difflib
import functools
import logging
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.attention.checks import Call, Options, Window, check_call, check_dropout, values_known
from tamis.attention.reference import Dropout, Observer, attend, dense, dense_scores, dense_weights, observe
from tamis.attention.rules import ACTIVATIONS, ActivationRule, EntmaxRule, Rule
from tamis.attention.statistics import (
    SparseObserver,
    SparseWeights,
    Statistics,
    StatisticsObserver,
    dense_statistics,
    row_statistics,
)
from tamis.functional.checks import row_parameter
from tamis.kernels import dispatch as kernels
from tamis.transforms.solver import compute_dtype

_log = logging.getLogger("tamis")

BACKENDS = ("auto", "reference", "triton")


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """``entmax(query @ key.T * scale + bias) @ value``: attention with exact zeros.

    Args:
        query: (B, H, Lq, D).
        key, value: (B, H, Lk, D) and (B, H, Lk, Dv); fewer heads with `enable_gqa`.
        attn_mask: boolean (True = attend) or additive, broadcastable to (B, H, Lq, Lk).  It may have a gradient.
        dropout_p: share of weights dropped; pass 0 in evaluation.
        is_causal: a query sees keys up to its own position.  Applies together with `attn_mask`.  Without explicit
            positions the last query sits on the last key, which for Lq = Lk is what SDPA does::

                Lq = 2, Lk = 4:   1 1 1 0      Lq = Lk = 3:   1 0 0
                                  1 1 1 1                     1 1 0
                                                              1 1 1
        scale: of the scores, 1 / sqrt(D) by default.
        enable_gqa: query heads come in groups that share a key head.
        alpha: in [1, 2].  A number, one per query head (H,), or a tensor that broadcasts to (B, H, Lq, 1).  A tensor
            that requires grad gets one.  alpha = 1 is softmax.
        alibi_slopes: (H,) or (B, H); adds -slope * |distance| to the scores.
        window: positions seen before and after a query, an int or a pair (left, right); None or -1 = no bound.
        query_positions, key_positions: integers, (L,) or (B, L), that `is_causal`, `window` and ALiBi compare.
        key_lengths: (B,); keys from this index on are padding.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,); sequences packed end to end into (1, H, T, D), each seeing itself.
        generator: where dropout takes its one random number from.
        backend: "auto"; "reference" for the plain PyTorch path; "triton" to insist on a fused kernel.

    Returns:
        (B, H, Lq, Dv) in the dtype of `query`.  A query that sees no key gets zeros, and zero gradients.
    """
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        enable_gqa,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    return _run(call, _entmax_rule(alpha, call), dropout_p, generator, backend)


def relu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    activation: str = "relu",
    bias: float = 0.0,
    divide_by_count: bool = False,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """``activation(query @ key.T * scale + bias) @ value``: elementwise weights, nothing normalised.

    Args:
        activation: "relu", "squared_relu", "leaky_relu", "gelu", "identity" or "sigmoid".
        bias: added to every score, as in sigmoid attention, where about -log n is usual.
        divide_by_count: divide the weights by the number of keys that the query sees.

    The rest as in :func:`entmax_attention`.  Masked weights are 0 whatever the activation.
    """
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        enable_gqa,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    return _run(call, _activation_rule(activation, bias, divide_by_count, call), dropout_p, generator, backend)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """Dense attention under the same contract: through `F.scaled_dot_product_attention` wherever that agrees with it.

    Arguments as in :func:`entmax_attention`.
    """
    call = check_call(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        enable_gqa,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    positions_given = query_positions is not None or key_positions is not None
    if backend == "auto" and generator is None and _sdpa_agrees(call, positions_given):
        return _sdpa(call, check_dropout(dropout_p), enable_gqa)
    return _run(call, EntmaxRule(0.0), dropout_p, generator, backend)


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    activation: str | None = None,
    bias: float = 0.0,
    divide_by_count: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """The weights themselves, (B, H, Lq, Lk), at least fp32 and differentiable.

    Those of :func:`entmax_attention`, or with `activation` those of :func:`relu_attention`.  `value` and `dropout_p`
    are there to take the same arguments, and change nothing.
    """
    call = check_call(query, key, value, attn_mask, is_causal, scale, enable_gqa, **options)
    rule = _rule(call, alpha, activation, bias, divide_by_count)
    return dense_weights(call.query, call.key, rule, call.visibility, call.scale)


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Scaled and biased scores and whether each is visible, both (B, H, Lq, Lk): the start of a mechanism of one's own.

    A score that an additive mask sets to -inf counts as hidden.
    """
    call = check_call(query, key, None, attn_mask, is_causal, scale, enable_gqa, **options)
    scores, keep = dense_scores(call.query, call.key, call.visibility, call.scale)
    finite = scores > float("-inf")
    return scores, finite if keep is None else finite & keep


def sparse_attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    activation: str | None = None,
    bias: float = 0.0,
    divide_by_count: bool = False,
    **options: Unpack[Options],
) -> SparseWeights:
    """The exact non-zeros of :func:`attention_weights`, in compressed rows; no L x L array is ever in memory."""
    call = check_call(query, key, value, attn_mask, is_causal, scale, enable_gqa, **options)
    observer = SparseObserver(call.shape, call.query.device, compute_dtype(call.query.dtype))
    rule = _rule(call, alpha, activation, bias, divide_by_count)
    observe(call.query, call.key, rule, call.visibility, call.scale, observer)
    return observer.result()


def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    activation: str | None = None,
    bias: float = 0.0,
    divide_by_count: bool = False,
    **options: Unpack[Options],
) -> Statistics:
    """Support size, zero share, entropy, null share and mean distance per head, in memory linear in the length."""
    call = check_call(query, key, key if value is None else value, attn_mask, is_causal, scale, enable_gqa, **options)
    rule = _rule(call, alpha, activation, bias, divide_by_count)
    if _traced():
        return _dense_statistics(call, rule)
    if call.query.is_cuda and kernels.obstacle(call, rule) is None:
        with torch.no_grad():
            return row_statistics(kernels.attend(call, rule, 0.0, None, counted=True)[1], call.visibility)
    observer = StatisticsObserver(call.shape[1], call.query.device)
    observe(call.query, call.key, rule, call.visibility, call.scale, observer)
    return observer.result()


def attention_with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    activation: str | None = None,
    bias: float = 0.0,
    divide_by_count: bool = False,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Statistics]:
    """The output and, from the same pass, what :func:`attention_statistics` gives (of the weights before dropout)."""
    call = check_call(query, key, value, attn_mask, is_causal, scale, enable_gqa, **options)
    rule = _rule(call, alpha, activation, bias, divide_by_count)
    if _traced():
        return _run(call, rule, dropout_p, generator, "reference"), _dense_statistics(call, rule)
    if call.query.is_cuda and kernels.obstacle(call, rule) is None:
        out, rows = kernels.attend(call, rule, check_dropout(dropout_p), generator, counted=True)
        return out, row_statistics(rows, call.visibility)
    observer = StatisticsObserver(call.shape[1], call.query.device)
    out = _run(call, rule, dropout_p, generator, "reference", observer)
    return out, observer.result()


def visible_counts(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """How many keys each query sees, (B or 1, H or 1, Lq): the n of length-aware scales."""
    call = check_call(query, key, None, attn_mask, is_causal, None, enable_gqa, **options)
    return call.visibility.counts()


# ---------------------------------------------------------------------------------------------------------------


def _run(
    call: Call,
    rule: Rule,
    dropout_p: float,
    generator: torch.Generator | None,
    backend: str,
    observer: Observer | None = None,
) -> Tensor:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    dropout_p = check_dropout(dropout_p)
    if observer is None and (backend == "triton" or (backend == "auto" and call.query.is_cuda)):
        obstacle = kernels.obstacle(call, rule)
        if obstacle is None:
            return kernels.attend(call, rule, dropout_p, generator)[0]
        if backend == "triton":
            raise RuntimeError(f'backend="triton": {obstacle}; backend="auto" takes the plain PyTorch path')
        if not torch.compiler.is_compiling():
            _say_once(obstacle)
    dropout = Dropout.draw(dropout_p, generator)
    arguments = (call.query, call.key, call.value, rule, call.visibility, call.scale, dropout)
    return dense(*arguments) if _traced() else attend(*arguments, observer)


@functools.cache
def _say_once(obstacle: str) -> None:
    _log.warning("attention takes the plain PyTorch path, which is slower than a fused kernel: %s", obstacle)


def _traced() -> bool:
    """Whether torch.compile, torch.func or forward mode is looking: they want plain operations, no loop of blocks."""
    return torch.compiler.is_compiling() or kernels.needs_plain_operations()


def _dense_statistics(call: Call, rule: Rule) -> Statistics:
    """Where a loop over blocks would not do, see `_traced`: from all weights at once."""
    weights = dense_weights(call.query, call.key, rule, call.visibility, call.scale)
    return dense_statistics(weights, call.visibility)


def _rule(call: Call, alpha: float | Tensor, activation: str | None, bias: float, divide_by_count: bool) -> Rule:
    if activation is None:
        return _entmax_rule(alpha, call)
    return _activation_rule(activation, bias, divide_by_count, call)


def _entmax_rule(alpha: float | Tensor, call: Call) -> EntmaxRule:
    e = row_parameter("alpha", alpha, 0.0, call.shape, call.query.dtype, 3, subtract=1.0)
    if isinstance(e, Tensor):
        if values_known(e) and e.numel() and not 0.0 <= e.min().item() <= e.max().item() <= 1.0:
            shown = f"{e.min().item() + 1:g} to {e.max().item() + 1:g}"
            raise ValueError(f"alpha must lie in [1, 2] for attention, got {shown}")
    elif not 0.0 <= e <= 1.0:
        raise ValueError(f"alpha must lie in [1, 2] for attention, got {alpha}")
    return EntmaxRule(e)


def _activation_rule(activation: str, bias: float, divide_by_count: bool, call: Call) -> ActivationRule:
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a name, one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if activation not in ACTIVATIONS:
        nearest = difflib.get_close_matches(activation, ACTIVATIONS, 1, 0.0)[0]
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}; did you mean {nearest!r}?"
        )
    scale = None
    if divide_by_count:
        counts = call.visibility.counts().clamp(min=1).unsqueeze(-1)
        scale = 1.0 / counts.to(compute_dtype(call.query.dtype))
    return ActivationRule(activation, float(bias), scale)


def _sdpa_agrees(call: Call, positions_given: bool) -> bool:
    """SDPA aligns causal masks at the first key, and takes no structure beyond those or a mask.

    It is also many times slower than plain products where keys lie in memory as caches have them on the CPU.
    """
    visibility = call.visibility
    parts = (visibility.window, visibility.alibi_slopes, visibility.key_lengths, visibility.cu_seqlens)
    if any(part is not None for part in parts) or call.key.stride(3) != 1:
        return False
    mask = visibility.attn_mask
    if visibility.is_causal:
        placed = call.shape[2] == call.shape[3] or call.shape[2] == 1  # a single query, the last, sees all keys
        return mask is None and not positions_given and placed
    return mask is None or mask.dtype == torch.bool


def _sdpa(call: Call, dropout_p: float, enable_gqa: bool) -> Tensor:
    """Dense attention by torch, where a query that sees nothing gives zeros and has no gradient."""
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
        dropout_p=dropout_p,
        is_causal=call.visibility.is_causal and call.shape[2] > 1,
        scale=call.scale,
        enable_gqa=enable_gqa,
    )
    return out if seeing is None else torch.where(seeing, out, 0.0)
