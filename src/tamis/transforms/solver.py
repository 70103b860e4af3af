"""Row solvers for alpha-entmax: scores in, weights that sum to one out.

Every row z is reduced to one unknown.  Write e = alpha - 1, b = 1 / e and d = z - max z.  The weights are

    p_j = [e d_j + t]_+ ^ b        with the one t in (0, 1] for which sum_j p_j = 1,

and t = p_max^e.  Three forms of the same equation cover all alpha, each where it is exact in fp32
(docs/mathematics.md derives them):

    near one    0 < alpha < 1.125   unknown theta = -ln p_max;  p = exp(-theta + log1p(e d exp(e theta)) / e)
    threshold   1.125 <= alpha <= 2 unknown t;                  p = x^b, x = [e d + t]_+
    edge        alpha > 2           unknown v = smallest weight; p^e = v^e + e (z - z_k), z_k the lowest score kept

Each is solved by Newton steps that cannot overshoot, from a start on the safe side, until the mass is one to
rounding or no longer improves.  There is no iteration count.

The code works on blocks of rows that fit the cache, in place, because at these sizes the elementwise passes are
all the cost.  Two things look odd and are deliberate: comparisons write floats (`torch.gt(..., out=float)`), since
boolean results are several times slower on CPU; and logarithms, roots and exponentials never see 0 or -inf, since
vector math libraries fall back to scalar code there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NEAR_ONE = 0.125
"""Below this e the theta form is the accurate one, from it on the threshold form."""

Power = float | Tensor
"""e = alpha - 1: one number, or one per row with shape (rows, 1)."""

_CPU_BLOCK = 1 << 19  # elements of a block: the working set stays in cache, the cost of a call is still small
_GPU_BLOCK = 1 << 26  # elements: bounds the scratch memory only
_HALVINGS = 3  # a group maximum of the warm start stands for 2^3 scores
_WARM_WIDTH = 128  # narrower rows gain nothing from a warm start
_WARM_STEPS = 3


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all inner work: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def smallest_log(dtype: torch.dtype) -> float:
    """ln of the smallest relative weight that is resolved: safely above underflow."""
    return -700.0 if dtype == torch.float64 else -87.0


def row_blocks(rows: Tensor) -> list[slice]:
    """Slices of a (rows, n) tensor that are worked on at a time."""
    elements = _CPU_BLOCK if rows.device.type == "cpu" else _GPU_BLOCK
    if elements // 2 < rows.numel() < elements * 2:  # scratch is three blocks: keep it below the size of the rows
        elements = rows.numel() // 2
    height = max(1, elements // max(1, rows.shape[-1]))
    return [slice(start, start + height) for start in range(0, rows.shape[0], height)]


class Workspace:
    """Buffers by name that calls in a loop share: fresh memory costs as much as a pass over it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Memory of this shape with undefined contents, valid until `name` is taken again."""
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return buffer[:size].view(shape)


def solve_rows(
    z: Tensor, e: Power, out: Tensor | None = None, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """alpha-entmax of every row of z (rows, n), into `out` if given.

    Returns the weights (rows, n) in the compute dtype, and a floor (rows, 1) which a weight must exceed for gradient
    to flow: 0, or +inf in a row that holds +inf, whose weights do not move with its scores.
    """
    dtype = compute_dtype(z.dtype)
    p = torch.empty(z.shape, dtype=dtype, device=z.device) if out is None else out
    floor = torch.zeros(z.shape[0], 1, dtype=dtype, device=z.device)
    if p.numel() == 0:
        return p, floor
    blocks = row_blocks(z)
    workspace = Workspace(dtype, z.device) if workspace is None else workspace
    scratch = workspace.take("solver", 3, *p[blocks[0]].shape)
    for block in blocks:
        e_block = e[block] if isinstance(e, Tensor) else e
        _solve_block(z[block].to(dtype), e_block, p[block], floor[block], scratch[:, : p[block].shape[0]])
    return p, floor


def _solve_block(z: Tensor, e: Power, out: Tensor, floor: Tensor, scratch: Tensor) -> None:
    """Solve one block of rows into `out`, special values included."""
    maxima = _group_maxima(z)
    row_max = maxima.amax(-1, keepdim=True)
    if math.isfinite(row_max.sum().item()):
        _solve_finite(z, row_max, maxima, e, out, scratch)
        return
    # +inf takes all the weight, shared on ties; all -inf gives zeros; NaN spoils its own row and no other.
    infinite = row_max == math.inf
    tame = torch.where(infinite, torch.where(z == math.inf, 0.0, -math.inf), z)
    tame = torch.where(torch.isfinite(row_max) | infinite, tame, 0.0)
    maxima = _group_maxima(tame)
    _solve_finite(tame, maxima.amax(-1, keepdim=True), maxima, e, out, scratch)
    out.copy_(torch.where(row_max == -math.inf, 0.0, torch.where(row_max.isnan(), math.nan, out)))
    floor.copy_(torch.where(infinite, math.inf, 0.0))


def _solve_finite(z: Tensor, row_max: Tensor, maxima: Tensor, e: Power, out: Tensor, scratch: Tensor) -> None:
    """Choose the form by alpha; rows of a block may need different ones."""
    if not isinstance(e, Tensor):
        form = _softmax_form if e == 0.0 else _form_of(e)
        form(z, row_max, maxima, e, out, scratch)
        return
    form = _form_of(e.min().item())
    if form is _form_of(e.max().item()):
        form(z, row_max, maxima, e, out, scratch)
        return
    regimes = (e >= NEAR_ONE).int() + (e > 1.0).int()
    for regime in (0, 1, 2):
        rows = (regimes == regime).squeeze(-1).nonzero().squeeze(-1)
        if rows.numel() > 0:
            part = out[rows]
            _solve_finite(z[rows], row_max[rows], maxima[rows], e[rows], part, scratch[:, : rows.numel()])
            out[rows] = part


def _form_of(e: float) -> Callable[..., None]:
    return _near_one_form if e < NEAR_ONE else _threshold_form if e <= 1.0 else _edge_form


def _group_maxima(z: Tensor) -> Tensor:
    """Maxima of disjoint groups of scores that together hold the whole row, (rows, groups)."""
    if z.shape[-1] < _WARM_WIDTH:
        return z.amax(-1, keepdim=True)
    for _ in range(_HALVINGS):  # halves are compared many times faster than groups are reduced
        half, odd = divmod(z.shape[-1], 2)
        maxima = torch.maximum(z[:, :half], z[:, half : 2 * half])
        if odd:
            torch.maximum(maxima[:, 0], z[:, -1], out=maxima[:, 0])
        z = maxima
    return z


# ---------------------------------------------------------------------------------------------------------------
# alpha = 1


def _softmax_form(z: Tensor, row_max: Tensor, maxima: Tensor, e: Power, out: Tensor, scratch: Tensor) -> None:
    torch.softmax(z, -1, out=out)
    if z.shape[-1] > 4096:  # its row sums are accumulated plainly: 4e-5 off at 131072
        out.div_(out.sum(-1, keepdim=True))


# ---------------------------------------------------------------------------------------------------------------
# 1.125 <= alpha <= 2: the threshold itself, kept inside x so that nothing cancels at the edge of the support


def _threshold_form(z: Tensor, row_max: Tensor, maxima: Tensor, e: Power, out: Tensor, scratch: Tensor) -> None:
    # x is e d + t where the product is exact, and in units of the scores, d + t / e, where it would round.
    special = {0.5: _Squares, 1.0: _Identity}.get(e) if not isinstance(e, Tensor) else None
    rule = _Powers if special is None else special
    unit = 1.0 if special is None or isinstance(e, Tensor) else e
    top: Tensor = torch.ones_like(row_max) * (unit / e)
    if maxima.shape[-1] > 1:
        # The solution over a subset of the scores bounds the threshold from below, and the group maxima are a good
        # subset at an eighth of the work.  Any number of steps will do: this only chooses where to start.
        x = (maxima - row_max).mul_(unit).add_(top)
        warm = rule(e, *torch.empty(3, *x.shape, dtype=x.dtype, device=x.device))
        for _ in range(_WARM_STEPS):
            x.sub_(warm.step(x, warm.mass(x)))
        top = x.amax(-1, keepdim=True)
    x = scratch[0]
    torch.sub(z, row_max, out=x)
    torch.add(top, x, alpha=unit, out=x)
    solution = rule(e, out, scratch[1], scratch[2])
    progress = _Progress(z.dtype)
    # The steps act on x and not on a threshold beside it: what remains of x near the edge of the support is then
    # exact, where a threshold beside it would blur the mass of thousands of near-ties (1e-3 at 131072).
    while progress.wanted(mass := solution.mass(x)):
        x.sub_(solution.step(x, mass))
    solution.finish(x)  # divides by the mass: one to the last bit, whatever the other rows of the block needed


class _Progress:
    """Ends a Newton loop when no row goes on: each until its mass is one to rounding, or has not come closer.

    Errors of exact steps shrink, so a row that gets no closer is at what rounding allows, whatever the other rows do.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.tolerance = 8 * torch.finfo(dtype).eps
        self.least: Tensor | float = math.inf

    def wanted(self, mass: Tensor) -> bool:
        error = (mass - 1.0).abs_()
        go_on = bool(((error > self.tolerance) & (error < self.least)).any())
        self.least = error if isinstance(self.least, float) else torch.minimum(self.least, error)
        return go_on


