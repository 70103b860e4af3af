"""Launching the kernels of `attend`: block sizes, strides, and memory for the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.kernels import attend
from tamis.kernels.arguments import Arguments, empty_gradients, empty_results


class Tiles(NamedTuple):
    """Rows and columns of a tile of scores, the warps and pipeline stages of its program, and the tiles it keeps."""

    rows: int
    cols: int
    warps: int
    stages: int
    kept: int = 0


# The tables below were measured on an H200 (docs/kernels.md) at head size 64; larger heads and fp32 take smaller tiles
# so that everything stays in registers.


def forward_tiles(a: Arguments) -> Tiles:
    """All scores of a block of queries in registers up to 256 keys, in a loop beyond."""
    keys, heavy = a.key.shape[2], a.rule == "power"  # whose temporaries take many registers
    if a.query.dtype == torch.float32 or a.head_dim > 128:
        tiles = _small_tiles(a)
        if a.head_dim <= 64 and keys <= 128:
            tiles = Tiles(32, min(64, _power_of_two(keys)), 4, 1, triton.cdiv(keys, 64))
    elif keys <= 32:
        tiles = Tiles(32, _power_of_two(keys), 1, 1, 1)
    elif keys <= 64:
        tiles = Tiles(64, 32, 4, 1, 2) if heavy else Tiles(64, 64, 4, 1, 1)
    elif keys <= 128:
        tiles = Tiles(64, 64, 4, 1, 2) if heavy else Tiles(128 if a.head_dim <= 64 else 64, 128, 4, 1, 1)
    elif keys <= 256 and a.is_entmax and a.head_dim <= 64:
        tiles = Tiles(64, 128, 4, 1, 2)
    else:
        tiles = Tiles(64, 64, 4, 3 if a.head_dim <= 64 else 2)
    if a.cu_q is not None:  # their lengths are on the device
        tiles = tiles._replace(kept=0)
    return tiles._replace(rows=min(tiles.rows, _power_of_two(a.query.shape[2])))


def whole_tiles(a: Arguments) -> Tiles:
    """For all gradients in one program."""
    cols = _power_of_two(a.key.shape[2])
    rows = min(32 if a.query.dtype == torch.float32 else 128, cols, _power_of_two(a.query.shape[2]))
    return Tiles(rows, cols, 8 if rows * cols > 8192 else 4 if cols > 32 else 2, 1)


def split_tiles(a: Arguments) -> Tiles:
    """For d query with keys in a loop, and for d key and d value with queries in a loop."""
    if a.query.dtype == torch.float32 or a.head_dim > 128:
        return _small_tiles(a)
    return Tiles(64, 64, 4, 3 if a.head_dim <= 64 else 2)


def _small_tiles(a: Arguments) -> Tiles:
    return Tiles(16 if a.query.dtype == torch.float32 and a.head_dim > 128 else 32, 32, 4, 1)


def _power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def forward(a: Arguments, train: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the average of the values under the slopes where the backward pass needs it, and (m, c, n)."""
    out, out2, rows = empty_results(a, train)
    if out.numel() == 0 or a.key.shape[2] == 0:
        return out.zero_(), out2.zero_(), rows.zero_()
    if a.cu_q is not None:
        out.zero_()  # tokens may follow the last packed sequence
    launch = Launch(a, forward_tiles(a))
    blocks = launch.query_blocks
    attend.forward[(blocks * launch.heads,)](
        a.query, a.key, a.value, out, out2, *rows, a.row_scale, a.e, *launch.strides(a.query, a.key, a.value, out),
        launch.scale_strides, *launch.shared, *launch.counts, blocks,
        **launch.constants, **launch.options, TILES=launch.tiles.kept, KEEP_O2=out2.numel() > 0,
        TOLERANCE=_tolerance(a),
    )  # fmt: skip
    return out, out2, rows


def _tolerance(a: Arguments) -> float:
    """The error of a row's mass from which one more step brings the weights well below the rounding of the dtype."""
    return {torch.float32: 1e-4, torch.float16: 3e-3}.get(a.query.dtype, 1e-2)


