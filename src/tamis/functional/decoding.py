"""Attention of a few queries to a paged cache: keys and values in pages that need not lie side by side."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tamis.attention.call import Pages, Window, check_call
from tamis.attention.rules import Entmax, Rule, bind
from tamis.functional.backends import choose
from tamis.kernels.attention.arguments import PAGE_UNIT
from tamis.transforms.parameters import values_known

_ENTMAX15 = Entmax(1.5)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    rule: Rule = _ENTMAX15,
    alibi_slopes: Tensor | None = None,
    window: Window | None = None,
    page_norms: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`tamis.attention` to a paged cache.

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
    _check_pages(query, key_pages, value_pages, block_table, page_norms)
    keys = (query.shape[0], key_pages.shape[2], block_table.shape[1] * key_pages.shape[1])
    call = check_call(
        query,
        _stand_in(key_pages, keys),  # of the right shape, and of no size
        _stand_in(value_pages, keys),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
        alibi_slopes=alibi_slopes,
        window=window,
        key_lengths=key_lengths,
    )
    _check_table(block_table, key_lengths, key_pages)
    dtype = call.query.dtype  # autocast may have changed it
    key, value = (pool.to(dtype).transpose(1, 2) for pool in (key_pages, value_pages))
    call = replace(call, key=key, value=value, pages=Pages(block_table, page_norms))
    bound = bind(rule, call)
    return choose("attend", call, bound, backend).attend(call, bound)


def _stand_in(pages: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return pages.new_empty(()).expand(*shape, pages.shape[3])


def _check_table(table: Tensor, lengths: Tensor, pages: Tensor) -> None:
    """Raise if a page that is needed is not there, where that costs nothing to know."""
    if values_known(table) and values_known(lengths):
        needed = torch.arange(table.shape[1]) * pages.shape[1] < lengths[:, None]
        wrong = table[needed & ((table < 0) | (table >= pages.shape[0]))]
        if wrong.numel():
            pool = (
                f"lie in [0, {pages.shape[0] - 1}], the pages" if pages.shape[0] else "name pages, and there are none"
            )
            raise ValueError(f"block_table must {pool}, got {wrong[0].item()}")


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
    if not isinstance(norms, Tensor) or norms.dtype not in (torch.float32, torch.float64):
        kind = norms.dtype if isinstance(norms, Tensor) else type(norms).__name__
        raise TypeError(f"page_norms must be an fp32 tensor, as a rounded norm is no bound, got {kind}")
    if norms.shape != (key.shape[0], key.shape[2]):
        raise ValueError(f"page_norms must be {(key.shape[0], key.shape[2])}, got {tuple(norms.shape)}")
    if key.shape[1] % PAGE_UNIT:
        raise ValueError(f"page_norms needs pages of a multiple of {PAGE_UNIT} positions, got {key.shape[1]}")
