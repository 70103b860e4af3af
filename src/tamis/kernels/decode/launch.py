"""Launching the kernels of `device`: how keys are split among programs, and memory for what is between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tamis.kernels.attention.arguments import PAGE_UNIT, Arguments, empty_output
from tamis.kernels.attention.launch import Plan, layout_of
from tamis.kernels.attention.tuning import Tiles, tolerance
from tamis.kernels.decode import device as kernels
from tamis.kernels.runtime.launch import planned
from tamis.kernels.runtime.sizes import ceil_div, next_power_of_two, power_of_two

SPANS = (256, 1024)
"""Keys of a program of `values` or `activated`: enough to make its part of the output small beside what it reads, but
few where there would be too few programs."""
WIDTHS = (4096, 8192)
"""Numbers that a program of `solve` takes at a time, 16 in each thread: the more where each has a multiprocessor of an
H200 to itself, so up to ALONE rows."""
ALONE = 132
PIECE = 4096
"""Scores that a program of `values` looks through at a time."""
STREAMED = 32
"""Rows of a tile from which on lists do not pay: one key in four has a weight if each row gives 1 % of them one."""
PROGRAMS = 2112
"""Programs of `scores`, about, where keys suffice: four rounds of four for each multiprocessor of an H200."""


def decode(a: Arguments, table: Tensor | None, norms: Tensor | None) -> Tensor:
    """The output.  With a table of pages (B, pages of a sequence), keys and values are (pages, Hk, page, D)."""
    out = empty_output(a)
    batch, heads, queries, _ = a.query.shape
    num_k = a.key.shape[2] * (1 if table is None else table.shape[1])
    if out.numel() == 0 or num_k == 0:
        return out.zero_()
    tiles = _tiles(a)
    rows, key_heads = batch * heads * queries, batch * a.key.shape[1]
    blocks = ceil_div(heads // a.key.shape[1] * queries, tiles.rows)
    padded = ceil_div(num_k, tiles.cols) * tiles.cols
    span = min(SPANS[1], max(SPANS[0], power_of_two(padded * key_heads * blocks // 1024)))
    groups, spans = padded // PAGE_UNIT, ceil_div(padded, span)
    paged = table is not None
    shared = {"PAGED": paged, "WHOLE": paged and a.key.shape[2] % tiles.cols == 0, "NEAR": norms is not None}
    layout = layout_of(a, table, norms)

    def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=a.query.device)

    def launch(
        kernel: Any, programs: int, tiles: Tiles, strided: tuple[Tensor, ...], counts: tuple[int, ...],
        pointers: tuple[Tensor | None, ...], **constants: Any
    ) -> None:  # fmt: skip
        def plan() -> Plan:
            return Plan(kernel, a, tiles, programs, strided, shared | constants, (num_k, *counts))

        planned((kernel, layout), plan).launch(a, pointers)

    outs, live = memory(rows, spans, a.value.shape[3]), memory(key_heads * blocks, spans, dtype=torch.int32)
    state = None
    if a.is_entmax:
        chunk = ceil_div(padded, max(1, PROGRAMS // (key_heads * blocks)))
        chunk = ceil_div(max(chunk, span), tiles.cols) * tiles.cols
        parts = ceil_div(padded, chunk)
        scores, tops, state = memory(rows, padded), memory(rows, groups), memory(rows, 3)
        launch(
            kernels.scores, key_heads * blocks * parts, tiles, (a.query, a.key), (blocks, parts, chunk, groups),
            (a.query, a.key, scores, tops, table, norms, a.e),
        )  # fmt: skip
        width = min(WIDTHS[1] if rows <= ALONE else WIDTHS[0], max(128, power_of_two(groups)))
        launch(
            kernels.solve, rows, Tiles(1, 1, max(4, width // 512), 1), (), (groups,),
            (scores, tops, memory(rows, groups, dtype=torch.int32), memory(rows, padded), state, a.e),
            TOLERANCE=tolerance(a), WIDTH=width,
        )  # fmt: skip
        lines = min(tiles.rows, next_power_of_two(heads // a.key.shape[1] * queries))
        if lines < STREAMED:
            lists = memory(key_heads * blocks, spans, span, dtype=torch.int16)
            launch(
                kernels.values, key_heads * blocks * spans, tiles, (a.value,), (blocks, spans, groups),
                (a.value, scores, tops, lists, state, outs, live, table, a.e),
                SPAN=span, PIECE=min(span, PIECE // lines), LINES=lines,
            )  # fmt: skip
        else:
            # One stage: masked loads of 4 bytes are slower when they are made ahead (docs/kernels/what-was-tried.md).
            launch(
                kernels.streamed, key_heads * blocks * spans, tiles._replace(stages=1), (a.value,),
                (blocks, spans, groups), (a.value, scores, tops, state, outs, live, table, a.e), SPAN=span,
            )  # fmt: skip
    else:
        launch(
            kernels.activated, key_heads * blocks * spans, tiles, (a.query, a.key, a.value), (blocks, spans, groups),
            (a.query, a.key, a.value, outs, live, table, norms, a.e),
            SPAN=span,
        )  # fmt: skip
    launch(
        kernels.gather, rows, Tiles(tiles.rows, 1, 8, 1), (out,), (blocks, spans), (outs, live, state, out, a.row_scale)
    )
    return out


def _tiles(a: Arguments) -> Tiles:
    """As many rows as share a key, where the registers allow it, and keys enough in flight to keep the memory busy."""
    rows, cols = a.tile
    if not a.is_entmax:
        # Products of 64 rows run on warp groups, around which Triton 3.6 cannot load ahead what depends on another one.
        rows = min(rows, 32)
    rows = min(rows, power_of_two(a.query.shape[1] // a.key.shape[1] * a.query.shape[2]))
    return Tiles(rows, cols, 4, 4 if a.head_dim <= 64 else 3 if a.head_dim <= 128 else 2)
