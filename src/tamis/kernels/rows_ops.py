"""Row transforms as operations of torch: when the kernels of `rows` can run, launching them, and their gradients.

Opaque to torch.compile, without synchronisation.  What is asked for a second derivative gets it from the plain
operations of `tamis.transforms`.  Triton is imported by the first launch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tamis.kernels.dispatch import DTYPES, _machine, unwatched
from tamis.transforms import losses
from tamis.transforms.entmax import _reduce_to, curvature, entmax_conjugate, entmax_vjp, entmax_weights
from tamis.transforms.solver import NEAR_ONE, Power

MAX_WIDTH = 131072
RESIDENT = 4096
"""Widest rows that stay in registers; wider ones are streamed."""
RESIDENT_BACKWARD = 8192
LINES, LINE = 32, 128
"""Of a wide row: so many lines are in work at a time, and so many scores are kept or left together."""
BLOCK, WARPS = 4096, 8
"""Scores of a wide row that are in work at a time, and the warps of its program."""
TILE = 4096
"""Scores of a tile of narrow rows."""
MOST_ROWS = 1 << 30


def obstacle(z: Tensor) -> str | None:
    """Why no kernel can take these scores, or None."""
    if (reason := _machine(z.device.type)) is not None:
        return reason
    watched = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if not torch.compiler.is_compiling() and watched:
        return "torch.func transforms and forward-mode derivatives need the plain operations"
    if z.dtype not in DTYPES:
        return f"there are kernels for fp16, bf16 and fp32, not for {z.dtype}"
    if z.shape[-1] > MAX_WIDTH:
        return f"rows go up to {MAX_WIDTH} scores, got {z.shape[-1]}"
    return None


def weights(z: Tensor, e: Power) -> Tensor:
    """What `entmax_weights` gives, in the dtype of z."""
    tensor, value = (e, 0.0) if isinstance(e, Tensor) else (None, float(e))
    if torch.is_grad_enabled() and (z.requires_grad or (tensor is not None and tensor.requires_grad)):
        return _Weights.apply(z, tensor, value)
    return (_forward if unwatched(z) else weights_forward)(z, tensor, value)[0]


def conjugate(z: Tensor, e: Power) -> Tensor:
    """What `entmax_conjugate` gives."""
    tensor, value = (e, 0.0) if isinstance(e, Tensor) else (None, float(e))
    return _Conjugate.apply(z, tensor, value)


def class_loss(
    e: Power, z: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """What `losses.class_loss` gives; `weight` gets no gradient."""
    tensor, value = (e, 0.0) if isinstance(e, Tensor) else (None, float(e))
    return _ClassLoss.apply(z, tensor, value, target, weight, ignore_index, label_smoothing)


# ---------------------------------------------------------------------------------------------------------------
# Launching


def _forward(z: Tensor, e: Tensor | None, e_value: float) -> tuple[Tensor, Tensor]:
    """Weights (..., n) in the dtype of z, and the states of the rows, (4, ...)."""
    p, state = _empty_forward(z, e, e_value)
    _solve(z, e, e_value, p, state, None, None, False)
    return p, state


def _loss_forward(
    z: Tensor, e: Tensor | None, e_value: float, spread: Tensor | None, with_e: bool
) -> tuple[Tensor, Tensor]:
    """The states of the rows, (4, ...); and (3, ...) their conjugates, the slopes of those in alpha, <spread, d>."""
    state, values = _empty_loss(z, e, e_value, spread, with_e)
    _solve(z, e, e_value, None, state, values, spread, with_e)
    return state, values


def _solve(
    z: Tensor,
    e: Tensor | None,
    e_value: float,
    p: Tensor | None,
    state: Tensor,
    values: Tensor | None,
    spread: Tensor | None,
    with_e: bool,
) -> None:
    from tamis.kernels import rows as kernels
    from tamis.kernels import rows_edge as edge

    if z.numel() == 0:
        return
    matrix, group = _matrix(z), _group(z, e)
    flat = _flat(z, e, group)
    rows, width = matrix.shape
    constants: dict[str, Any] = {
        "HAS_E": e is not None,
        "LOSS": values is not None,
        "WITH_E": with_e,
        "SPREAD": spread is not None,
    }
    with torch.cuda.device_of(z):  # Triton launches on the current device
        if _may_be_above_two(e, e_value):
            edge.edge_forward[(rows,)](
                matrix, p, state, values, flat, spread, matrix.stride(0), e_value, rows, group, width,
                _block(width), **constants, num_warps=WARPS,
            )  # fmt: skip
        if e is None and e_value > 1.0:
            return
        constants["RULE"] = _rule(e, e_value)
        if width <= RESIDENT:
            at_once, block, warps = _tile(rows, width, e, group)
            subset = block // 8 if block >= 512 else block
            kernels.resident[(_cdiv(rows, at_once),)](
                matrix, p, state, values, flat, spread, matrix.stride(0), e_value, rows, group, width,
                at_once, block, subset, **constants, num_warps=warps,
            )  # fmt: skip
        else:
            lines = _cdiv(width, LINE)
            tops = z.new_empty(rows, lines, dtype=torch.float32)
            listed = z.new_empty(rows, lines, dtype=torch.int32)
            kernels.streamed[(rows,)](
                matrix, p, state, values, flat, spread, tops, listed, matrix.stride(0), e_value, rows, group, width,
                LINES, LINE, _power_of_two(lines), **constants, num_warps=WARPS,
            )  # fmt: skip


def _backward(
    source: Tensor, state: Tensor, g: Tensor, e: Tensor | None, e_value: float, from_p: bool, with_e: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the scores and, per row, that of alpha (empty unless asked for)."""
    from tamis.kernels import rows as kernels
    from tamis.kernels import rows_edge as edge

    dz, de = _empty_backward(source, state, g, e, e_value, from_p, with_e)
    if source.numel() == 0:
        return dz, de.zero_()
    matrix, grads, group = _matrix(source), _matrix(g), _group(source, e)
    rows, width = matrix.shape
    arguments = (
        matrix, state, grads, dz, de, _flat(source, e, group), matrix.stride(0), grads.stride(0), e_value, rows, group,
        width,
    )  # fmt: skip
    constants: dict[str, Any] = {"HAS_E": e is not None, "FROM_P": from_p, "WITH_E": with_e}
    with torch.cuda.device_of(source):
        if _may_be_above_two(e, e_value):
            edge.edge_gradient[(rows,)](*arguments, _block(width), **constants, num_warps=WARPS)
        if e is None and e_value > 1.0:
            return dz, de
        constants["RULE"] = _rule(e, e_value)
        if width <= RESIDENT_BACKWARD:
            at_once, block, warps = _tile(rows, width, e, group)
            kernels.gradient_resident[(_cdiv(rows, at_once),)](*arguments, at_once, block, **constants, num_warps=warps)
        else:
            kernels.gradient_streamed[(rows,)](*arguments, BLOCK, **constants, num_warps=WARPS)
    return dz, de


