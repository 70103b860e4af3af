"""alpha-entmax in a number of steps that is known beforehand, in plain operations: for graphs that can hold no loop.

The steps are those of :mod:`tamis.transforms.solver`, from the same start, and how many are enough is proven.  Let h be
the norm whose level 1 is sought and g = h - 1 (docs/mathematics.md, 3.1).  h is convex, so a Newton step from t to t'
has g(t) >= g(t') + h'(t') (t - t'), which says

    g(t') / g(t) + h'(t') / h'(t) <= 1.

Slopes fall from at most n^e to no less than 1, so the second ratios have a product of at least n^-e.  As log(1 - e^-u)
is concave, the product of K first ratios is largest where all second ones are n^(-e/K):

    g_K <= (n^e - 1) (1 - n^(-e/K))^K.

The mass is then at most (1 + g_K)^(1/e), and dividing by it moves the weights by no more than twice its excess: the L1
error is at most 2 ((1 + g_K)^(1/e) - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tamis.transforms.solver import NEAR_ONE, smallest_log

TOLERANCE = 1e-6
"""L1 error of a row of weights in exact arithmetic: that of fp32 rounding."""
SOFTMAX = 1e-8
"""Below this e the weights are those of softmax in fp32."""
_HIDDEN = -1e30


def error_bound(e: float, width: int, steps: int) -> float:
    """The largest L1 error of a row of up to `width` scores after so many steps, in exact arithmetic."""
    if e <= 0.0 or width < 2:
        return 0.0
    spread = e * math.log(width)
    level = math.expm1(spread) * (-math.expm1(-spread / steps)) ** steps
    exponent = math.log1p(level) / e
    return 2.0 * math.expm1(exponent) if exponent < 700.0 else math.inf


def steps_needed(e: float, width: int, tolerance: float = TOLERANCE) -> int:
    """How many steps make every row of up to `width` scores right to `tolerance` in L1: alpha = 1 + e, in [1, 2]."""
    if not 0.0 <= e <= 1.0:
        raise ValueError(f"alpha must lie in [1, 2], got {e + 1.0}")
    if width < 1 or not tolerance > 0.0:
        raise ValueError(f"width must be at least 1 and tolerance above 0, got {width} and {tolerance}")
    return next(steps for steps in range(1, 1000) if error_bound(e, width, steps) <= tolerance)


def fixed_entmax(z: Tensor, powers: Sequence[float], width: int) -> Tensor:
    """Weights of scores z (B, H, Lq, Lk), Lk at most `width`; `powers` are e = alpha - 1, one for each head.

    Scores of -inf are hidden, and rows of nothing else are zero.
    """
    top = z.amax(-1, keepdim=True)
    seen = top > -math.inf
    relative = torch.where(seen, (z - torch.where(seen, top, 0.0)).clamp(min=_HIDDEN), 0.0)
    heads: dict[Callable[..., Tensor], list[int]] = {}
    for head, e in enumerate(powers):
        heads.setdefault(_form_of(e), []).append(head)
    parts, order = [], []
    for form, members in heads.items():
        chosen = [powers[head] for head in members]
        steps = max(steps_needed(e, width) for e in chosen)
        rows = relative if len(heads) == 1 else relative[:, members]
        parts.append(form(rows, torch.tensor(chosen, dtype=z.dtype, device=z.device)[:, None, None], steps))
        order += members
    weights = parts[0] if len(parts) == 1 else torch.cat(parts, 1)[:, [order.index(head) for head in range(len(order))]]
    return torch.where(seen, weights, 0.0)


def _form_of(e: float) -> Callable[..., Tensor]:
    if e < SOFTMAX:
        return _softmax
    return _near_one if e < NEAR_ONE else {0.5: _squares, 1.0: _identity}.get(e, _threshold)


def _softmax(d: Tensor, e: Tensor, steps: int) -> Tensor:
    return torch.softmax(d, -1)


def _squares(d: Tensor, e: Tensor, steps: int) -> Tensor:
    """alpha = 1.5: p = x^2 with x = d / 2 + t, each step subtracted from x itself."""
    x = d * 0.5 + 1.0
    for _ in range(steps):
        y = torch.relu(x)
        mass = (y * y).sum(-1, keepdim=True)
        x = x - (mass - torch.sqrt(mass)) / y.sum(-1, keepdim=True)
    y = torch.relu(x)
    return y * y / (y * y).sum(-1, keepdim=True)


def _identity(d: Tensor, e: Tensor, steps: int) -> Tensor:
    """alpha = 2: p = x with x = d + t."""
    x = d + 1.0
    for _ in range(steps):
        excess = torch.relu(x).sum(-1, keepdim=True) - 1.0
        x = x - excess / (x > 0.0).to(d.dtype).sum(-1, keepdim=True)
    y = torch.relu(x)
    return y / y.sum(-1, keepdim=True)


def _threshold(d: Tensor, e: Tensor, steps: int) -> Tensor:
    """p = (e x)^b with x = d + t / e."""
    b = 1.0 / e
    c, lowest = e**b, torch.exp(smallest_log(d.dtype) * e) * b
    x = d + b
    for step in range(steps + 1):
        y = torch.maximum(x, lowest)
        power = torch.exp(torch.log(y) * b) * (x > 0.0).to(d.dtype)
        total = power.sum(-1, keepdim=True)
        if step == steps:
            return power / total
        mass = total * c
        slope = (power / y).sum(-1, keepdim=True) * c
        x = x - (mass - torch.exp(torch.log(mass) * (1.0 - e))) / slope
    raise AssertionError("unreachable")


def _near_one(d: Tensor, e: Tensor, steps: int) -> Tensor:
    """p = r / sum r with r = (1 + w)^b, w = e d exp(u) and u = e theta: nothing cancels as e falls to 0.

    An error of u is a relative one of w, no more, so the steps do with log(1 + w); only the weights need log1p.
    """
    lowest = torch.expm1(smallest_log(d.dtype) * e).clamp(min=4.0 * torch.finfo(d.dtype).eps - 1.0)
    scaled, u = e * d, torch.zeros_like(d[..., :1])
    for _ in range(steps):
        base = 1.0 + torch.maximum(scaled * torch.exp(u), lowest)
        ratio = torch.exp(torch.log(base) / e)
        total = ratio.sum(-1, keepdim=True)
        slope = (ratio / base).sum(-1, keepdim=True)
        u = u - torch.log(1.0 + (torch.exp(u - e * torch.log(total)) - 1.0) * (total / slope))
    w = torch.maximum(scaled * torch.exp(u), lowest)
    ratio = torch.exp(_log1p(w) / e) * (w > lowest).to(d.dtype)
    return ratio / ratio.sum(-1, keepdim=True)


def _log1p(w: Tensor) -> Tensor:
    """As it is, because runtimes write log(1 + w), which forgets a small w."""
    q = w / (w + 2.0)
    square = q * q
    near = 2.0 * q * (1.0 + square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0 + square * (1.0 / 9.0)))))
    small = torch.abs(w) < 0.25
    return torch.where(small, near, torch.log(torch.where(small, 1.0, 1.0 + w)))