class _Powers:
    """p = (e x)^b for x > 0, any e: the mass S and the norm-Newton step (S^e - 1) S^(1 - e) / (e sum (e x)^(b - 1)).

    The step never passes the root, because S^e is a norm of x and so convex in the threshold.  What is stored is
    p / c = x^b with c = e^b: the constant costs a pass on every entry and nothing on the sums.
    """

    def __init__(self, e: Power, p: Tensor, y: Tensor, other: Tensor) -> None:
        self.e, self.b = e, 1.0 / e
        self.c = e**self.b
        self.p, self.y, self.other = p, y, other
        self.lowest = _exp(smallest_log(p.dtype) * e) * self.b
        # Entries out of the support, at x = lowest, weigh exp(smallest_log (1 - e)) each in the slope.
        self.slope_is_clean = not isinstance(e, Tensor) and e <= 0.75

    def mass(self, x: Tensor) -> Tensor:
        _floor_to(x, self.lowest, out=self.y)
        self.total = torch.log(self.y, out=self.p).mul_(self.b).exp_().sum(-1, keepdim=True)
        return self.total * self.c

    def step(self, x: Tensor, mass: Tensor) -> Tensor:
        ratio = torch.div(self.p, self.y, out=self.y)
        if not self.slope_is_clean:
            ratio.mul_(torch.gt(x, 0.0, out=self.other))
        slope = ratio.sum(-1, keepdim=True)
        log_mass = mass.log()
        return (log_mass * self.e).expm1_() * (log_mass * (1.0 - self.e)).exp_() / (slope * self.c)

    def finish(self, x: Tensor) -> None:
        self.p.mul_(torch.gt(x, 0.0, out=self.other)).div_(self.total)