def backward(
    a: Arguments, grad: Tensor, out2: Tensor, rows: Tensor, with_e: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, per head, alpha."""
    dq, dk, dv, de = empty_gradients(a, with_e)
    if grad.numel() == 0 or a.key.shape[2] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), de.zero_()
    if a.cu_q is not None:
        dq.zero_(), dk.zero_(), dv.zero_()
    if a.whole_backward:
        partial = _backward_whole(a, grad, dq, dk, dv, rows, with_e)
    else:
        partial = _backward_split(a, grad, dq, dk, dv, out2, rows, with_e)
    if with_e:
        torch.sum(partial.view(a.query.shape[0], a.query.shape[1], -1), (0, 2), out=de)
    return dq, dk, dv, de


def _backward_whole(
    a: Arguments, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, rows: Tensor, with_e: bool
) -> Tensor:
    launch = Launch(a, whole_tiles(a))
    one = a.query.shape[1] == a.key.shape[1] and a.query.shape[2] <= launch.tiles.rows
    de = torch.empty(launch.heads, dtype=torch.float32, device=grad.device)
    attend.backward_whole[(launch.key_heads,)](
        a.query, a.key, a.value, grad, dq, dk, dv, de, *rows, a.row_scale, a.e,
        *launch.strides(a.query, a.key, a.value, grad, dq, dk, dv), launch.scale_strides, *launch.shared,
        *launch.counts, **launch.constants, WITH_E=with_e, ONE_BLOCK=one, **launch.options,
    )  # fmt: skip
    return de


def _backward_split(
    a: Arguments, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, out2: Tensor, rows: Tensor, with_e: bool
) -> Tensor:
    launch = Launch(a, split_tiles(a))
    blocks = launch.query_blocks
    de = torch.empty(blocks * launch.heads, dtype=torch.float32, device=grad.device)
    delta = torch.empty(rows.shape[1:], dtype=torch.float32, device=grad.device)
    attend.backward_queries[(blocks * launch.heads,)](
        a.query, a.key, a.value, grad, dq, de, out2, delta, *rows, a.row_scale, a.e,
        *launch.strides(a.query, a.key, a.value, grad, dq, out2), launch.scale_strides, *launch.shared, *launch.counts,
        blocks, **launch.constants, WITH_E=with_e, **launch.options,
    )  # fmt: skip
    blocks = launch.key_blocks
    attend.backward_keys[(blocks * launch.key_heads,)](
        a.query, a.key, a.value, grad, dk, dv, delta, *rows, a.row_scale, a.e,
        *launch.strides(a.query, a.key, a.value, grad, dk, dv), launch.scale_strides, *launch.shared, *launch.counts,
        blocks, **launch.constants, **launch.options,
    )  # fmt: skip
    return de


@dataclass(frozen=True)
class Launch:
    """What every kernel gets, in the order of their parameters."""

    a: Arguments
    tiles: Tiles

    @property
    def heads(self) -> int:
        return self.a.query.shape[0] * self.a.query.shape[1]

    @property
    def key_heads(self) -> int:
        return self.a.query.shape[0] * self.a.key.shape[1]

    @property
    def query_blocks(self) -> int:
        return triton.cdiv(self.a.query.shape[2], self.tiles.rows) + self._sequences

    @property
    def key_blocks(self) -> int:
        return triton.cdiv(self.a.key.shape[2], self.tiles.cols) + self._sequences

    @property
    def _sequences(self) -> int:
        """Packed sequences, each of which may end in a block that is not full."""
        return 0 if self.a.cu_q is None else self.a.cu_q.shape[0] - 1

    @staticmethod
    def strides(*tensors: Tensor) -> list[tuple[int, ...]]:
        return [x.stride() for x in tensors]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        scale = self.a.row_scale
        return (0, 0, 0) if scale is None else _broadcast_strides(scale)[:3]

    @functools.cached_property
    def shared(self) -> tuple[Any, ...]:
        a = self.a
        left, right = a.left, a.right
        mask_kind = 0 if a.attn_mask is None else 1 if a.attn_mask.dtype == torch.bool else 2
        mask = a.attn_mask.view(torch.int8) if a.attn_mask is not None and mask_kind == 1 else a.attn_mask
        sight = attend.Sight(
            mask=mask,
            mask_strides=(0, 0, 0, 0) if mask is None else _broadcast_strides(mask),
            lengths=a.key_lengths,
            slopes=a.alibi_slopes,
            slopes_stride=_batch_stride(a.alibi_slopes),
            query_positions=a.query_positions,
            query_positions_stride=_batch_stride(a.query_positions),
            key_positions=a.key_positions,
            key_positions_stride=_batch_stride(a.key_positions),
            left=left,
            right=right,
            mask_kind=_constant(mask_kind),
            has_lengths=_constant(a.key_lengths is not None),
            has_slopes=_constant(a.alibi_slopes is not None),
            has_query_positions=_constant(a.query_positions is not None),
            has_key_positions=_constant(a.key_positions is not None),
            has_left=_constant(left >= 0),
            has_right=_constant(right >= 0),
        )
        p = a.dropout_p
        dropout = attend.Dropout(
            a.seed, min(int(p * 2**32), 2**32 - 1), 1.0 / (1.0 - p) if p < 1.0 else 0.0, _constant(p > 0.0)
        )
        count = self._sequences
        packed = attend.Packed(
            a.cu_q, a.cu_k, count, _constant(count > 0), _constant(triton.next_power_of_2(max(1, count)))
        )
        return sight, dropout, packed, a.e_value, a.scale, a.bias

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        a = self.a
        return a.query.shape[1], a.query.shape[1] // a.key.shape[1], a.query.shape[2], a.key.shape[2]

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        a = self.a
        d, dv = a.query.shape[3], a.value.shape[3]
        return {
            "D": d,
            "DW": _power_of_two(d),
            "DV": dv,
            "DVW": _power_of_two(dv),
            "BM": self.tiles.rows,
            "BN": self.tiles.cols,
            "RULE": a.rule,
            "NORMALISED": a.is_entmax,
            "HAS_E": a.e is not None,
            "HAS_SCALES": a.row_scale is not None,
            "FAST": a.query.dtype != torch.float32 and a.query.device.type == "cuda",
            "PRECISION": "tf32x3",  # of fp32 products: as accurate as fp32 itself, and on tensor cores
        }

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}


# Making one takes longer than it should, and a launch has a dozen.  Typed: 1 and True are not the same constant.
_constant = functools.lru_cache(maxsize=None, typed=True)(tl.constexpr)


def _broadcast_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