def _loss_backward(
    z: Tensor,
    state: Tensor,
    e: Tensor | None,
    e_value: float,
    target: Tensor | None,
    factors: Tensor,
    spread: Tensor | None,
) -> Tensor:
    """factors (a, b, c) of each row to a p - b [is the target] - c spread."""
    from tamis.kernels import rows as kernels
    from tamis.kernels import rows_edge as edge

    dz = _empty_loss_backward(z, state, e, e_value, target, factors, spread)
    if z.numel() == 0:
        return dz
    matrix, group = _matrix(z), _group(z, e)
    rows, width = matrix.shape
    arguments = (
        matrix, state, dz, _flat(z, e, group), target, factors, spread, matrix.stride(0), e_value, rows, group, width
    )  # fmt: skip
    constants = {"HAS_E": e is not None, "HAS_TARGET": target is not None, "SPREAD": spread is not None}
    with torch.cuda.device_of(z):
        if _may_be_above_two(e, e_value):
            edge.edge_loss_gradient[(rows,)](*arguments, _block(width), **constants, num_warps=WARPS)
        if e is None and e_value > 1.0:
            return dz
        at_once, block, warps = _tile(rows, min(width, TILE), e, group)
        kernels.loss_gradient[(_cdiv(rows, at_once), _cdiv(width, block))](
            *arguments, at_once, block, **constants, RULE=_rule(e, e_value), num_warps=warps
        )
    return dz


