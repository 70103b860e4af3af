"""Cached keys that an ALiBi bias puts out of reach, known before their scores are.

A weight of entmax is exactly 0 where the score is 1 / (alpha - 1) or more below the largest, which is at least that of
the query's own key.  As q k <= |q| |k|, a key at distance d has no weight under a slope m if

    scale |q| |k| - m d  <=  scale q k_own - 1 / (alpha - 1)

With the largest norm of each page of keys at hand, that takes one number a page where scores take all of its keys.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tamis import functional
from tamis.attention.rules import Rule

PAGE = 64
"""Keys whose largest norm stands for all of them."""
ROUNDING = 1 / 64
"""The error of |q| |k|: more than autocast to bf16 makes of it."""


def attention_in_reach(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rule: Rule,
    page_norms: Tensor,
    alibi_slopes: Tensor,
    **options: Any,
) -> Tensor:
    """:func:`tamis.attention` of the last position alone; heads with a short reach look at the last keys only.

    Args:
        query: (B, H, 1, D); as many heads as keys have.
        rule: one that has a margin.
        page_norms: (B, H, pages), no less than the norm of any key in the page.
        alibi_slopes: (H,).
    """
    margin = rule.margin()
    assert margin is not None
    firsts = first_in_reach(query, key, page_norms, margin, alibi_slopes).tolist()
    parts, start = [], 0
    for far, some in groupby(firsts, lambda first: first < key.shape[2] // 2):
        group = list(some)
        heads, keys = slice(start, start + len(group)), slice(0 if far else min(group), None)
        parts.append(
            functional.attention(
                query[:, heads],
                key[:, heads, keys],
                value[:, heads, keys],
                rule=rule.of_heads(heads),
                alibi_slopes=alibi_slopes[heads],
                **options,
            )
        )
        start += len(group)
    return torch.cat(parts, 1)


def first_in_reach(query: Tensor, key: Tensor, page_norms: Tensor, margin: float | Tensor, slopes: Tensor) -> Tensor:
    """The first key (H,) of the first page in which a query (B, H, 1, D) may have a weight; 0 without a slope."""
    dtype, (keys, width) = page_norms.dtype, key.shape[2:]
    query, own = query[:, :, 0].to(dtype) / math.sqrt(width), key[:, :, -1].to(dtype)  # (B, H, D)
    length = query.norm(dim=-1, keepdim=True)
    slack = torch.as_tensor(margin, dtype=dtype).reshape(-1, 1)
    threshold = (query * own).sum(-1, keepdim=True) - slack - ROUNDING * length * own.norm(dim=-1, keepdim=True)
    nearest = (keys - PAGE * torch.arange(1, page_norms.shape[2] + 1)).clamp(min=0)  # distance of a page's last key
    highest = (1.0 + ROUNDING) * length * page_norms - slopes[:, None] * nearest
    # Not by the opposite comparison: a NaN is in reach.  A slope below 0 favours what is far.
    reached = ~(highest <= threshold) | (slopes < 0.0)[:, None]
    return PAGE * reached.any(0).byte().argmax(-1)
