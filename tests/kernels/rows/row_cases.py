"""Rows that are hard to solve, and exact results to compare with; shared by interpreted and compiled tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tamis

INF = float("inf")
KINDS = ("randn", "small", "large", "offset", "equal", "one above", "ties", "one dominant", "masked")
SPECIAL = torch.tensor(
    [
        [-INF, -INF, -INF, -INF],
        [INF, 0.0, INF, -INF],
        [float("nan"), 1.0, 0.0, -INF],
        [float("nan"), float("nan"), float("nan"), float("nan")],
        [1.0, -INF, -INF, -INF],
        [0.3, 0.1, 0.0, -INF],
    ]
)


def scores(kind: str, rows: int, width: int, seed: int = 0) -> Tensor:
    z = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + width))
    index = torch.arange(width)
    return {
        "randn": z,
        "small": 1e-6 * z,
        "large": 1e3 * z,
        "offset": 1e3 + z,
        "equal": torch.full_like(z, 0.3),
        "one above": torch.where(index == width // 2, 0.0, -0.9).expand_as(z).clone(),
        "ties": z.round(),
        "one dominant": torch.where(index == width - 1, 50.0, z),
        "masked": torch.where((z > 0.5) & (index > 0), -INF, z),
    }[kind]


def error(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm().clamp(min=1e-6)).item()


def gradients(z: Tensor, alpha: Any, g: Tensor, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Weights, and gradients in the scores and in alpha if that is a tensor."""
    leaves = _leaves(z, alpha, dtype)
    weights = tamis.entmax(leaves[0], leaves[1] if len(leaves) > 1 else alpha, backend=backend)
    return [weights, *torch.autograd.grad(weights, leaves, g.to(weights.dtype))]


def losses(z: Tensor, target: Tensor, alpha: Any, dtype: torch.dtype, backend: str, **options: Any) -> list[Tensor]:
    """Losses of the samples, and gradients of a weighted sum of them in the scores and in alpha."""
    leaves = _leaves(z, alpha, dtype)
    options = {k: v.to(leaves[0].dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    target = target.to(leaves[0].dtype) if target.is_floating_point() else target
    loss = tamis.entmax_loss(
        leaves[0], target, leaves[1] if len(leaves) > 1 else alpha, reduction="none", backend=backend, **options
    )
    g = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=loss.device)
    return [loss, *torch.autograd.grad(loss, leaves, g.view(loss.shape))]


def _leaves(z: Tensor, alpha: Any, dtype: torch.dtype) -> list[Tensor]:
    leaves = [z.detach().to(dtype).requires_grad_()]
    if isinstance(alpha, Tensor):
        leaves.append(alpha.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_())
    return leaves


def close(ours: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    """To a few units of fp32, or to the rounding of what comes in and goes out in 16 bits.

    Weights of wide rows lie where fp16 has few bits left: of those one can ask for the rounding of the exact result.
    """
    least = {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 8e-3)
    for name, x, truth in zip(("values", "d scores", "d alpha"), ours, exact, strict=False):
        assert x.shape == truth.shape
        bound = max(least, 1.1 * error(truth.to(x.dtype), truth))
        assert error(x, truth) <= bound, f"{name}: off by {error(x, truth):.1e}"
