"""What the fused kernels are given: the arguments of the custom operations, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.attention.backend import schema_of
from tamis.kernels.runtime.sizes import ceil_div

ENTMAX_RULES = ("squares", "identity", "power")
RECTIFIED_RULES = ("relu", "squared_relu")
ELEMENTWISE_RULES = (*RECTIFIED_RULES, "leaky_relu", "gelu", "sigmoid")


class Arguments(NamedTuple):
    """First what has a gradient, then other tensors, then numbers: the schema of the operations is read off here."""

    query: Tensor
    key: Tensor
    value: Tensor
    e: Tensor | None
    """alpha - 1 of each head, (H,) fp32; None: `e_value` for all."""
    row_scale: Tensor | None
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    alibi_slopes: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None
    rule: str
    e_value: float
    bias: float
    scale: float
    left: int
    """Positions seen before the query's own, -1 = no bound; and after it, where 0 is a causal mask."""
    right: int
    dropout_p: float
    counted: bool = False
    """Whether support size, entropy and distance of every row are wanted."""

    @property
    def is_entmax(self) -> bool:
        return self.rule in ENTMAX_RULES

    @property
    def head_dim(self) -> int:
        """The larger of those of keys and values."""
        return max(self.query.shape[3], self.value.shape[3])

    @property
    def mask_by_query(self) -> bool:
        """Whether there is a mask that differs between queries: such a tile of it takes as many loads as scores."""
        return self.attn_mask is not None and self.attn_mask.shape[2] > 1

    @property
    def is_long(self) -> bool:
        """Whether tiles of which no key is hidden by its place are worth a loop of their own.  Of packed sequences only
        the device knows how long they are."""
        return self.cu_q is None and self.key.shape[2] >= LONG

    @property
    def is_rectified(self) -> bool:
        return self.rule in RECTIFIED_RULES

    @property
    def is_listed(self) -> bool:
        """Whether there may be tiles without weights, and skipping them is worth it."""
        return self.is_long and (self.is_entmax or self.is_rectified)

    @property
    def is_decoding(self) -> bool:
        """Whether, without a gradient, keys are split among programs: there are few queries to split instead."""
        plain = not self.counted and self.dropout_p == 0.0 and self.cu_q is None
        queries, keys = self.query.shape[2], self.key.shape[2]
        return plain and queries <= FEW and 4 * keys >= MANY * max(4, queries)

    @property
    def adds_mask(self) -> bool:
        return self.attn_mask is not None and self.attn_mask.dtype != torch.bool

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to the scores."""
        return self.alibi_slopes is not None or self.adds_mask

    @property
    def is_near(self) -> bool:
        """Whether far keys can be told to have no weight: a linear bias counts against them, and nothing for them."""
        where = self.query_positions is None and self.key_positions is None
        return self.alibi_slopes is not None and where and not self.adds_mask

    @property
    def whole_backward(self) -> bool:
        """All gradients of a key head in one program: its keys fit one tile, and its accumulators the registers."""
        if self.query.dtype == torch.float32:
            most = 64 if self.head_dim <= 64 else 0
        else:
            most = 128 if self.head_dim <= 64 else 64 if self.head_dim <= 128 else 0
        return self.cu_q is None and not self.is_long and self.key.shape[2] <= most

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tiles that a loop goes through; larger heads and fp32 need the registers."""
        if self.query.dtype == torch.float32 or self.head_dim > 128:
            return 16 if self.query.dtype == torch.float32 and self.head_dim > 128 else 32, 32
        return 64, 64

    @property
    def tile_bits(self) -> tuple[int, int, int, int]:
        """(B, H, blocks of queries, words of 32 tiles)."""
        rows, cols = self.tile
        batch, heads, queries = self.query.shape[:3]
        return batch, heads, ceil_div(queries, rows), ceil_div(self.key.shape[2], 32 * cols)


LONG = 1024
"""Keys from which on loops are split, and tiles without weights skipped."""
FEW, MANY = 16, 512
"""Queries up to which decoding has kernels of its own, and the keys from which on: for four queries or fewer; for more,
as many times more."""
PAGE_UNIT = 16
"""Keys that decoding skips together; with bounds of their norms, a page is a number of these."""
SCHEMA = schema_of(Arguments)
"""The schema of the custom operations, which take the arguments one by one."""
TENSORS = SCHEMA.count("Tensor")
"""So many of the arguments come first and are tensors."""


class Results(NamedTuple):
    """What a forward pass returns."""

    out: Tensor
    out2: Tensor
    """The average of the values under the slopes, where the backward pass needs it."""
    rows: Tensor
    """(m, c, n) of each row."""
    bits: Tensor
    """Which tiles of long rows hold weights."""
    statistics: Tensor
    """If counted: support size, entropy and mean distance of each row."""


def empty_output(a: Arguments) -> Tensor:
    """In the layout that merges heads for free."""
    batch, heads, queries = a.query.shape[:3]
    return a.query.new_empty((batch, queries, heads, a.value.shape[3])).transpose(1, 2)


def empty_results(a: Arguments, train: bool) -> Results:
    """Memory for the output and for all else."""
    batch, heads, queries = a.query.shape[:3]
    out = empty_output(a)
    wanted = train and a.is_entmax and not a.whole_backward
    shape = (batch, queries, heads, a.value.shape[3]) if wanted else (0, 0, 0, 0)
    out2 = a.query.new_empty(shape, dtype=torch.float32).transpose(1, 2)
    rows = a.query.new_empty((3, batch, heads, queries) if a.is_entmax else (3, 0, 0, 0), dtype=torch.float32)
    listed = a.is_listed and (a.is_entmax or train)
    bits = a.query.new_empty(a.tile_bits if listed else (0, 0, 0, 0), dtype=torch.int32)
    statistics = a.query.new_empty((3, batch, heads, queries) if a.counted else (3, 0, 0, 0), dtype=torch.float32)
    return Results(out, out2, rows, bits, statistics)


def empty_gradients(a: Arguments, with_e: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the gradients of query, key, value and, if wanted, e."""
    de = a.query.new_empty((a.query.shape[1] if with_e else 0,), dtype=torch.float32)
    return torch.empty_like(a.query), torch.empty_like(a.key), torch.empty_like(a.value), de
