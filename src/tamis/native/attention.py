"""Attention by the C++ kernels: plain tensors in, plain tensors out.  What is computed, docs/cpu-attention.md says."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.native import library
from tamis.native.arguments import RULES, Arguments, Strided, Struct

UNIT = 16
"""Head sizes are filled up to multiples of this: whole vectors, whatever the instruction set."""
KEEP = 1 << 22
"""Numbers of four bytes that even a small call may keep for the backward pass."""
SHARE = 2.4
"""How many a larger one may, over those of queries and outputs: both passes then take 1.5 times SDPA's memory."""
_SPARE = 64  # numbers behind the last that a vector may read


class Results(NamedTuple):
    """What a forward pass returns."""

    out: Tensor
    kept: Tensor
    """Weights and their keys, row by row, wherever there was room."""
    places: Tensor
    """(B, H, Lq): where a row begins in `kept`; -1: nowhere."""
    counts: Tensor
    """(B, H, Lq): the non-zeros of each row; -1 - count where a row is kept with its zeros."""
    statistics: Tensor
    """(3, B, H, Lq): support size, entropy and mean distance of each row, if counted."""


class Gradients(NamedTuple):
    """What a backward pass returns; gradients that nobody needs are empty."""

    query: Tensor
    key: Tensor
    value: Tensor
    e: Tensor
    slopes: Tensor


def empty_results(a: Arguments, train: bool, counted: bool) -> Results:
    """Memory for all of them."""
    batch, heads, queries = a.rows
    like = a.query
    # In the layout that merges heads for free.
    out = like.new_empty((batch, queries, heads, a.value.shape[3])).transpose(1, 2)
    rows = a.rows if train else (0, 0, 0)
    kept = _capacity(a) + _SPARE if train else 0
    return Results(
        out=out,
        kept=like.new_empty((kept,), dtype=torch.int32),
        places=like.new_empty(rows, dtype=torch.int64),
        counts=like.new_empty(rows, dtype=torch.int32),
        statistics=like.new_empty((3, *(a.rows if counted else (0, 0, 0))), dtype=torch.float32),
    )


def empty_gradients(a: Arguments, with_e: bool, with_slopes: bool) -> Gradients:
    """Memory for all of them."""

    def of(x: Tensor | None, wanted: bool) -> Tensor:
        return a.query.new_empty(x.shape if x is not None and wanted else (0,), dtype=torch.float32)

    return Gradients(
        torch.empty_like(a.query),
        torch.empty_like(a.key),
        torch.empty_like(a.value),
        of(a.e, with_e),
        of(a.alibi_slopes, with_slopes),
    )


def forward(a: Arguments, train: bool, counted: bool) -> Results:
    """The output; if `train` also what the backward pass needs, if `counted` the statistics of each row."""
    results = empty_results(a, train, counted)
    call = _Call(a, training=train)
    out = call.writes("out", results.out)
    if train:
        call.keeps(results)
    if counted:
        call.struct.statistics = results.statistics.data_ptr()
    call.run("tamis_attention_forward")
    out.finish()
    return results


def backward(
    a: Arguments, grad: Tensor, kept: Tensor, places: Tensor, counts: Tensor, with_e: bool, with_slopes: bool
) -> Gradients:
    """The gradients of the inputs for that of the output."""
    results = empty_gradients(a, with_e, with_slopes)
    call = _Call(a, training=True)
    call.reads("grad", _filled_up(grad))
    call.keeps(Results(grad, kept, places, counts, grad))
    outputs = [
        call.writes(f"d_{name}", gradient) for name, gradient in zip(("query", "key", "value"), results, strict=False)
    ]
    rows = {
        name: a.query.new_empty(a.rows, dtype=torch.float32)
        for name, wanted in (("d_e", with_e), ("d_slopes", with_slopes))
        if wanted
    }
    for name, x in rows.items():
        setattr(call.struct, name, x.data_ptr())
    call.run("tamis_attention_backward")
    for output in outputs:
        output.finish()
    if with_e:
        assert a.e is not None
        _add_up(rows["d_e"], results.e[..., 0])
    if with_slopes:
        assert a.alibi_slopes is not None
        _add_up(rows["d_slopes"], results.slopes[..., None])
    return results


