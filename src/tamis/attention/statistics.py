"""What attention weights look like, gathered block by block: memory does not grow with the length squared."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.attention.blocks import Block
from tamis.attention.masks import Visibility


@dataclass(frozen=True)
class Statistics:
    """Per head, averaged over batch and queries; (H,) each, fp32.  Queries that see no key do not count."""

    support_size: Tensor
    """Mean number of keys with a non-zero weight."""
    zero_share: Tensor
    """Share of visible weights that are exactly 0."""
    entropy: Tensor
    """Mean entropy in nats of the weights scaled to sum 1; null rows do not count."""
    null_share: Tensor
    """Share of queries whose weights are all 0 although they see a key (possible for ReLU attention only)."""
    mean_distance: Tensor
    """Mean distance, in positions, of where the weight lies."""

    def __repr__(self) -> str:
        parts = (f"{field.name}={getattr(self, field.name).mean():.3g}" for field in fields(self))
        return f"Statistics({', '.join(parts)}; means over {self.support_size.numel()} heads)"


class StatisticsObserver:
    """Adds up blocks of weights; `result()` gives the averages."""

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self.sums = torch.zeros(6, num_heads, dtype=torch.float64, device=device)

    def __call__(self, block: Block, weights: Tensor) -> None:
        with torch.no_grad():
            self.sums[:, block.index[1]] += _sums(block.four_d(weights), block.visible(), block.distances())

    def result(self) -> Statistics:
        return _averages(self.sums)


def dense_statistics(weights: Tensor, visibility: Visibility) -> Statistics:
    """The same from all weights (B, H, Lq, Lk) at once, in plain operations."""
    everything = slice(None)
    keep, bias = visibility.block(everything, everything, everything)
    visible = torch.ones_like(weights, dtype=torch.bool) if keep is None else keep
    if bias is not None:
        visible = visible & (bias > float("-inf"))
    return _averages(_sums(weights.detach(), visible, visibility.distances(everything, everything)))


def row_statistics(rows: Tensor, visibility: Visibility) -> Statistics:
    """The same from the support size, entropy and mean distance of each row, (3, B, H, Lq)."""
    support, entropy, distance = rows
    visible = visibility.counts().expand(support.shape)
    seeing = visible > 0
    values = (support, visible, seeing, seeing & (support == 0.0), entropy, distance)
    return _averages(torch.stack([value.double().sum((0, 2)) for value in values]))


def _sums(weights: Tensor, visible: Tensor, distances: Tensor) -> Tensor:
    """Totals over batch and queries, (6, H): support, visible keys, rows, null rows, entropy, distance."""
    visible_count = visible.expand(weights.shape).sum(-1)  # (b, h, q)
    rows = visible_count > 0
    support = (weights != 0.0).sum(-1)
    alive = support > 0
    mass = weights.abs().sum(-1)
    p = weights.abs() / torch.where(alive, mass, 1.0).unsqueeze(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    distance = (p * distances.to(p.dtype)).sum(-1)
    values = (support, visible_count, rows, rows & ~alive, entropy, distance)
    return torch.stack([value.double().sum((0, 2)) for value in values])


def _averages(sums: Tensor) -> Statistics:
    support, visible, rows, null, entropy, distance = sums
    alive = rows - null
    return Statistics(
        support_size=_ratio(support, rows),
        zero_share=_ratio(visible - support, visible),
        entropy=_ratio(entropy, alive),
        null_share=_ratio(null, rows),
        mean_distance=_ratio(distance, alive),
    )


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return (total / count.clamp(min=1.0)).float()


class SparseWeights(NamedTuple):
    """The exact non-zeros of attention weights, in compressed rows over all (batch, head, query)."""

    crow: Tensor
    """(B * H * Lq + 1,): row r holds entries crow[r] up to crow[r + 1]."""
    col: Tensor
    """(non-zeros,): the key of each entry, ascending within a row."""
    val: Tensor
    """(non-zeros,)"""
    shape: tuple[int, int, int, int]
    """(B, H, Lq, Lk)"""

    def to_dense(self) -> Tensor:
        """Return the weights as (B, H, Lq, Lk)."""
        rows = torch.repeat_interleave(torch.arange(self.crow.numel() - 1, device=self.col.device), self.crow.diff())
        dense = self.val.new_zeros(self.crow.numel() - 1, self.shape[3])
        dense[rows, self.col] = self.val
        return dense.view(self.shape)

    def dense(self) -> Tensor:
        """`to_dense`, by the name that weights in a report have for it."""
        return self.to_dense()

    def to_torch(self) -> Tensor:
        """Return the weights as a tensor in torch's layout of compressed rows, (B * H * Lq, Lk)."""
        return torch.sparse_csr_tensor(self.crow, self.col, self.val, (self.crow.numel() - 1, self.shape[3]))

    def to_scipy(self) -> Any:
        """Return the weights as a `scipy.sparse.csr_array`, (B * H * Lq, Lk); half precision becomes fp32, scipy has
        none."""
        try:
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError("to_scipy needs scipy: pip install scipy") from error
        val = self.val.detach().cpu()
        val = val.float() if val.dtype in (torch.float16, torch.bfloat16) else val
        parts = (val.numpy(), self.col.cpu().numpy(), self.crow.cpu().numpy())
        return csr_array(parts, shape=(self.crow.numel() - 1, self.shape[3]))

    def __repr__(self) -> str:
        count, places = self.val.numel(), math.prod(self.shape)
        share = f" of {places}" + (f" ({count / places:.2%})" if places else "")
        return f"SparseWeights(shape={self.shape}, {count}{share} non-zero, {self.val.dtype}, {self.val.device})"


class SparseObserver:
    """Collects the non-zeros of blocks and puts them into the order of (B, H, Lq)."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.rows: list[Tensor] = [torch.empty(0, dtype=torch.long, device=device)]
        self.cols: list[Tensor] = [torch.empty(0, dtype=torch.long, device=device)]
        self.vals: list[Tensor] = [torch.empty(0, dtype=dtype, device=device)]

    def __call__(self, block: Block, weights: Tensor) -> None:
        _, heads, queries, _ = self.shape
        b, h, q, col = block.four_d(weights).nonzero(as_tuple=True)
        starts = [index.start for index in block.index]
        self.rows.append(((b + starts[0]) * heads + (h + starts[1])) * queries + (q + starts[2]))
        self.cols.append(col + block.keys.start)
        self.vals.append(block.four_d(weights)[b, h, q, col].to(self.dtype))

    def result(self) -> SparseWeights:
        rows, cols, vals = torch.cat(self.rows), torch.cat(self.cols), torch.cat(self.vals)
        order = torch.argsort(rows, stable=True)
        return _compressed(rows, cols[order], vals[order], self.shape)


def sparse_weights(weights: Tensor) -> SparseWeights:
    """The non-zeros of all weights (B, H, Lq, Lk)."""
    batch, heads, queries, keys = weights.shape
    flat = weights.reshape(batch * heads * queries, keys)
    rows, cols = flat.nonzero(as_tuple=True)
    return _compressed(rows, cols, flat[rows, cols], (batch, heads, queries, keys))


def _compressed(rows: Tensor, cols: Tensor, vals: Tensor, shape: tuple[int, int, int, int]) -> SparseWeights:
    count = shape[0] * shape[1] * shape[2]
    crow = torch.zeros(count + 1, dtype=torch.long, device=rows.device)
    crow[1:] = torch.bincount(rows, minlength=count).cumsum(0)
    return SparseWeights(crow, cols, vals, shape)
