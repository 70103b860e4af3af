"""Block sizes of the kernels, and how far their solutions go: tables measured on an H200."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tamis.kernels.attention.arguments import Arguments
from tamis.kernels.runtime.sizes import ceil_div, power_of_two


class Tiles(NamedTuple):
    """Rows and columns of a tile of scores, the warps and pipeline stages of its program, the tiles it keeps, how many
    registers a thread may have at most, so that another program fits beside it, and how many operands it holds in
    registers (`device.tiles.hold`)."""

    rows: int
    cols: int
    warps: int
    stages: int
    kept: int = 0
    registers: int | None = None
    held: int = 0


# The tables below were measured on an H200 (docs/kernels/measurements.md) at head size 64; larger heads and fp32 take
# smaller tiles so that everything stays in registers.


def forward_tiles(a: Arguments) -> Tiles:
    """All scores of a block of queries in registers up to 256 keys, in a loop beyond."""
    if a.is_long:
        return listed_tiles(a) if a.is_entmax else pass_tiles(a)
    keys = a.key.shape[2]
    heavy = a.rule == "power" or a.mask_by_query  # with temporaries that take many registers
    if a.query.dtype == torch.float32 or a.head_dim > 128:
        tiles = Tiles(*a.tile, 4, 1)
        if a.head_dim <= 64 and keys <= 128:
            tiles = Tiles(32, min(64, power_of_two(keys)), 4, 1, ceil_div(keys, 64))
    elif keys <= 32:
        tiles = Tiles(32, power_of_two(keys), 1, 1, 1)
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
    return tiles._replace(rows=min(tiles.rows, power_of_two(a.query.shape[2])))


def whole_tiles(a: Arguments) -> Tiles:
    """For all gradients in one program."""
    cols = power_of_two(a.key.shape[2])
    rows = min(32 if a.query.dtype == torch.float32 else 128, cols, power_of_two(a.query.shape[2]))
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
    return tiles._replace(rows=min(tiles.rows, power_of_two(a.query.shape[2])))


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


def tolerance(a: Arguments) -> float:
    """The error of a row's mass that is left to be divided out: what weights lose by rounding to the dtype, or less."""
    return {torch.float32: 2e-6, torch.float16: 2e-4}.get(a.query.dtype, 1e-3)


def close(a: Arguments) -> float:
    """The error of a row's mass from which one more step brings the weights well below the rounding of the dtype."""
    return {torch.float32: 1e-4, torch.float16: 3e-3}.get(a.query.dtype, 1e-2)
