"""Launching the kernels of `forward`, `scan` and `backward`: block sizes, strides, and memory for the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.kernels import backward as backward_kernels
from tamis.kernels import forward as forward_kernels
from tamis.kernels import scan as scan_kernels
from tamis.kernels.arguments import (
    TENSORS,
    Arguments,
    Results,
    ceil_div,
    empty_gradients,
    empty_results,
    next_power_of_two,
)
from tamis.kernels.machine_code import is_spoilt
from tamis.kernels.tiles import Dropout, Packed, Sight


class Tiles(NamedTuple):
    """Rows and columns of a tile of scores, the warps and pipeline stages of its program, the tiles it keeps, how many
    registers a thread may have at most, so that another program fits beside it, and how many operands it holds in
    registers (`tiles._held`)."""

    rows: int
    cols: int
    warps: int
    stages: int
    kept: int = 0
    registers: int | None = None
    held: int = 0


# The tables below were measured on an H200 (docs/kernels.md) at head size 64; larger heads and fp32 take smaller tiles
# so that everything stays in registers.


def forward_tiles(a: Arguments) -> Tiles:
    """All scores of a block of queries in registers up to 256 keys, in a loop beyond."""
    if a.is_long:
        return listed_tiles(a) if a.is_entmax else pass_tiles(a)
    keys = a.key.shape[2]
    heavy = a.rule == "power" or a.mask_by_query  # with temporaries that take many registers
    if a.query.dtype == torch.float32 or a.head_dim > 128:
        tiles = Tiles(*a.tile, 4, 1)
        if a.head_dim <= 64 and keys <= 128:
            tiles = Tiles(32, min(64, _power_of_two(keys)), 4, 1, ceil_div(keys, 64))
    elif keys <= 32:
        tiles = Tiles(32, _power_of_two(keys), 1, 1, 1)
    elif keys <= 64:
        tiles = Tiles(64, 32, 4, 1, 2) if heavy else Tiles(64, 64, 4, 1, 1)
    elif keys <= 128:
        tiles = Tiles(64, 64, 4, 1, 2) if heavy else Tiles(128 if a.head_dim <= 64 else 64, 128, 4, 1, 1)
    elif keys <= 256 and a.is_entmax and a.head_dim <= 64 and not a.mask_by_query:
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
    """For d query with keys in a loop, and for d key and d value with queries in a loop; for all of a long row."""
    stages = 1 if a.tile[1] == 32 else 3 if a.head_dim <= 64 else 2
    return Tiles(*a.tile, 4, stages)


def query_tiles(a: Arguments) -> Tiles:
    """For d query.  Held are queries, or queries and the gradients of their outputs."""
    tiles = split_tiles(a)
    if not can_hold(a):
        return tiles
    if a.head_dim > 64:
        return tiles._replace(stages=3, held=1)
    return tiles._replace(held=2) if a.rule == "power" else tiles._replace(registers=168)


def key_tiles(a: Arguments) -> Tiles:
    """For d key and d value; rows are those of a step, of which a tile can have several.  Held are keys, or keys and
    values."""
    tiles = split_tiles(a)
    if not can_hold(a) or not is_transposed(a):
        return tiles
    light = a.is_rectified and a.row_scale is None
    if a.head_dim > 64:
        return tiles._replace(rows=32, stages=3, held=1 if light else 0)
    return tiles._replace(rows=32, held=2, registers=168) if light else tiles


def can_hold(a: Arguments) -> bool:
    """Whether the tiles of long rows are those that were measured: other GPUs have less shared memory, and products
    that take their operands otherwise."""
    return a.is_long and a.tile[0] == 64 and _is_hopper(a.query.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def is_transposed(a: Arguments) -> bool:
    """Whether tiles for d key and d value are keys by queries.  With dropout each thread would draw numbers for many
    more rows, and of 32 keys of 256 in fp32 ptxas spills 9 kB."""
    return a.dropout_p == 0.0 and not (a.query.dtype == torch.float32 and a.head_dim > 128)


def listed_tiles(a: Arguments) -> Tiles:
    """For long rows of entmax, whose tiles are listed: where registers allow it three programs in each multiprocessor,
    so that while one waits for an entry of its list others work."""
    tiles = split_tiles(a)
    if not can_hold(a):
        return tiles._replace(stages=min(tiles.stages, 2))
    return tiles._replace(stages=3, registers=168 if a.head_dim <= 64 else None)


def pass_tiles(a: Arguments) -> Tiles:
    """For long rows of elementwise rules, in one pass over all scores: the more rows, the less often keys are read."""
    tiles = split_tiles(a)
    if tiles.rows == 64 and a.query.shape[2] > 64:
        return tiles._replace(rows=128, warps=8, registers=128)
    return tiles._replace(rows=min(tiles.rows, _power_of_two(a.query.shape[2])))


def scan_tiles(a: Arguments) -> Tiles:
    """For the pass over all scores of long rows: columns are those of one tile or two, and queries may be held."""
    rows, cols = a.tile
    # Twice the rows of others, so that keys are read half as often; but of 32 rows of 256 in fp32 ptxas spills 15 kB.
    tiles = Tiles(rows if rows == 16 else 2 * rows, cols, 4, 1 if cols == 32 else 3)
    # Rows that are no multiple of 16 are loaded number by number, which takes the registers.
    if can_hold(a) and not a.is_biased and a.query.shape[3] % 16 == 0:
        tiles = tiles._replace(cols=128 if a.head_dim <= 64 else 64, held=1)
    return tiles


def scan_programs() -> int:
    """Each with memory for its maxima: two for each multiprocessor of an H200."""
    return 264


def _power_of_two(n: int) -> int:
    return max(16, next_power_of_two(n))


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
        tiles = forward_tiles(a)
        blocks = _query_blocks(a, tiles)
        constants: dict[str, Any] = {"TILES": tiles.kept, "KEEP_O2": out2.numel() > 0, "LISTED": scanned}
        tolerance = _tolerance(a)
        constants |= {"TOLERANCE": tolerance, "CLOSE": _close(a) if tiles.kept else tolerance**0.5}
        constants |= {"COUNTED": a.counted, "SKIPS": a.is_long and a.is_rectified, "ROWS": min(a.tile[0], tiles.rows)}
        constants["HELD"] = int(can_hold(a) and (a.is_entmax or a.head_dim <= 64))
        strided = (a.query, a.key, a.value, out)
        return Plan(forward_kernels.forward, a, tiles, blocks * _heads(a), strided, constants, (blocks,))

    lists = _listed(a, bits, by_key=False) if scanned else (None, None)
    _planned(("forward", train, _layout(a)), plan).launch(
        a, (a.query, a.key, a.value, out, out2, *rows, statistics, *lists, noted, a.row_scale, a.e)
    )
    return results


def _scan(a: Arguments, rows: Tensor, bits: Tensor) -> None:
    """Fill `bits`, and the first two of `rows` with what the solution starts from."""
    tiles = scan_tiles(a)
    blocks = ceil_div(a.query.shape[2], tiles.rows)
    tasks = blocks * _heads(a)
    programs = min(tasks, scan_programs())
    norms = _key_norms(a) if a.is_near else None

    def plan() -> Plan:
        constants = {"BN": a.tile[1], "STEP": tiles.cols, "HELD": tiles.held, "ROWS": a.tile[0]}
        constants |= {"SWEEPS": 2, "NEAR": norms is not None}
        return Plan(scan_kernels.scan, a, tiles, programs, (a.query, a.key), constants, (blocks, tasks))

    num_tiles = ceil_div(a.key.shape[2], tiles.cols) * (tiles.cols // a.tile[1])
    maxima = torch.empty(programs * num_tiles * tiles.rows, dtype=torch.float32, device=bits.device)
    _planned(("scan", _layout(a, rows)), plan).launch(a, (a.query, a.key, rows[0], rows[1], bits, maxima, norms, a.e))


def _key_norms(a: Arguments) -> Tensor:
    """The largest norm of a key in each head."""
    d, blocks = a.key.shape[3], ceil_div(a.key.shape[2], 128)
    norms = torch.empty((_key_heads(a), blocks), dtype=torch.float32, device=a.key.device)
    numbers = (a.key.stride(), a.key.shape[1], a.key.shape[2], blocks)
    key = ("norms", a.key.device, a.key.dtype, a.key.data_ptr() % 16, d, norms.shape, numbers)
    launch = _planned(key, lambda: Launch(scan_kernels.key_norms, norms.numel(), (d, _power_of_two(d), 128), {}))
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
    launch = _planned(key, lambda: Launch(scan_kernels.list_tiles, lines, (by_key,), {"num_warps": 1}))
    launch(bits.device, (bits, lists, counts, row_blocks, num_tiles))
    return lists, counts


def _tolerance(a: Arguments) -> float:
    """The error of a row's mass that is left to be divided out: what weights lose by rounding to the dtype, or less."""
    return {torch.float32: 2e-6, torch.float16: 2e-4}.get(a.query.dtype, 1e-3)


