"""Attention functions, shaped like `F.scaled_dot_product_attention`: a rule says what is computed."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from tamis.attention.call import Options, Window, check_call
from tamis.attention.dense import dense_scores, dense_weights
from tamis.attention.rules import Activation, BlockRule, Entmax, Rule, Softmax, bind
from tamis.attention.statistics import SparseWeights, Statistics
from tamis.functional.backends import BackendChoice, choose, explain
from tamis.functional.sharding import active, refuse_shards
from tamis.transforms.dispatch import is_mapped
from tamis.transforms.parameters import switch

_ENTMAX15 = Entmax(1.5)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rule: Rule = _ENTMAX15,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor:
    """Compute attention of any kind: ``rule(query @ key.T * scale + bias) @ value``.

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
        rule: how scores become weights: `Entmax(alpha)`, `Softmax()`, `Activation(name)`, `Softpick()`, or one's own.
        generator: where dropout takes its one random number from.
        backend: "auto"; "reference" for plain PyTorch; a name insists: "triton" on a fused kernel, "native" on one for
            CPUs, "blocked" on memory linear in the length, "dense" on the whole matrix, "sdpa" on torch's.
            :func:`attention_backends` explains.

    Keyword Args:
        alibi_slopes: (H,) or (B, H); adds ``-slope * |distance|`` to the scores.
        window: positions seen before and after a query, an int or a pair (left, right); None or -1 = no bound.
        query_positions, key_positions: integers, (L,) or (B, L), that `is_causal`, `window` and ALiBi compare.
        key_lengths: (B,); keys from this index on are padding.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,); sequences packed end to end into (1, H, T, D), each seeing itself.

    Returns:
        (B, H, Lq, Dv) in the dtype of `query`.  A query that sees no key gets zeros, and zero gradients.
    """
    if (sharding := active()) is not None:
        own = {"rule": rule, "generator": generator, "backend": backend}
        return sharding.attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **own, **options
        )
    call = check_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, generator=generator, **options
    )
    bound = bind(rule, call)
    return choose("attend", call, bound, backend).attend(call, bound)


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
    """Compute attention with exact zeros: ``entmax(query @ key.T * scale + bias) @ value``.

    Args:
        alpha: in [1, 2].  A number, one per query head (H,), or a tensor that broadcasts to (B, H, Lq, 1).  A tensor
            that requires grad gets one.  alpha = 1 is softmax.

    The rest as in :func:`attention`, of which this is the rule `Entmax(alpha)`.

    Returns:
        the output (B, H, Lq, Dv).
    """
    return attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        rule=Entmax(alpha),
        generator=generator,
        backend=backend,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )


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
    """Compute attention by elementwise weights: ``activation(query @ key.T * scale + bias) @ value``.

    Args:
        activation: "relu", "squared_relu", "leaky_relu", "gelu", "identity" or "sigmoid".
        bias: added to every score, as in sigmoid attention, where about -log n is usual.
        divide_by_count: divide the weights by the number of keys that the query sees.

    The rest as in :func:`attention`, of which this is the rule `Activation(activation, bias, divide_by_count)`.
    Masked weights are 0 whatever the activation.

    Returns:
        the output (B, H, Lq, Dv).
    """
    return attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        rule=Activation(activation, bias, switch("divide_by_count", divide_by_count)),
        generator=generator,
        backend=backend,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )


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
    """Compute dense attention, through `F.scaled_dot_product_attention` wherever that agrees with the contract.

    Arguments as in :func:`attention`, of which this is the rule `Softmax()`.

    Args:
        query, key, value, and the rest: as in :func:`attention`.

    Returns:
        the output (B, H, Lq, Dv).
    """
    return attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        rule=Softmax(),
        generator=generator,
        backend=backend,
        alibi_slopes=alibi_slopes,
        window=window,
        query_positions=query_positions,
        key_positions=key_positions,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )


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
    rule: Rule = _ENTMAX15,
    **options: Unpack[Options],
) -> Tensor:
    """Return the weights of :func:`attention`, at least fp32 and differentiable.

    `value` and `dropout_p` are there to take the same arguments, and change nothing.

    Args:
        query, key, rule, and the rest: as in :func:`attention`.

    Returns:
        weights (B, H, Lq, Lk).
    """
    refuse_shards("attention_weights")
    call = check_call(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, **options)
    return dense_weights(call, bind(rule, call))


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Return scaled and biased scores, and whether each is visible.

    A score that an additive mask sets to -inf counts as hidden; one that is not a number does not.

    Args:
        query, key, and the rest: as in :func:`attention`.

    Returns:
        scores and a boolean mask, both (B, H, Lq, Lk).
    """
    refuse_shards("attention_scores")
    call = check_call(query, key, None, attn_mask, 0.0, is_causal, scale, enable_gqa, **options)
    scores, keep = dense_scores(call)
    above = scores != float("-inf")
    return scores, above if keep is None else above & keep


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
    rule: Rule = _ENTMAX15,
    backend: str = "auto",
    **options: Unpack[Options],
) -> SparseWeights:
    """Return the exact non-zeros of :func:`attention_weights`, in compressed rows.

    No L x L array is ever in memory, unless the rule knows no other way.

    Args:
        query, key, rule, and the rest: as in :func:`attention`.

    Returns:
        :class:`SparseWeights` over all (batch, head, query).
    """
    refuse_shards("sparse_attention_weights")
    call = check_call(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, **options)
    bound = bind(rule, call)
    (q, k, _, *others), own = call.tensors(), bound.parameters() if isinstance(bound, BlockRule) else ()
    if any(x is not None and is_mapped(x) for x in (q, k, *others, *own)):
        raise ValueError("sparse_attention_weights has no fixed size, so vmap cannot stack it; pass the whole batch")
    return choose("sparse_weights", call, bound, backend).sparse_weights(call, bound)


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
    rule: Rule = _ENTMAX15,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Statistics:
    """Measure support size, zero share, entropy, null share and distance per head, in memory linear in the length.

    Args:
        query, key, rule, and the rest: as in :func:`attention`; `value` and `dropout_p` change nothing.

    Returns:
        :class:`Statistics`, one number for each head.
    """
    refuse_shards("attention_statistics")
    call = check_call(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, **options)
    bound = bind(rule, call)
    return choose("statistics", call, bound, backend).statistics(call, bound)


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
    rule: Rule = _ENTMAX15,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    **options: Unpack[Options],
) -> tuple[Tensor, Statistics]:
    """Compute :func:`attention` and, from the same pass, its :func:`attention_statistics`.

    Args:
        query, key, value, and the rest: as in :func:`attention`.

    Returns:
        the output, and statistics of the weights before dropout.
    """
    refuse_shards("attention_with_statistics")
    call = check_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, generator=generator, **options
    )
    bound = bind(rule, call)
    return choose("attend_with_statistics", call, bound, backend).attend_with_statistics(call, bound)


def attention_backends(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rule: Rule = _ENTMAX15,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> BackendChoice:
    """Say which backend would compute :func:`attention` with these arguments, and why not the others.

    Args:
        query, key, value, and the rest: as in :func:`attention`.

    Returns:
        the choice; print it.
    """
    call = check_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, generator=generator, **options
    )
    return explain(call, bind(rule, call))


def visible_counts(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """Count the keys that each query sees: the n of length-aware scales.

    Args:
        query, key, and the rest: as in :func:`attention`.

    Returns:
        counts (B or 1, H or 1, Lq).
    """
    if (sharding := active()) is not None:
        return sharding.visible_counts(query, key, attn_mask, is_causal, enable_gqa, **options)
    return check_call(query, key, None, attn_mask, 0.0, is_causal, None, enable_gqa, **options).counts()