def _rule(e: Tensor | None, e_value: float) -> str:
    if e is not None:
        return "any"
    return {0.5: "squares", 1.0: "identity"}.get(e_value, "near one" if e_value < NEAR_ONE else "power")


def _may_be_above_two(e: Tensor | None, e_value: float) -> bool:
    """What a tensor holds only the device knows: programs for rows that are not look and return."""
    return e is not None or e_value > 1.0


def _block(width: int) -> int:
    return max(16, min(BLOCK, _power_of_two(width)))


def _matrix(x: Tensor) -> Tensor:
    """(..., n) as (rows, n) whose rows lie in memory without gaps."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _group(z: Tensor, e: Tensor | None) -> int:
    """How many rows that follow each other share their alpha."""
    if e is None:
        return MOST_ROWS
    group = 1
    for size, own in zip(reversed(z.shape[:-1]), reversed(e.shape[:-1]), strict=True):
        if own != 1:
            break
        group *= size
    return group


def _flat(z: Tensor, e: Tensor | None, group: int) -> Tensor | None:
    """e of each group of rows."""
    if e is None:
        return None
    return e.expand(*z.shape[:-1], 1).reshape(-1, group)[:, 0].contiguous()


def _tile(rows: int, width: int, e: Tensor | None, group: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps: at most 32 scores for each thread."""
    block = max(16, _power_of_two(width))
    at_once = max(1, min(TILE // block, _power_of_two(rows)))
    if e is not None:
        at_once = math.gcd(at_once, group)
    return at_once, block, min(32, max(1, at_once * block // 1024))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _cdiv(n: int, d: int) -> int:
    return -(-n // d)


# ---------------------------------------------------------------------------------------------------------------
# Operations


def _empty_forward(z: Tensor, e: Tensor | None, e_value: float) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty((4, *z.shape[:-1]), dtype=torch.float32)


def _empty_loss(
    z: Tensor, e: Tensor | None, e_value: float, spread: Tensor | None, with_e: bool
) -> tuple[Tensor, Tensor]:
    return tuple(z.new_empty((count, *z.shape[:-1]), dtype=torch.float32) for count in (4, 3))  # type: ignore[return-value]


def _empty_backward(
    source: Tensor, state: Tensor, g: Tensor, e: Tensor | None, e_value: float, from_p: bool, with_e: bool
) -> tuple[Tensor, Tensor]:
    shape = (*source.shape[:-1], 1) if with_e else (0,)
    return source.new_empty(source.shape), source.new_empty(shape, dtype=torch.float32)


def _empty_loss_backward(
    z: Tensor,
    state: Tensor,
    e: Tensor | None,
    e_value: float,
    target: Tensor | None,
    factors: Tensor,
    spread: Tensor | None,
) -> Tensor:
    return z.new_empty(z.shape)


weights_forward = torch.library.custom_op("tamis::rows_forward", _forward, mutates_args=())
weights_forward.register_fake(_empty_forward)
weights_backward = torch.library.custom_op("tamis::rows_backward", _backward, mutates_args=())
weights_backward.register_fake(_empty_backward)
loss_forward = torch.library.custom_op("tamis::rows_loss_forward", _loss_forward, mutates_args=())
loss_forward.register_fake(_empty_loss)
loss_backward = torch.library.custom_op("tamis::rows_loss_backward", _loss_backward, mutates_args=())
loss_backward.register_fake(_empty_loss_backward)


# ---------------------------------------------------------------------------------------------------------------
# autograd


class _Weights(torch.autograd.Function):
    """fp32 weights are all that the backward pass needs; weights of 16 bits are computed again from the scores."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, e: Tensor | None, e_value: float) -> Tensor:
        p, state = (_forward if unwatched(z) else weights_forward)(z, e, e_value)
        ctx.from_p = z.dtype == torch.float32
        ctx.e_value = e_value
        ctx.save_for_backward(p if ctx.from_p else z, state, e)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        source, state, e = ctx.saved_tensors
        with_e = ctx.needs_input_grad[1]
        if torch.is_grad_enabled():  # somebody will differentiate this again
            power: Power = ctx.e_value if e is None else e
            p = source if ctx.from_p else entmax_weights(source, power)
            floor = torch.where(state[0] == math.inf, math.inf, 0.0).unsqueeze(-1)
            dz = entmax_vjp(p, power, floor, g.to(p.dtype))
            de = -(curvature(p, power) * dz).sum(-1, keepdim=True) if with_e else None
            dz = dz.to(source.dtype)
        else:
            backward = _backward if unwatched(g) else weights_backward
            dz, de = backward(source, state, g, e, ctx.e_value, ctx.from_p, with_e)
        return dz, _reduce_to(de, e) if with_e else None, None  # type: ignore[arg-type]


class _Conjugate(torch.autograd.Function):
    """(z, e) -> conjugates (..., 1), of rows whose largest score is 0."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, e: Tensor | None, e_value: float) -> Tensor:
        run = _loss_forward if unwatched(z) else loss_forward
        state, values = run(z, e, e_value, None, ctx.needs_input_grad[1])
        ctx.e_value = e_value
        ctx.save_for_backward(z, state, values, e)
        return values[0].unsqueeze(-1).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, state, values, e = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, z, e, lambda power: entmax_conjugate(z, power), g)
        run = _loss_backward if unwatched(g) else loss_backward
        dz = run(z, state, e, ctx.e_value, None, g.squeeze(-1).unsqueeze(0).contiguous(), None)
        de = _reduce_to(g * values[1].unsqueeze(-1), e) if ctx.needs_input_grad[1] else None
        return dz, de, None


class _ClassLoss(torch.autograd.Function):
    """Losses and weights of samples: z (..., classes), target (...)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        e: Tensor | None,
        e_value: float,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        ignored = target == ignore_index
        index = torch.where(ignored, 0, target)
        spread = None
        if label_smoothing > 0.0:
            ones = z.new_ones(z.shape[-1], dtype=torch.float32) if weight is None else weight.float()
            spread = ones * (label_smoothing / z.shape[-1])
        run = _loss_forward if unwatched(z) else loss_forward
        state, values = run(z, e, e_value, spread, ctx.needs_input_grad[1])
        row_max = state[0]
        picked = z.gather(-1, index.unsqueeze(-1)).squeeze(-1).float()
        picked = torch.where(picked == row_max, 0.0, picked - row_max)
        sample = torch.ones_like(picked) if weight is None else weight.float()[index]
        hard = sample * (1.0 - label_smoothing)
        total, score = hard, torch.where(hard == 0.0, 0.0, hard * picked)
        if spread is not None:
            total, score = total + spread.sum(), score + values[2]
        loss = torch.where(row_max == -math.inf, math.inf, total * values[0] - score)
        ctx.save_for_backward(z, state, values, e, target, weight, spread, index, hard, total)
        ctx.e_value, ctx.ignore_index, ctx.label_smoothing = e_value, ignore_index, label_smoothing
        sample = torch.where(ignored, 0.0, sample)
        ctx.mark_non_differentiable(sample)
        return torch.where(ignored, 0.0, loss), sample

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        z, state, values, e, target, weight, spread, index, hard, total = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(power: Power) -> Tensor:
                conjugate = functools.partial(entmax_conjugate, e=power)
                return losses.class_loss(conjugate, z, target, weight, ctx.ignore_index, ctx.label_smoothing)[0]

            return *_plain_gradients(ctx, z, e, plain, g), None, None, None, None
        g = torch.where(target == ctx.ignore_index, 0.0, g)
        run = _loss_backward if unwatched(g) else loss_backward
        dz = run(z, state, e, ctx.e_value, index, torch.stack((g * total, g * hard, g)), spread)
        de = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(state[0] == -math.inf, 0.0, g * total * values[1])
            de = _reduce_to(slope.unsqueeze(-1), e)
        return dz, de, None, None, None, None, None


def _plain_gradients(ctx: Any, z: Tensor, e: Tensor | None, plain: Any, g: Tensor) -> Any:
    """Gradients in z and e that can be differentiated again, through the plain operations."""
    needed = [x for x, wanted in zip((z, e), ctx.needs_input_grad, strict=False) if wanted and x is not None]
    found = iter(torch.autograd.grad(plain(ctx.e_value if e is None else e), needed, g, create_graph=True))
    return *(next(found) if wanted else None for wanted in ctx.needs_input_grad[:2]), None
