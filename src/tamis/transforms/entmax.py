"""alpha-entmax as a differentiable function of scores and alpha.

Adaptively Sparse Transformers, Correia, Niculae and Martins 2019, https://arxiv.org/abs/1909.00015

    alpha-entmax(z) = argmax over the simplex of <p, z> + H_alpha(p),
    H_alpha(p) = sum_j (p_j - p_j^alpha) / (alpha (alpha - 1)),  Shannon's entropy at alpha = 1.

alpha = 1 is softmax, alpha = 2 sparsemax.  With e = alpha - 1 and s_j = p_j^(1 - e) on the support, 0 off it:

    in z      vjp(g) = s (g - <s, g> / sum s)
    in alpha  dp/dalpha = -s kappa + s <s, kappa> / sum s,   kappa = (1 - x + x ln x) / e^2,  x = p^e
              hence d loss / d alpha = -<kappa, vjp(g)>: one more sum over what the score gradient has anyway.

kappa = (ln p)^2 k(e ln p) with k(t) = (t e^t - expm1 t) / t^2, k(0) = 1/2: no cancellation and no special case as
alpha -> 1.  Everything here is relative to the weights p, which are all that is kept for the backward pass.

Deviation from the paper: its closed form in alpha cancels near alpha = 1, hence the form in kappa.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.native import rows as kernels
from tamis.transforms.dispatch import transforming, unwatched
from tamis.transforms.solver import Power, compute_dtype, row_blocks, smallest_log, solve_rows

LOWEST, HIGHEST = 2.0**-23 - 1.0, 1e30
"""The range of e: what fp32 can tell from its limits."""
RowMethod = Callable[..., tuple[Tensor, Tensor]]
"""A function of tensors with a row for each, and e last."""
_SERIES = {torch.float32: (0.3, 8), torch.float64: (0.5, 18)}  # |t| below which k(t) is summed, and the terms needed


def entmax_weights(z: Tensor, e: Power, native: bool = False) -> Tensor:
    """Weights over the last dim of z, in the compute dtype.  e: a number, or a tensor (..., 1) with all dims of z.

    `native`: by the C++ kernels, where alpha lies in [1, 2].
    """
    if _is_direct(z) and not (
        torch.is_grad_enabled() and (z.requires_grad or (isinstance(e, Tensor) and e.requires_grad))
    ):
        return _forward(z, *_parts(e), native)[0]
    return _apply(_Entmax, z, e, native)[0]


def entmax_conjugate(z: Tensor, e: Power, native: bool = False) -> Tensor:
    """max over the simplex of <p, z> + H_alpha(p), (..., 1), for rows whose largest score is 0.

    Its gradient in z is alpha-entmax(z); the Fenchel-Young losses are built on it.
    """
    return _apply(_EntmaxConjugate, z, e, native)[0]


def limited(e: Power) -> Power:
    """e between its limits, NaN where alpha is below 0."""
    if isinstance(e, Tensor):
        return torch.where(e >= -1.0, e.clamp(LOWEST, HIGHEST), torch.nan)
    return min(max(e, LOWEST), HIGHEST)


def is_free(e: Tensor) -> Tensor:
    """Where `limited` passes a gradient."""
    return (e >= LOWEST) & (e <= HIGHEST)


def _apply(function: Any, z: Tensor, e: Power, native: bool) -> Any:
    # torch.compile refuses a Function that defines forward-mode derivatives; elsewhere they come for free.
    function = function if torch.compiler.is_compiling() else function.with_jvp
    return function.apply(z, *_parts(e), native)


def _parts(e: Power) -> tuple[Tensor | None, float | None]:
    return (e, None) if isinstance(e, Tensor) else (None, float(e))


def _is_direct(z: Tensor) -> bool:
    """Whether an operation's implementation may be called in its place, which is faster."""
    return unwatched(z) and transforming() is None


# ---------------------------------------------------------------------------------------------------------------
# The derivatives, in differentiable operations: what double backward and torch.func see