class _Squares(_Powers):
    """alpha = 1.5: p = x^2."""

    def mass(self, x: Tensor) -> Tensor:
        torch.clamp(x, min=0.0, out=self.y)
        # Not vector_norm: it accumulates plainly and is 3e-4 off at 131072 entries.
        self.total = torch.mul(self.y, self.y, out=self.p).sum(-1, keepdim=True)
        return self.total

    def step(self, x: Tensor, mass: Tensor) -> Tensor:
        return (mass - mass.sqrt()) / self.y.sum(-1, keepdim=True)

    def finish(self, x: Tensor) -> None:
        self.p.div_(self.total)


class _Identity(_Squares):
    """alpha = 2: p = x."""

    def mass(self, x: Tensor) -> Tensor:
        self.total = torch.clamp(x, min=0.0, out=self.p).sum(-1, keepdim=True)
        return self.total

    def step(self, x: Tensor, mass: Tensor) -> Tensor:
        return (mass - 1.0) / torch.gt(x, 0.0, out=self.other).sum(-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------------
# 0 < alpha < 1.125: everything relative to the largest weight, so that nothing cancels as alpha -> 1


def _near_one_form(z: Tensor, row_max: Tensor, maxima: Tensor, e: Power, out: Tensor, scratch: Tensor) -> None:
    if isinstance(e, Tensor):
        # e = 0 would divide zero by zero; so small an e gives its limit to the last bit.
        e = torch.where(e == 0.0, 1e-20, e)
    theta = torch.zeros_like(row_max)
    if maxima.shape[-1] > 1:
        d = maxima - row_max
        warm = _Relative(d, e, *torch.empty(3, *d.shape, dtype=d.dtype, device=d.device))
        for _ in range(_WARM_STEPS):
            theta = warm.step(theta, warm.mass(theta))
    solution = _Relative(torch.sub(z, row_max, out=scratch[0]), e, out, scratch[1], scratch[2])
    progress = _Progress(z.dtype)
    while progress.wanted(mass := solution.mass(theta)):
        theta = solution.step(theta, mass)
    solution.finish()


class _Relative:
    """p / p_max = exp(log1p(w) / e) with w = e d exp(e theta), and Newton steps in theta = -ln p_max."""

    def __init__(self, d: Tensor, e: Power, ratio: Tensor, w: Tensor, other: Tensor) -> None:
        self.d, self.e, self.b = d, e, 1.0 / e
        self.ratio, self.w, self.other = ratio, w, other
        self.low, self.high = _log1p_range(e, d.dtype)

    def mass(self, theta: Tensor) -> Tensor:
        torch.mul(self.d, (theta * self.e).exp_().mul_(self.e), out=self.w)
        _floor_to(self.w, self.low, out=self.w)
        _ceil_to(self.w, self.high, out=self.w)
        torch.log1p(self.w, out=self.ratio).mul_(self.b).exp_()
        self.total = self.ratio.sum(-1, keepdim=True)
        return self.total * (-theta).exp_()

    def step(self, theta: Tensor, mass: Tensor) -> Tensor:
        slope = torch.div(self.ratio, torch.add(self.w, 1.0, out=self.other), out=self.other).sum(-1, keepdim=True)
        log_mass = self.total.log() - theta
        return theta - ((log_mass * -self.e).expm1_() * (self.total / slope)).log1p_() * self.b

    def finish(self) -> None:
        # Ratios at the bound are below what the dtype resolves, or below the threshold: zero either way.
        self.ratio.div_(self.total).mul_(torch.gt(self.w, self.low, out=self.other))
        self.ratio.mul_(torch.lt(self.w, self.high, out=self.other))


def _log1p_range(e: Power, dtype: torch.dtype) -> tuple[Power, Power]:
    """Bounds on w beyond which exp(log1p(w) / e) is not resolved: a lower one where e > 0, an upper one where e < 0."""
    if isinstance(e, Tensor):
        bound = (smallest_log(dtype) * e).expm1().clamp(min=4 * torch.finfo(dtype).eps - 1.0)
        return torch.where(e > 0, bound, -math.inf), torch.where(e < 0, bound, math.inf)
    limit = max(math.expm1(smallest_log(dtype) * e), 4 * torch.finfo(dtype).eps - 1.0)
    return (limit, math.inf) if e > 0 else (-math.inf, limit)


# ---------------------------------------------------------------------------------------------------------------
# alpha > 2: relative to the smallest weight of the support, the only form that resolves scores closer than an ulp of t


def _edge_form(z: Tensor, row_max: Tensor, maxima: Tensor, e: Power, out: Tensor, scratch: Tensor) -> None:
    n = z.shape[-1]
    b = 1.0 / e
    descending = z.sort(-1, descending=True).values

    def mass_above(edge: Tensor) -> Tensor:
        return (descending - edge).mul_(e).clamp_(min=0.0).pow_(b).sum(-1, keepdim=True)

    # The k-th largest score is in the support exactly if those above it, measured from it, do not fill the mass.
    low = torch.zeros(z.shape[0], 1, dtype=torch.long, device=z.device)
    high = torch.full_like(low, n - 1)
    last = last_that_holds(lambda k: mass_above(descending.gather(-1, k)) < 1.0, low, high)
    edge = descending.gather(-1, last)
    above = (z - edge).mul_(e)  # p^e = v^e + above
    support = above >= 0.0
    log_above = above.clamp_(min=0.0).log_()
    v = 1.0 / support.sum(-1, keepdim=True).to(z.dtype)
    progress = _Progress(z.dtype)
    while True:
        log_v = v.log()
        log_p = torch.logaddexp(log_v * e, log_above) * b
        mass = out.copy_(torch.where(support, log_p.exp(), 0.0)).sum(-1, keepdim=True)
        if not progress.wanted(mass):
            break
        ratio = torch.where(log_above == -math.inf, 1.0, ((log_v - log_p) * (e - 1.0)).exp())  # p = v at the edge
        slope = torch.where(support, ratio, 0.0).sum(-1, keepdim=True)
        v = (v - (mass - 1.0) / slope).clamp_(min=0.0)
    out.div_(mass)


def last_that_holds(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The largest index of each row, from low to high, that `holds`; low does, and none after one that does not."""
    while bool((low < high).any()):  # the gap halves
        middle = (low + high + 1) // 2
        held = holds(middle)
        low, high = torch.where(held, middle, low), torch.where(held, high, torch.maximum(middle - 1, low))
    return low


# ---------------------------------------------------------------------------------------------------------------
# A number or one per row


def _exp(value: Power) -> Power:
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def _floor_to(x: Tensor, low: Power, *, out: Tensor) -> Tensor:
    return torch.maximum(x, low, out=out) if isinstance(low, Tensor) else torch.clamp(x, min=low, out=out)


def _ceil_to(x: Tensor, high: Power, *, out: Tensor) -> Tensor:
    return torch.minimum(x, high, out=out) if isinstance(high, Tensor) else torch.clamp(x, max=high, out=out)
