"""Attention of a few queries to a paged cache: keys and values in pages that need not lie side by side."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tamis.attention.checks import Call, Window, check_call, values_known
from tamis.functional.attention import BACKENDS, _rule, _run, _say_once
from tamis.kernels import dispatch as kernels
from tamis.kernels.arguments import PAGE_UNIT


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    alpha: float | Tensor = 1.5,
    activation: str | None = None,
    bias: float = 0.0,
    divide_by_count: bool = False,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    page_norms: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`tamis.entmax_attention`, or with `activation` :func:`tamis.relu_attention`, to a paged cache.

    Args:
        query: (B, H, Lq, D), the last Lq tokens of each sequence.
        key_pages, value_pages: (pages, page, Hk, D) and (pages, page, Hk, Dv), the pool that all sequences share; H is
            a multiple of Hk.
        block_table: integers (B, n): the i-th page of a sequence holds its positions from i * page on.  Entries beyond
            its length are not looked at.
        key_lengths: (B,), the tokens of each sequence, those of the queries included.
        page_norms: (pages, Hk) fp32, no less than the norm of any key in the page, kept up to date by whoever writes
            pages: ``key_pages.float().norm(dim=-1).amax(1)``.  With `alibi_slopes` pages that are too
            far to have a weight are then not read.  For pages of a multiple of 16 positions.

    The rest as there.  The fused kernel takes up to 16 queries and no gradients; the plain path has neither limit.

    Returns:
        (B, H, Lq, Dv) in the dtype of `query`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    _check_pages(query, key_pages, value_pages, block_table, page_norms)
    keys = (query.shape[0], key_pages.shape[2], block_table.shape[1] * key_pages.shape[1])
    call = check_call(
        query,
        _stand_in(key_pages, keys),  # of the right shape, and of no size
        _stand_in(value_pages, keys),
        None,
        is_causal,
        scale,
        True,
        alibi_slopes=alibi_slopes,
        window=window,
        key_lengths=key_lengths,
    )
    _check_table(block_table, key_lengths, key_pages)
    rule = _rule(_placed(call) if divide_by_count else call, alpha, activation, bias, divide_by_count)
    dtype = call.query.dtype  # autocast may have changed it
    call = replace(call, key=key_pages.to(dtype).transpose(1, 2), value=value_pages.to(dtype).transpose(1, 2))
    if backend == "triton" or (backend == "auto" and query.is_cuda):
        obstacle = kernels.page_obstacle(call, rule)
        if obstacle is None:
            return kernels.attend_pages(call, rule, block_table, page_norms)
        if backend == "triton":
            raise RuntimeError(f'backend="triton": {obstacle}; backend="auto" takes the plain PyTorch path')
        _say_once(obstacle)
    key, value = (_collect(x, block_table, call) for x in (call.key, call.value))
    return _run(replace(_placed(call), key=key, value=value), rule, 0.0, None, "reference")


def _placed(call: Call) -> Call:
    """With the positions of the queries, which kernels work out themselves, written down."""
    lengths, queries = call.visibility.key_lengths, call.query.shape[2]
    assert lengths is not None
    own = lengths[:, None] + torch.arange(-queries, 0, device=lengths.device)
    return replace(call, visibility=replace(call.visibility, query_positions=own))


def _collect(pages: Tensor, table: Tensor, call: Call) -> Tensor:
    """The pages of each sequence side by side, (B, Hk, L, D), zero beyond its length."""
    rows = pages[table.long().clamp(0, max(0, pages.shape[0] - 1))]  # (B, n, Hk, page, D)
    rows = rows.transpose(1, 2).flatten(2, 3)
    lengths = call.visibility.key_lengths
    assert lengths is not None
    inside = torch.arange(rows.shape[2], device=rows.device) < lengths[:, None]
    return torch.where(inside[:, None, :, None], rows, 0.0)


def _stand_in(pages: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return pages.new_empty(()).expand(*shape, pages.shape[3])


def _check_table(table: Tensor, lengths: Tensor, pages: Tensor) -> None:
    """Raise if a page that is needed is not there, where that costs nothing to know."""
    if values_known(table) and values_known(lengths):
        needed = torch.arange(table.shape[1]) * pages.shape[1] < lengths[:, None]
        wrong = table[needed & ((table < 0) | (table >= pages.shape[0]))]
        if wrong.numel():
            raise ValueError(f"block_table must lie in [0, {pages.shape[0] - 1}], the pages, got {wrong[0].item()}")


def _check_pages(query: Tensor, key: Tensor, value: Tensor, table: Tensor, norms: Tensor | None) -> None:
    for name, x in (("query", query), ("key_pages", key), ("value_pages", value)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            shape = "(batch, heads, length, head_dim)" if name == "query" else "(pages, page, heads, head_dim)"
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape) if isinstance(x, Tensor) else x!r}")
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype:
        shapes = f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        raise ValueError(f"key_pages and value_pages must be alike, got {shapes}")
    if not isinstance(table, Tensor) or table.is_floating_point() or table.dtype == torch.bool:
        raise TypeError(f"block_table must be an integer tensor, got {getattr(table, 'dtype', type(table).__name__)}")
    if table.ndim != 2 or table.shape[0] != query.shape[0]:
        raise ValueError(f"block_table must be ({query.shape[0]}, pages of a sequence), got {tuple(table.shape)}")
    if norms is None:
        return
    if norms.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"page_norms must be fp32, as a rounded norm is no bound, got {norms.dtype}")
    if norms.shape != (key.shape[0], key.shape[2]):
        raise ValueError(f"page_norms must be {(key.shape[0], key.shape[2])}, got {tuple(norms.shape)}")
    if key.shape[1] % PAGE_UNIT:
        raise ValueError(f"page_norms needs pages of a multiple of {PAGE_UNIT} positions, got {key.shape[1]}")