def entmax_vjp(p: Tensor, e: Power, floor: Tensor, g: Tensor) -> Tensor:
    """s (g - <s, g> / sum s), exact for every alpha > 0.

    Beyond alpha = 2, s = p^(2 - alpha) is largest where p is smallest, and what overflows saturates.  The average is
    taken under softmax weights, g is measured from its value at the largest s, whose entry follows from the zero sum.
    """
    keep = ~(p <= floor)  # NaN stays
    log_s = (1.0 - e) * torch.where(keep, p, 1.0).log()
    with torch.no_grad():
        peak, index = torch.where(keep, log_s, -math.inf).max(-1, keepdim=True)
        peak = torch.where(peak == -math.inf, 0.0, peak)
        anchor = torch.arange(p.shape[-1], device=p.device) == index
    share = torch.where(keep, (log_s - peak).exp(), 0.0)
    total = share.sum(-1, keepdim=True)
    g = torch.where(keep, g, 0.0)
    g = g - torch.where(anchor, g, 0.0).sum(-1, keepdim=True)
    mean = (share * g).sum(-1, keepdim=True) / torch.where(total > 0.0, total, 1.0)
    s = torch.where(keep, log_s.clamp(max=-smallest_log(p.dtype)).exp(), 0.0)
    most = torch.finfo(p.dtype).max / max(1, p.shape[-1])  # so that what overflows adds up to a number
    grad = torch.where(anchor, 0.0, (s * (g - mean)).clamp(-most, most))
    return torch.where(anchor, -grad.sum(-1, keepdim=True), grad)


def curvature(p: Tensor, e: Power) -> Tensor:
    """kappa = (1 - x + x ln x) / e^2 with x = p^e, without cancellation; 0 where p is 0."""
    positive = p > 0.0
    log_p = torch.where(positive, p, 1.0).log()
    t = log_p * e
    limit, terms = _SERIES[p.dtype]
    small = t.abs() < limit
    near = torch.where(small, t, 0.0)
    far = torch.where(small, 1.0, t)
    series = torch.zeros_like(t)
    for j in range(terms + 1, 1, -1):  # sum over j >= 2 of (j - 1) t^(j - 2) / j!
        series = series * near + (j - 1) / math.factorial(j)
    k = torch.where(small, series, (far * far.exp() - far.expm1()) / far.square())
    return log_p.square() * k


def entropy(p: Tensor, e: Power) -> Tensor:
    """H_alpha(p) over the last dim, (..., 1): Tsallis entropy, Shannon's at e = 0.

    -sum p ln p phi(e ln p) / alpha with phi(t) = expm1(t) / t, so that its derivatives have their limits at e = 0 too.
    """
    log_p = torch.where(p > 0.0, p, 1.0).log()
    t = log_p * e
    limit, terms = _SERIES[p.dtype]
    small = t.abs() < limit
    near, far = torch.where(small, t, 0.0), torch.where(small, 1.0, t)
    series = torch.zeros_like(t)
    for j in range(terms + 1, 0, -1):  # sum over j >= 1 of t^(j - 1) / j!
        series = series * near + 1.0 / math.factorial(j)
    phi = torch.where(small, series, far.expm1() / far)
    return -(p * log_p * phi).sum(-1, keepdim=True) / (1.0 + e)


def _away_from_zero(e: Power) -> Power:
    """e, or a number so small that expm1(e y) / e is y to the last bit: the limits at alpha = 1 without a branch."""
    if isinstance(e, Tensor):
        return torch.where(e == 0.0, e + 1e-20, e)
    return e if e != 0.0 else 1e-20


def reduce_to(rows: Tensor, e: Tensor) -> Tensor:
    """Sum a value per row, (..., 1), down to the shape of e, which has the same number of dims."""
    dims = [i for i, size in enumerate(e.shape) if size == 1 and rows.shape[i] != 1]
    return rows.sum(dims, keepdim=True) if dims else rows


# ---------------------------------------------------------------------------------------------------------------
# Opaque operations: loops over rows that torch.compile and torch.func call and never look into


def _forward(z: Tensor, e: Tensor | None, e_value: float | None, native: bool) -> tuple[Tensor, Tensor]:
    if z.numel() == 0:
        dtype = compute_dtype(z.dtype)
        return z.new_zeros(z.shape, dtype=dtype), z.new_zeros((*z.shape[:-1], 1), dtype=dtype)
    rows, power = z.reshape(-1, z.shape[-1]), power_rows(z, e, e_value)
    p, floor = in_parts(kernels.solve, solve_rows, power, rows) if native else solve_rows(rows, power)
    return p.view(z.shape), floor.view(*z.shape[:-1], 1)