def collect(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The non-zero weights in compressed rows: crow, col and val of `SparseWeights`."""
    results = empty_results(a, train=True, counted=False)
    call = _Call(a, training=True)
    out = call.writes("out", results.out)
    call.keeps(results)
    call.run("tamis_attention_forward")
    del out
    counts = results.counts.long().flatten()
    crow = torch.zeros(counts.numel() + 1, dtype=torch.long)
    torch.cumsum(torch.where(counts < 0, -1 - counts, counts), 0, out=crow[1:])
    col, val = torch.empty(int(crow[-1]), dtype=torch.long), torch.empty(int(crow[-1]))
    call.run("tamis_attention_collect", crow.data_ptr(), col.data_ptr(), val.data_ptr())
    return crow, col, val


class _Output:
    """Memory that a kernel writes fp32 of whole vectors to, and the tensor that is to hold it in the end."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        plain = result.dtype == torch.float32 and result.shape[3] % UNIT == 0 and result.stride(3) == 1
        self.memory = result
        if not (plain and _has_rows(result)):
            shape = (*result.shape[:3], _up(result.shape[3]))
            self.memory = torch.empty(shape, dtype=torch.float32)

    def finish(self) -> None:
        if self.memory is not self.result:
            self.result.copy_(self.memory[..., : self.result.shape[3]])


class _Call:
    """The struct of a call, and all tensors that it points into."""

    def __init__(self, a: Arguments, training: bool) -> None:
        self.struct = struct = Struct()
        self.alive: list[Tensor] = []
        batch, heads, queries = a.rows
        struct.batches, struct.heads, struct.queries = batch, heads, queries
        struct.key_heads, struct.keys = a.key.shape[1], a.num_keys
        struct.scale, struct.bias, struct.slope = a.scale, a.bias, a.slope
        struct.rule = RULES.index(a.rule)
        struct.left, struct.right = a.left, a.right
        query, value = _filled_up(a.query), _filled_up(a.value)
        self.reads("query", query)
        self.reads("value", value)
        struct.dim, struct.value_dim = query.shape[3], value.shape[3]
        struct.key_step = 1
        if not training and _lies_across(a.key):  # as in caches; few queries need no more
            struct.key_step = a.key.stride(3)
            self.reads("key", a.key)
        else:
            self.reads("key", _filled_up(a.key))
        self._rows("e", a.e, a.rows)
        self._rows("row_scale", a.row_scale, a.rows)
        self._mask(a)
        if a.alibi_slopes is not None:
            slopes = a.alibi_slopes.expand(batch, heads)
            struct.slopes = self.address(slopes)
            struct.slopes_batch, struct.slopes_head = slopes.stride()
        self._positions("query_positions", a.query_positions)
        self._positions("key_positions", a.key_positions)
        struct.lengths = self.address(a.key_lengths)
        struct.cu_queries, struct.cu_keys = self.address(a.cu_q), self.address(a.cu_k)
        struct.segments = 0 if a.cu_q is None else a.cu_q.shape[0] - 1
        if a.table is not None:
            struct.pages, struct.pages_batch, struct.page = self.address(a.table), a.table.shape[1], a.key.shape[2]
        if a.seed is not None:
            struct.dropout, struct.seed = a.dropout_p, int(a.seed.item())
            struct.first_head, struct.first_query = a.first_head, a.first_query

    def reads(self, name: str, x: Tensor) -> None:
        self.alive.append(x)
        setattr(self.struct, name, Strided(x.data_ptr(), *x.stride()[:3]))

    def writes(self, name: str, x: Tensor) -> _Output:
        output = _Output(x)
        self.reads(name, output.memory)
        return output

    def keeps(self, results: Results) -> None:
        struct = self.struct
        struct.kept, struct.capacity = results.kept.data_ptr(), max(0, results.kept.numel() - _SPARE)
        struct.places, struct.counts = results.places.data_ptr(), results.counts.data_ptr()

    def run(self, name: str, *more: int) -> None:
        native = library.load()
        assert native is not None
        if getattr(native, name)(ctypes.byref(self.struct), *more):
            raise MemoryError(f"{name}: memory ran out")

    def address(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        self.alive.append(x if x.is_contiguous() or x.ndim == 2 else x.contiguous())
        return self.alive[-1].data_ptr()

    def _rows(self, name: str, x: Tensor | None, rows: tuple[int, int, int]) -> None:
        if x is not None:
            x = x.detach().float().expand(*rows, 1)
            self.alive.append(x)
            setattr(self.struct, name, Strided(x.data_ptr(), *x.stride()[:3]))

    def _positions(self, name: str, x: Tensor | None) -> None:
        if x is not None:
            x = x.contiguous()
            setattr(self.struct, name, self.address(x))
            setattr(self.struct, f"{name}_batch", x.shape[1] if x.shape[0] > 1 else 0)

    def _mask(self, a: Arguments) -> None:
        if a.attn_mask is None:
            return
        mask = a.attn_mask if a.attn_mask.dtype == torch.bool else a.attn_mask.float()
        mask = mask.expand(*a.rows, a.num_keys)
        self.alive.append(mask)
        struct = self.struct
        struct.mask, struct.mask_kind = mask.data_ptr(), 1 if mask.dtype == torch.bool else 2
        struct.mask_batch, struct.mask_head, struct.mask_row, struct.mask_key = mask.stride()


def _capacity(a: Arguments) -> int:
    """Numbers that are kept for the backward pass at most.  What does not fit is solved for again."""
    batch, heads, queries = a.rows
    rows = batch * heads * queries
    return min(rows * a.num_keys, max(KEEP, int(SHARE * (rows * (a.query.shape[3] + a.value.shape[3])))))


def _up(dim: int) -> int:
    return -(-dim // UNIT) * UNIT


def _has_rows(x: Tensor) -> bool:
    """Whether no two rows share memory, so that they may be written."""
    return all(stride > 0 or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _filled_up(x: Tensor) -> Tensor:
    """fp32, whole vectors, numbers of a row side by side."""
    x = x.float()
    if x.shape[3] % UNIT:
        return F.pad(x, (0, -x.shape[3] % UNIT))
    return x if x.stride(3) == 1 else x.contiguous()


def _lies_across(key: Tensor) -> bool:
    """Whether keys lie in memory with their positions last."""
    fits = key.dtype == torch.float32 and key.shape[3] % UNIT == 0
    return fits and key.stride(2) == 1 and key.stride(3) != 1


def _add_up(rows: Tensor, out: Tensor) -> None:
    """Sum rows (B, H, Lq) over the dimensions in which `out` has size 1."""
    native = library.load()
    assert native is not None
    totals = torch.zeros(out.shape, dtype=torch.float64)
    strides = [0 if size == 1 else stride for size, stride in zip(totals.shape, totals.stride(), strict=True)]
    native.tamis_attention_total(rows.data_ptr(), *rows.shape, totals.data_ptr(), *strides)
    out.copy_(totals)