def _close(a: Arguments) -> float:
    """The error of a row's mass from which one more step brings the weights well below the rounding of the dtype."""
    return {torch.float32: 1e-4, torch.float16: 3e-3}.get(a.query.dtype, 1e-2)


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
        tiles = whole_tiles(a)
        one = a.query.shape[1] == a.key.shape[1] and a.query.shape[2] <= tiles.rows
        strided = (a.query, a.key, a.value, grad, dq, dk, dv)
        constants = {"WITH_E": with_e, "ONE_BLOCK": one}
        return Plan(backward_kernels.backward_whole, a, tiles, _key_heads(a), strided, constants)

    de = torch.empty(_heads(a), dtype=torch.float32, device=grad.device)
    _planned(("whole", with_e, _layout(a, grad, rows)), plan).launch(
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
    tiles = split_tiles(a)
    query_blocks, key_blocks = _query_blocks(a, tiles), _key_blocks(a, tiles)

    def plan_queries() -> Plan:
        strided = (a.query, a.key, a.value, grad, dq, out2)
        programs = query_blocks * _heads(a)
        own = query_tiles(a)
        constants = {"WITH_E": with_e, "LISTED": a.is_listed, "HELD": own.held}
        return Plan(backward_kernels.backward_queries, a, own, programs, strided, constants, (query_blocks,))

    def plan_keys() -> Plan:
        strided = (a.query, a.key, a.value, grad, dk, dv)
        programs = key_blocks * _key_heads(a)
        own = key_tiles(a)
        constants: dict[str, Any] = {"LISTED": a.is_listed, "ROWS": a.tile[0], "TRANSPOSED": is_transposed(a)}
        constants["HELD"] = own.held
        return Plan(backward_kernels.backward_keys, a, own, programs, strided, constants, (key_blocks,))

    de = torch.empty(query_blocks * _heads(a), dtype=torch.float32, device=grad.device)
    by_row = a.is_entmax or a.row_scale is not None
    lines = torch.empty((*a.query.shape[:3], 4) if by_row else 0, dtype=torch.float32, device=grad.device)
    layout = _layout(a, grad, out2, rows)
    _planned(("queries", with_e, layout), plan_queries).launch(
        a,
        (
            *(a.query, a.key, a.value, grad, dq, de, out2, lines),
            *(*rows, *_listed(a, bits, by_key=False), a.row_scale, a.e),
        ),
    )
    _planned(("keys", layout), plan_keys).launch(
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


class Launch:
    """A kernel with its grid and constants.  Once compiled it is called directly, for all arguments of one kind.

    Args:
        plain: the constants that do without operands kept in registers, where `constants` have some.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: tuple[Any, ...],
        options: Mapping[str, int | None],
        plain: tuple[Any, ...] | None = None,
    ) -> None:
        self._kernel, self._grid, self._constants, self._options = kernel, (programs, 1, 1), constants, options
        self._plain = plain
        self._run: Callable[..., object] | None = None

    def __call__(self, device: torch.device, arguments: tuple[Any, ...]) -> None:
        if self._run is None:
            # With a kernel that was compiled for another grid, or by way of Triton, which looks at every argument.
            kind = (self._kernel, device, self._constants, *self._options.values(), *map(_kind, arguments))
            if kind not in _compiled:
                _compiled[kind] = self._compile(arguments)
            compiled, self._constants = _compiled[kind]
            self._run = compiled[self._grid]
        self._run(*arguments, *self._constants)

    def _compile(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The compiled kernel and its constants; in the interpreter, the kernel itself."""
        if not isinstance(self._kernel, triton.JITFunction):
            return self._kernel, self._constants
        compiled = self._kernel.warmup(*arguments, *self._constants, grid=self._grid, **self._options)
        if self._plain is None or not is_spoilt(compiled.asm["cubin"]):
            return compiled, self._constants
        return self._kernel.warmup(*arguments, *self._plain, grid=self._grid, **self._options), self._plain


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


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _kind(x: Any) -> Any:
    """What Triton compiles a kernel for: types, which pointers and numbers are multiples of 16, which numbers are 1."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return x.value if isinstance(x, tl.constexpr) else type(x)


_plans: dict[Any, Any] = {}
Planned = TypeVar("Planned")
MOST_PLANS = 4096


def _planned(key: Any, make: Callable[[], Planned]) -> Planned:
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def _layout(a: Arguments, *others: Tensor | None) -> Any:
    """Equal where one plan fits: all numbers, and of tensors all but the values."""
    tensors: tuple[Any, ...] = (*a[:TENSORS], *others)
    return (a.query.device, a[TENSORS:], *_layouts(*tensors))


def _layouts(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]


def _sight(a: Arguments) -> tuple[Any, ...]:
    """`Sight` without its pointers."""
    return (
        (0, 0, 0, 0) if a.attn_mask is None else _broadcast_strides(a.attn_mask),
        _batch_stride(a.alibi_slopes),
        _batch_stride(a.query_positions),
        _batch_stride(a.key_positions),
        a.left,
        a.right,
        _constant(0 if a.attn_mask is None else 2 if a.adds_mask else 1),
        _constant(a.mask_by_query),
        _constant(a.key_lengths is not None),
        _constant(a.alibi_slopes is not None),
        _constant(a.query_positions is not None),
        _constant(a.key_positions is not None),
        _constant(a.left >= 0),
        _constant(a.right >= 0),
    )


def _dropout(a: Arguments) -> tuple[Any, ...]:
    """`Dropout` without its seed."""
    p = a.dropout_p
    return min(int(p * 2**32), 2**32 - 1), 1.0 / (1.0 - p) if p < 1.0 else 0.0, _constant(p > 0.0)


def _packed(a: Arguments) -> tuple[Any, ...]:
    """`Packed` without its pointers."""
    count = _sequences(a)
    return count, _constant(count > 0), _constant(next_power_of_two(max(1, count)))


def _constants(a: Arguments, tiles: Tiles) -> dict[str, Any]:
    d, dv = a.query.shape[3], a.value.shape[3]
    return {
        "D": d,
        "DW": _power_of_two(d),
        "DV": dv,
        "DVW": _power_of_two(dv),
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


# A launch has a dozen, and 1 and True are not the same constant.
_constant = functools.lru_cache(maxsize=None, typed=True)(tl.constexpr)


def _broadcast_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