_forward_op = torch.library.custom_op("tamis::entmax_forward", mutates_args=())(_forward)


@_forward_op.register_fake
def _(z: Tensor, e: Tensor | None, e_value: float | None, native: bool) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(z.dtype)
    return z.new_empty(z.shape, dtype=dtype), z.new_empty((*z.shape[:-1], 1), dtype=dtype)


def _backward(
    p: Tensor, e: Tensor | None, e_value: float | None, floor: Tensor, g: Tensor, alpha_grad: bool, native: bool
) -> tuple[Tensor, Tensor]:
    """The score gradient and, per row, the alpha gradient (zeros unless asked for)."""
    if p.numel() == 0:
        return torch.zeros_like(p), torch.zeros_like(floor)
    n, power = p.shape[-1], power_rows(p, e, e_value)
    rows = p.reshape(-1, n), floor.reshape(-1, 1), g.reshape(-1, n)
    plain, fast = partial(_gradient_rows, with_e=alpha_grad), partial(kernels.gradient, with_e=alpha_grad)
    dz, de = in_parts(fast, plain, power, *rows) if native else plain(*rows, power)
    return dz.view(p.shape), de.view(floor.shape)


_backward_op = torch.library.custom_op("tamis::entmax_backward", mutates_args=())(_backward)


