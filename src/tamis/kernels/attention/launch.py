"""Launching the kernels of `forward`, `scan` and `backward`: strides, and memory for the results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.kernels.attention import tuning
from tamis.kernels.attention.arguments import TENSORS, Arguments, Results, empty_gradients, empty_results
from tamis.kernels.attention.device import backward as backward_kernels
from tamis.kernels.attention.device import forward as forward_kernels
from tamis.kernels.attention.device import scan as scan_kernels
from tamis.kernels.attention.tuning import Tiles
from tamis.kernels.device.tiles import Dropout, Packed, Sight
from tamis.kernels.runtime.launch import Launch, constant, layouts, planned
from tamis.kernels.runtime.sizes import ceil_div, next_power_of_two, power_of_two


def forward(a: Arguments, train: bool) -> Results:
    results = out, out2, rows, bits, statistics = empty_results(a, train)
    if out.numel() == 0 or a.key.shape[2] == 0:
        return Results(*(x.zero_() for x in results))
    if a.cu_q is not None:
        out.zero_(), statistics.zero_()  # tokens may follow the last packed sequence

    scanned = a.is_listed and a.is_entmax
    if scanned:
        _scan(a, rows, bits)
    noted = None if scanned or bits.numel() == 0 else bits.zero_()

    def plan() -> Plan:
        tiles = tuning.forward_tiles(a)
        blocks = _query_blocks(a, tiles)
        constants: dict[str, Any] = {"TILES": tiles.kept, "KEEP_O2": out2.numel() > 0, "LISTED": scanned}
        tolerance = tuning.tolerance(a)
        constants |= {"TOLERANCE": tolerance, "CLOSE": tuning.close(a) if tiles.kept else tolerance**0.5}
        constants |= {"COUNTED": a.counted, "SKIPS": a.is_long and a.is_rectified, "ROWS": min(a.tile[0], tiles.rows)}
        constants["HELD"] = int(tuning.can_hold(a) and (a.is_entmax or a.head_dim <= 64))
        strided = (a.query, a.key, a.value, out)
        return Plan(forward_kernels.forward, a, tiles, blocks * _heads(a), strided, constants, (blocks,))

    lists = _listed(a, bits, by_key=False) if scanned else (None, None)
    planned(("forward", train, layout_of(a)), plan).launch(
        a, (a.query, a.key, a.value, out, out2, *rows, statistics, *lists, noted, a.row_scale, a.e)
    )
    return results


def _scan(a: Arguments, rows: Tensor, bits: Tensor) -> None:
    """Fill `bits`, and the first two of `rows` with what the solution starts from."""
    tiles = tuning.scan_tiles(a)
    blocks = ceil_div(a.query.shape[2], tiles.rows)
    tasks = blocks * _heads(a)
    programs = min(tasks, tuning.scan_programs())
    norms = _key_norms(a) if a.is_near else None

    def plan() -> Plan:
        constants = {"BN": a.tile[1], "STEP": tiles.cols, "HELD": tiles.held, "ROWS": a.tile[0]}
        constants |= {"SWEEPS": 2, "NEAR": norms is not None}
        return Plan(scan_kernels.scan, a, tiles, programs, (a.query, a.key), constants, (blocks, tasks))

    num_tiles = ceil_div(a.key.shape[2], tiles.cols) * (tiles.cols // a.tile[1])
    maxima = torch.empty(programs * num_tiles * tiles.rows, dtype=torch.float32, device=bits.device)
    planned(("scan", layout_of(a, rows)), plan).launch(a, (a.query, a.key, rows[0], rows[1], bits, maxima, norms, a.e))


def _key_norms(a: Arguments) -> Tensor:
    """The largest norm of a key in each head."""
    d, blocks = a.key.shape[3], ceil_div(a.key.shape[2], 128)
    norms = torch.empty((_key_heads(a), blocks), dtype=torch.float32, device=a.key.device)
    numbers = (a.key.stride(), a.key.shape[1], a.key.shape[2], blocks)
    key = ("norms", a.key.device, a.key.dtype, a.key.data_ptr() % 16, d, norms.shape, numbers)
    launch = planned(key, lambda: Launch(scan_kernels.key_norms, norms.numel(), (d, power_of_two(d), 128), {}))
    launch(a.key.device, (a.key, norms, *numbers))
    return norms.amax(1)


def _listed(a: Arguments, bits: Tensor, *, by_key: bool) -> tuple[Tensor | None, Tensor | None]:
    """The tiles of long rows that hold weights, for each block of queries or for each of keys, and their counts."""
    if not a.is_listed:
        return None, None
    row_blocks, num_tiles = bits.shape[2], ceil_div(a.key.shape[2], a.tile[1])
    lines = _heads(a) * (num_tiles if by_key else row_blocks)
    width = row_blocks if by_key else num_tiles
    lists = torch.empty((lines, width), dtype=torch.int16 if width < 2**15 else torch.int32, device=bits.device)
    counts = torch.empty(lines, dtype=torch.int32, device=bits.device)
    key = ("lists", bits.device, lists.dtype, lines, by_key)
    launch = planned(key, lambda: Launch(scan_kernels.list_tiles, lines, (by_key,), {"num_warps": 1}))
    launch(bits.device, (bits, lists, counts, row_blocks, num_tiles))
    return lists, counts


def backward(
    a: Arguments, grad: Tensor, out2: Tensor, rows: Tensor, bits: Tensor, with_e: bool
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
        partial = _backward_split(a, grad, dq, dk, dv, out2, rows, bits, with_e)
    if with_e:
        torch.sum(partial.view(a.query.shape[0], a.query.shape[1], -1), (0, 2), out=de)
    return dq, dk, dv, de


def _backward_whole(
    a: Arguments, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, rows: Tensor, with_e: bool
) -> Tensor:
    def plan() -> Plan:
        tiles = tuning.whole_tiles(a)
        one = a.query.shape[1] == a.key.shape[1] and a.query.shape[2] <= tiles.rows
        strided = (a.query, a.key, a.value, grad, dq, dk, dv)
        constants = {"WITH_E": with_e, "ONE_BLOCK": one}
        return Plan(backward_kernels.backward_whole, a, tiles, _key_heads(a), strided, constants)

    de = torch.empty(_heads(a), dtype=torch.float32, device=grad.device)
    planned(("whole", with_e, layout_of(a, grad, rows)), plan).launch(
        a, (a.query, a.key, a.value, grad, dq, dk, dv, de, *rows, a.row_scale, a.e)
    )
    return de


def _backward_split(
    a: Arguments,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    out2: Tensor,
    rows: Tensor,
    bits: Tensor,
    with_e: bool,
) -> Tensor:
    tiles = tuning.split_tiles(a)
    query_blocks, key_blocks = _query_blocks(a, tiles), _key_blocks(a, tiles)

    def plan_queries() -> Plan:
        strided = (a.query, a.key, a.value, grad, dq, out2)
        programs = query_blocks * _heads(a)
        own = tuning.query_tiles(a)
        constants = {"WITH_E": with_e, "LISTED": a.is_listed, "HELD": own.held}
        return Plan(backward_kernels.backward_queries, a, own, programs, strided, constants, (query_blocks,))

    def plan_keys() -> Plan:
        strided = (a.query, a.key, a.value, grad, dk, dv)
        programs = key_blocks * _key_heads(a)
        own = tuning.key_tiles(a)
        constants: dict[str, Any] = {"LISTED": a.is_listed, "ROWS": a.tile[0], "TRANSPOSED": tuning.is_transposed(a)}
        constants["HELD"] = own.held
        return Plan(backward_kernels.backward_keys, a, own, programs, strided, constants, (key_blocks,))

    de = torch.empty(query_blocks * _heads(a), dtype=torch.float32, device=grad.device)
    by_row = a.is_entmax or a.row_scale is not None
    lines = torch.empty((*a.query.shape[:3], 4) if by_row else 0, dtype=torch.float32, device=grad.device)
    layout = layout_of(a, grad, out2, rows)
    planned(("queries", with_e, layout), plan_queries).launch(
        a,
        (
            *(a.query, a.key, a.value, grad, dq, de, out2, lines),
            *(*rows, *_listed(a, bits, by_key=False), a.row_scale, a.e),
        ),
    )
    planned(("keys", layout), plan_keys).launch(
        a,
        (a.query, a.key, a.value, grad, dk, dv, lines, *_listed(a, bits, by_key=True), a.e),
    )
    return de


def _heads(a: Arguments) -> int:
    return a.query.shape[0] * a.query.shape[1]


def _key_heads(a: Arguments) -> int:
    return a.query.shape[0] * a.key.shape[1]


def _query_blocks(a: Arguments, tiles: Tiles) -> int:
    return ceil_div(a.query.shape[2], tiles.rows) + _sequences(a)


def _key_blocks(a: Arguments, tiles: Tiles) -> int:
    return ceil_div(a.key.shape[2], tiles.cols) + _sequences(a)


def _sequences(a: Arguments) -> int:
    """Packed sequences, each of which may end in a block that is not full."""
    return 0 if a.cu_q is None else a.cu_q.shape[0] - 1


class Plan:
    """A launch worked out once, for all calls whose tensors are laid out alike: only pointers differ between them.

    Working it out takes the host longer than the GPU needs for short rows, and all layers of a model can share it.

    Args:
        programs: how many to start.
        strided: the tensors whose strides the kernel takes, in its order.
        constants: of this kernel, beside those of all.
        counts: of this kernel, after the lengths.
    """

    def __init__(
        self,
        kernel: Any,
        a: Arguments,
        tiles: Tiles,
        programs: int,
        strided: tuple[Tensor, ...],
        constants: dict[str, Any],
        counts: tuple[int, ...] = (),
    ) -> None:
        constants = _constants(a, tiles) | constants
        self._sight, self._dropout, self._packed = _sight(a), _dropout(a), _packed(a)
        self._numbers = (
            *(x.stride() for x in strided),
            (0, 0, 0) if a.row_scale is None else _broadcast_strides(a.row_scale)[:3],
            a.e_value,
            a.scale,
            a.bias,
            a.query.shape[1],
            a.query.shape[1] // a.key.shape[1],
            a.query.shape[2],
            a.key.shape[2],
            *counts,
        )
        in_order = tuple(constants[name] for name in kernel.arg_names if name in constants)
        plain = tuple((constants | {"HELD": 0})[name] for name in kernel.arg_names if name in constants)
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers}
        self._launch = Launch(kernel, programs, in_order, options, None if plain == in_order else plain)

    def launch(self, a: Arguments, pointers: tuple[Tensor | None, ...]) -> None:
        mask = a.attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.int8)
        arguments = (
            *pointers,
            Sight(mask, a.key_lengths, a.alibi_slopes, a.query_positions, a.key_positions, *self._sight),
            Dropout(a.seed, *self._dropout),
            Packed(a.cu_q, a.cu_k, *self._packed),
            *self._numbers,
        )
        self._launch(a.query.device, arguments)


def layout_of(a: Arguments, *others: Tensor | None) -> Any:
    """Equal where one plan fits: all numbers, and of tensors all but the values."""
    tensors: tuple[Any, ...] = (*a[:TENSORS], *others)
    return (a.query.device, a[TENSORS:], *layouts(*tensors))


def _sight(a: Arguments) -> tuple[Any, ...]:
    """`Sight` without its pointers."""
    return (
        (0, 0, 0, 0) if a.attn_mask is None else _broadcast_strides(a.attn_mask),
        _batch_stride(a.alibi_slopes),
        _batch_stride(a.query_positions),
        _batch_stride(a.key_positions),
        a.left,
        a.right,
        constant(0 if a.attn_mask is None else 2 if a.adds_mask else 1),
        constant(a.mask_by_query),
        constant(a.key_lengths is not None),
        constant(a.alibi_slopes is not None),
        constant(a.query_positions is not None),
        constant(a.key_positions is not None),
        constant(a.left >= 0),
        constant(a.right >= 0),
    )


def _dropout(a: Arguments) -> tuple[Any, ...]:
    """`Dropout` without its seed."""
    p = a.dropout_p
    return min(int(p * 2**32), 2**32 - 1), 1.0 / (1.0 - p) if p < 1.0 else 0.0, constant(p > 0.0)


def _packed(a: Arguments) -> tuple[Any, ...]:
    """`Packed` without its pointers."""
    count = _sequences(a)
    return count, constant(count > 0), constant(next_power_of_two(max(1, count)))


def _constants(a: Arguments, tiles: Tiles) -> dict[str, Any]:
    d, dv = a.query.shape[3], a.value.shape[3]
    return {
        "D": d,
        "DW": power_of_two(d),
        "DV": dv,
        "DVW": power_of_two(dv),
        "BM": tiles.rows,
        "BN": tiles.cols,
        "RULE": a.rule,
        "NORMALISED": a.is_entmax,
        "HAS_E": a.e is not None,
        "HAS_SCALES": a.row_scale is not None,
        # Tiles that no query's place hides anything of have a loop of their own; of given places nothing is known.
        "SPLIT": a.is_long and a.query_positions is None and a.key_positions is None,
        "RAW": a.scale > 0.0 and not a.is_biased,
        "FAST": a.query.dtype != torch.float32 and a.query.device.type == "cuda",
        "PRECISION": "tf32x3",  # of fp32 products: as accurate as fp32 itself, and on tensor cores
    }


def _broadcast_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
