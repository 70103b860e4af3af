"""Launching the kernels of `forward`, `backward` and `edge`: their tiles, and where rows and alphas lie in memory."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.kernels.rows.device import backward as backward_kernels
from tamis.kernels.rows.device import edge as edge_kernels
from tamis.kernels.rows.device import forward as forward_kernels
from tamis.kernels.rows.device.state import Classes
from tamis.kernels.runtime.launch import Launch, constant, layouts, planned
from tamis.kernels.runtime.sizes import ceil_div, next_power_of_two, power_of_two
from tamis.transforms.solver import NEAR_ONE

RESIDENT = 4096
"""Widest rows that stay in registers; wider ones are streamed."""
RESIDENT_BACKWARD = 8192
LINES, LINE = 32, 128
"""In a wide row: so many lines are in work at a time, and so many scores are kept or left together."""
BLOCK, WARPS = 4096, 8
"""Scores of a wide row that are in work at a time, and the warps of its program."""
TILE = 512
"""Scores of a tile of rows that are not wider."""
MOST_ROWS = 1 << 30


class Loss(NamedTuple):
    """What a loss is of: class indices (...), or None for the conjugate alone, and weights (classes,) or None."""

    target: Tensor | None = None
    weight: Tensor | None = None
    ignore_index: int = 0
    label_smoothing: float = 0.0


NO_LOSS = Loss()


class Rows(NamedTuple):
    """How rows of scores and their alphas lie in memory."""

    number: int
    width: int
    group: int
    """So many rows that follow each other share their alpha."""
    alphas: int
    """After so many groups the alphas start again."""
    scattered: bool
    """The alphas follow no such order: they are written out, one for each group."""

    @staticmethod
    def of(z: Tensor, e: Tensor | None) -> Rows:
        width = z.shape[-1]
        count = z.numel() // width
        if e is None:
            return Rows(count, width, MOST_ROWS, 1, False)
        dims = list(zip(z.shape[:-1], e.shape[:-1], strict=True))
        group = 1
        while dims and dims[-1][1] == 1:
            group *= dims.pop()[0]
        own = itertools.dropwhile(lambda sizes: sizes[1] == 1, dims)
        scattered = any(size != alphas for size, alphas in own)
        return Rows(count, width, group, count // group if scattered else e.numel(), scattered)

    def tile(self, width: int) -> tuple[int, int, int]:
        """Rows and columns of a tile, and its warps: at most 32 scores for each thread, and one alpha for all.

        Warps of a tile wait for each other at every step of the solver, so a row has few and shares them with none
        but narrow ones.
        """
        block = power_of_two(width)
        at_once = math.gcd(max(1, min(TILE // block, next_power_of_two(self.number))), self.group)
        return at_once, block, max(1, at_once * block // 1024)


class RowPlan:
    """The launches of a call, for all calls whose tensors are laid out alike: only pointers and e differ between them.

    Working them out takes the host longer than the GPU needs for narrow rows.

    Args:
        edge: for alphas above 2.
        main: for the others.
        strided: the tensors whose strides from row to row the kernels take, in their order.
        lines: of a row, for which `main` needs memory; 0 if it needs none.
    """

    def __init__(
        self, rows: Rows, rule: str, edge: Launch, main: Launch, strided: tuple[Tensor, ...], loss: Loss, lines: int = 0
    ) -> None:
        # What a tensor holds only the device knows: programs for rows that are not theirs look and return.
        self._edge = edge if rule in ("any", "edge") else None
        self._main = main if rule != "edge" else None
        self._rows, self._lines = rows, lines
        strides = [_row_stride(x) for x in strided]
        self._copied = tuple(stride is None for stride in strides)
        self._numbers = (
            *(rows.width if stride is None else stride for stride in strides),
            *(rows.number, rows.group, rows.alphas, rows.width),
        )
        self._classes = (
            loss.ignore_index,
            1.0 - loss.label_smoothing,
            loss.label_smoothing / rows.width,
            constant(loss.target is not None),
            constant(loss.weight is not None),
            constant(loss.label_smoothing > 0.0),
        )

    def matrices(self, *strided: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() if copied else x for x, copied in zip(strided, self._copied, strict=True))

    def launch(self, z: Tensor, pointers: tuple[Tensor | None, ...], e: Tensor | None, *numbers: Any) -> None:
        if e is not None:
            if self._rows.scattered:
                e = e.expand(*z.shape[:-1], 1).reshape(-1, self._rows.group)[:, 0]
            e = e.contiguous()
        arguments = (*pointers, e, *numbers, *self._numbers)
        if self._edge is not None:
            self._edge(z.device, arguments)
        if self._main is not None:
            self._main(z.device, (*arguments, *self._memory(z)))

    def classes(self, loss: Loss) -> Classes:
        weight = None if loss.weight is None else loss.weight.contiguous()
        return Classes(None if loss.target is None else loss.target.contiguous(), weight, *self._classes)

    def _memory(self, z: Tensor) -> tuple[Tensor, ...]:
        if self._lines == 0:
            return ()
        shape = (self._rows.number, self._lines)
        return z.new_empty(shape, dtype=torch.float32), z.new_empty(shape, dtype=torch.int32)


def solve(
    z: Tensor,
    e: Tensor | None,
    e_value: float,
    p: Tensor | None,
    state: Tensor,
    losses: Tensor | None = None,
    loss: Loss = NO_LOSS,
    with_e: bool = False,
) -> None:
    """Fill the state, and the weights p or the losses."""

    def make() -> RowPlan:
        rows, lines = Rows.of(z, e), 0
        constants = {"HAS_E": e is not None, "LOSS": p is None, "WITH_E": with_e, "RULE": rule}
        # A target is known to the device alone: out of range, it fails there, as it does in `F.cross_entropy`.
        options = {"debug": loss.target is not None, "sanitize_overflow": False}
        edge = _edge(edge_kernels.edge_forward, rows, constants, **options)
        if rows.width <= RESIDENT:
            at_once, block, warps = rows.tile(rows.width)
            constants |= {"ROWS": at_once, "BLOCK": block, "SUBSET": block // 8 if block >= 512 else block}
            main = _launch(forward_kernels.resident, ceil_div(rows.number, at_once), warps, constants, **options)
        else:
            lines = ceil_div(rows.width, LINE)
            constants |= {"LINES": LINES, "LINE": LINE, "MOST": next_power_of_two(lines)}
            main = _launch(forward_kernels.streamed, rows.number, WARPS, constants, **options)
        return RowPlan(rows, rule, edge, main, (z,), loss, lines)

    rule = _rule(e, e_value)
    key = ("solve", rule, p is None, with_e, loss[2:], z.device, *layouts(z, e, loss.target, loss.weight))
    plan = planned(key, make)
    plan.launch(z, (*plan.matrices(z), p, state, losses), e, plan.classes(loss), e_value)


def gradient(
    source: Tensor,
    state: Tensor,
    g: Tensor,
    dz: Tensor,
    de: Tensor,
    e: Tensor | None,
    e_value: float,
    from_p: bool,
    with_e: bool,
) -> None:
    """Fill dz and, if asked for, de."""

    def make() -> RowPlan:
        rows = Rows.of(source, e)
        constants = {"HAS_E": e is not None, "FROM_P": from_p, "WITH_E": with_e, "RULE": rule}
        edge = _edge(edge_kernels.edge_gradient, rows, constants)
        if rows.width <= RESIDENT_BACKWARD:
            at_once, block, warps = rows.tile(rows.width)
            constants |= {"ROWS": at_once, "BLOCK": block}
            main = _launch(backward_kernels.gradient_resident, ceil_div(rows.number, at_once), warps, constants)
        else:
            main = _launch(backward_kernels.gradient_streamed, rows.number, WARPS, constants | {"BLOCK": BLOCK})
        return RowPlan(rows, rule, edge, main, (source, g), NO_LOSS)

    rule = _rule(e, e_value)
    plan = planned(("gradient", rule, from_p, with_e, source.device, *layouts(source, state, g, e)), make)
    matrix, grads = plan.matrices(source, g)
    plan.launch(source, (matrix, state, grads, dz, de), e, e_value)


def loss_gradient(
    z: Tensor,
    state: Tensor,
    g: Tensor,
    dz: Tensor,
    de: Tensor,
    e: Tensor | None,
    e_value: float,
    loss: Loss,
    with_e: bool,
) -> None:
    """Fill dz and, if asked for, de.  g: one number for all rows, or (...)."""

    def make() -> RowPlan:
        rows = Rows.of(z, e)
        constants = {"HAS_E": e is not None, "WITH_E": with_e, "RULE": rule}
        edge = _edge(edge_kernels.edge_loss_gradient, rows, constants)
        at_once, block, warps = rows.tile(min(rows.width, BLOCK))
        programs = ceil_div(rows.number, at_once) * ceil_div(rows.width, block)
        main = _launch(backward_kernels.loss_gradient, programs, warps, constants | {"ROWS": at_once, "BLOCK": block})
        return RowPlan(rows, rule, edge, main, (z,), loss)

    rule = _rule(e, e_value)
    key = ("loss gradient", rule, with_e, loss[2:], z.device, *layouts(z, state, g, e, loss.target, loss.weight))
    plan = planned(key, make)
    g_stride = 0 if g.numel() == 1 else 1
    plan.launch(z, (*plan.matrices(z), state, g.contiguous(), dz, de), e, plan.classes(loss), e_value, g_stride)


def _rule(e: Tensor | None, e_value: float) -> str:
    if e is not None:
        return "any"
    if e_value > 1.0:
        return "edge"
    return {0.5: "squares", 1.0: "identity"}.get(e_value, "near one" if e_value < NEAR_ONE else "power")


def _row_stride(x: Tensor) -> int | None:
    """From one row to the next, or None where rows lie apart or have gaps and must be copied."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix.stride(0) if matrix.data_ptr() == x.data_ptr() and matrix.stride(1) == 1 else None


def _edge(kernel: Any, rows: Rows, constants: dict[str, Any], **options: bool) -> Launch:
    """One row to a program."""
    block = max(16, min(BLOCK, next_power_of_two(rows.width)))
    return _launch(kernel, rows.number, WARPS, constants | {"BLOCK": block}, **options)


def _launch(kernel: Any, programs: int, warps: int, constants: dict[str, Any], **options: bool) -> Launch:
    in_order = tuple(constants[name] for name in kernel.arg_names if name in constants)
    return Launch(kernel, programs, in_order, {"num_warps": warps, **options})