@_backward_op.register_fake
def _(
    p: Tensor,
    e: Tensor | None,
    e_value: float | None,
    floor: Tensor,
    g: Tensor,
    alpha_grad: bool,
    native: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(p), torch.empty_like(floor)


def in_parts(fast: RowMethod, plain: RowMethod, power: Power, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """What `fast` gives of the rows whose alpha lies in [1, 2], and `plain` of the others.

    Which method a row meets depends on its own alpha alone.
    """
    if not isinstance(power, Tensor):
        return (fast if kernels.fits(power) else plain)(*rows, power)
    inside = kernels.fits(power)
    if bool(inside.all()):
        return fast(*rows, power)
    own = (inside.squeeze(-1).nonzero().squeeze(-1), fast), ((~inside).squeeze(-1).nonzero().squeeze(-1), plain)
    parts = [(index, method(*(x[index] for x in rows), power[index])) for index, method in own if index.numel()]
    wholes = [first.new_empty(len(power), first.shape[-1]) for first in parts[0][1]]
    for index, found in parts:
        for whole, part in zip(wholes, found, strict=True):
            whole[index] = part
    return wholes[0], wholes[1]


def _gradient_rows(p: Tensor, floor: Tensor, g: Tensor, power: Power, with_e: bool) -> tuple[Tensor, Tensor]:
    """Block by block: the gradient of the scores (rows, n) and that of alpha (rows, 1)."""
    dz = torch.empty_like(p)
    de = torch.zeros_like(floor)
    blocks = row_blocks(p)
    scratch = torch.empty(2, *p[blocks[0]].shape, dtype=p.dtype, device=p.device)
    for block in blocks:
        e_block = power[block] if isinstance(power, Tensor) else power
        p_block, dz_block = p[block], dz[block]
        first, second = scratch[:, : p_block.shape[0]]
        vjp_rows(p_block, e_block, floor[block], g[block].to(p.dtype), dz_block, first)
        if with_e:
            de[block] = alpha_gradient_rows(p_block, e_block, dz_block, (first, second))
    return dz, de


def vjp_rows(p: Tensor, e: Power, floor: Tensor, g: Tensor, out: Tensor, scratch: Tensor) -> None:
    """entmax_vjp of a block of rows (rows, n) into `out`: in place for alpha <= 2 and finite p and g."""
    if (e.max().item() if isinstance(e, Tensor) else e) <= 1.0 and math.isfinite(p[:, 0].sum().item()):
        support = torch.gt(p, floor, out=scratch)
        if isinstance(e, Tensor) or e not in (0.5, 1.0):
            # 0 < p^(1 - e): a floor keeps the logarithm away from 0
            torch.clamp(p, min=math.exp(smallest_log(p.dtype)), out=out)
            s = out.log_().mul_(1.0 - e).exp_().mul_(support)
        elif e == 0.5:
            s = torch.clamp(p, min=math.exp(smallest_log(p.dtype)), out=out).sqrt_().mul_(support)
        else:
            s = out.copy_(support)
        total = s.sum(-1, keepdim=True)
        mean = torch.mul(s, g, out=scratch).sum(-1, keepdim=True).div_(total.add_(total == 0.0))
        if math.isfinite(mean.sum().item()):
            torch.addcmul(scratch, s, mean, value=-1.0, out=out)
            return
    out.copy_(entmax_vjp(p, e, floor, g))


def alpha_gradient_rows(p: Tensor, e: Power, dz: Tensor, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """-<kappa, dz> per row (rows, 1), in two buffers (rows, n).

    kappa = (t x - expm1 t) / e^2 with t = e ln p, x = e^t: its rounding error of eps |ln p| / e only matters as e -> 0,
    where the general form takes over.
    """
    if not isinstance(e, Tensor) and e < 0.0625:
        return -(curvature(p, e) * dz).sum(-1, keepdim=True)
    t, product = scratch
    torch.clamp(p, min=math.exp(smallest_log(p.dtype)), out=t).log_().mul_(e)
    torch.exp(t, out=product).mul_(t).sub_(t.expm1_())
    gradient = product.mul_(dz).sum(-1, keepdim=True).div_(e * -e)
    if isinstance(e, Tensor) and e.min().item() < 0.0625:
        rows = (e < 0.0625).squeeze(-1).nonzero().squeeze(-1)
        gradient[rows] = -(curvature(p[rows], e[rows]) * dz[rows]).sum(-1, keepdim=True)
    return gradient


def power_rows(z: Tensor, e: Tensor | None, e_value: float | None) -> Power:
    """e as one number or one per row (rows, 1), checked where its values are known."""
    if e is None:
        assert e_value is not None
        return e_value
    if e.numel() > 0 and not bool((e > -1.0).all()):
        # NaN is also what normmax hands on for an alpha outside its range.
        low = (e.min() + 1.0).item()
        normmax = "; for normmax alpha must be above 1" if math.isnan(low) else ""
        raise ValueError(f"alpha must be above 0 everywhere{normmax}, got {low:g}")
    return e.to(compute_dtype(z.dtype)).expand(*z.shape[:-1], 1).reshape(-1, 1)


def _to_front(x: Tensor, batch_dim: int | None) -> Tensor:
    """A batched operand with its batch dim first; a shared one with a dim of size 1 in its place."""
    return x.unsqueeze(0) if batch_dim is None else x.movedim(batch_dim, 0)


@_forward_op.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, e: Tensor | None, e_value: float | None, native: bool) -> Any:
    z = _to_front(z, in_dims[0]).expand(info.batch_size, *[-1] * (z.ndim - (in_dims[0] is not None)))
    e = None if e is None else _to_front(e, in_dims[1])
    return _forward_op(z, e, e_value, native), (0, 0)


@_backward_op.register_vmap
def _(
    info: Any,
    in_dims: Any,
    p: Tensor,
    e: Tensor | None,
    e_value: Any,
    floor: Tensor,
    g: Tensor,
    alpha_grad: bool,
    native: bool,
) -> Any:
    p, floor, g = torch.broadcast_tensors(
        _to_front(p, in_dims[0]), _to_front(floor, in_dims[3]), _to_front(g, in_dims[4])
    )
    e = None if e is None else _to_front(e, in_dims[1])
    return _backward_op(p, e, e_value, floor[..., :1], g, alpha_grad, native), (0, 0)


# ---------------------------------------------------------------------------------------------------------------
# autograd


class _Entmax(torch.autograd.Function):
    """(z, e) -> weights, and the floor below which no gradient flows."""

    generate_vmap_rule = True
    with_jvp: type[torch.autograd.Function]

    @staticmethod
    def forward(z: Tensor, e: Tensor | None, e_value: float | None, native: bool) -> tuple[Tensor, Tensor]:
        return (_forward if _is_direct(z) else _forward_op)(z, e, e_value, native)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        p, floor = output
        _save(ctx, p, floor, inputs)
        ctx.mark_non_differentiable(floor)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        p, floor, e = ctx.saved_tensors
        dz, de = _gradients(ctx, p, floor, e, g)
        return dz, de, None, None


class _EntmaxConjugate(torch.autograd.Function):
    """(z, e) -> the conjugate, with the weights (its gradient) as a second output so that it differentiates twice."""

    generate_vmap_rule = True
    with_jvp: type[torch.autograd.Function]

    @staticmethod
    def forward(z: Tensor, e: Tensor | None, e_value: float | None, native: bool) -> tuple[Tensor, Tensor, Tensor]:
        p, floor = (_forward if _is_direct(z) else _forward_op)(z, e, e_value, native)
        power = _away_from_zero(e_value if e is None else e)  # type: ignore[arg-type]
        theta = -torch.where(p.amax(-1, keepdim=True) > 0.0, p.amax(-1, keepdim=True), 1.0).log()
        mean = torch.where(p > 0.0, p * z.to(p.dtype), 0.0).sum(-1, keepdim=True)
        value = (power * mean - (-power * theta).expm1() / power) / (1.0 + power)
        return value.clamp(min=0.0), p, floor  # never below the largest score, which is 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, p, floor = output
        _save(ctx, p, floor, inputs)
        ctx.mark_non_differentiable(floor)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_p: Tensor | None, _: Any) -> Any:
        p, floor, e = ctx.saved_tensors
        dz = de = None
        if g_p is not None:
            dz, de = _gradients(ctx, p, floor, e, g_p)
        if g is not None:
            dz = g * p if dz is None else dz + g * p
            if e is not None and ctx.needs_input_grad[1]:
                slope = reduce_to(g * _conjugate_alpha(p, e), e)
                de = slope if de is None else de + slope
        return (None if dz is None else dz.to(ctx.dtype)), de, None, None


def _conjugate_alpha(p: Tensor, e: Power) -> Tensor:
    """d conjugate / d alpha at fixed scores = -(H_alpha(p) + sum p kappa) / alpha."""
    return -(entropy(p, e) + (p * curvature(p, e)).sum(-1, keepdim=True)) / (1.0 + e)


def _save(ctx: Any, p: Tensor, floor: Tensor, inputs: Any) -> None:
    z, e, ctx.e_value, ctx.native = inputs
    ctx.dtype = z.dtype
    ctx.save_for_backward(p, floor, e)
    ctx.save_for_forward(p, floor, e)


def _gradients(ctx: Any, p: Tensor, floor: Tensor, e: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in z and e for the gradient g of the weights."""
    alpha_grad = e is not None and ctx.needs_input_grad[1]
    if torch.is_grad_enabled():  # somebody will differentiate this again
        power: Power = ctx.e_value if e is None else e
        dz = entmax_vjp(p, power, floor, g)
        de = -(curvature(p, power) * dz).sum(-1, keepdim=True) if alpha_grad else None
    else:
        dz, de = (_backward if _is_direct(g) else _backward_op)(p, e, ctx.e_value, floor, g, alpha_grad, ctx.native)
    return dz.to(ctx.dtype), reduce_to(de, e) if alpha_grad else None  # type: ignore[arg-type]


def _tangent(ctx: Any, dz: Tensor | None, de: Tensor | None) -> tuple[Tensor, Tensor, Power]:
    """The forward derivative of the weights: the Jacobian in z is symmetric, so it is the vjp of the tangent."""
    p, floor, e = ctx.saved_tensors
    power: Power = ctx.e_value if e is None else e
    tangent = torch.zeros_like(p)
    if dz is not None:
        tangent = tangent + entmax_vjp(p, power, floor, dz.to(p.dtype))
    if de is not None:
        tangent = tangent - de * entmax_vjp(p, power, floor, curvature(p, power))
    return tangent, p, power


class _EntmaxJvp(_Entmax):
    @staticmethod
    def jvp(ctx: Any, dz: Tensor | None, de: Tensor | None, *_: Any) -> Any:
        return _tangent(ctx, dz, de)[0], None


class _EntmaxConjugateJvp(_EntmaxConjugate):
    @staticmethod
    def jvp(ctx: Any, dz: Tensor | None, de: Tensor | None, *_: Any) -> Any:
        tangent, p, power = _tangent(ctx, dz, de)
        value = torch.zeros_like(p[..., :1])
        if dz is not None:
            value = value + torch.where(p > 0.0, p * dz.to(p.dtype), 0.0).sum(-1, keepdim=True)
        if de is not None:
            value = value + de * _conjugate_alpha(p, power)
        return value, tangent, None


_Entmax.with_jvp = _EntmaxJvp
_EntmaxConjugate.with_jvp = _EntmaxConjugateJvp
