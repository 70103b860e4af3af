"""How weights are compared, and how far they may be off."""

from __future__ import annotations

import math

from torch import Tensor

REGIMES = (0.5, 1.0, 1.05, 1.3, 1.5, 2.0, 3.0)
"""One alpha for every branch of the solver."""
L1_FP32 = 5e-6
L1_FP64 = 1e-13
MASS_FP32 = 1e-5
INF = math.inf


def l1(p: Tensor, q: Tensor) -> float:
    """The largest row-wise L1 distance; NaN counts as infinitely far."""
    return (p.double() - q.double()).abs().sum(-1).nan_to_num(INF, INF).max().item()


def mass_error(p: Tensor) -> float:
    return (p.double().sum(-1) - 1.0).abs().nan_to_num(INF, INF).max().item()
