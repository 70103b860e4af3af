"""The weights of a row are its own: alone, in a batch and in any order they are the same, beyond rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tamis import budgetmax, entmax, entmax15, normmax, sparsemax

TRANSFORMS = [
    pytest.param(sparsemax, id="sparsemax"),
    pytest.param(entmax15, id="entmax15"),
    *(pytest.param(partial(entmax, alpha=a), id=f"entmax{a}") for a in (0.5, 1.0, 1.001, 1.1, 1.3, 1.5, 1.9, 2.0, 4.0)),
    *(pytest.param(partial(normmax, alpha=a), id=f"normmax{a}") for a in (1.2, 2.0, 6.0)),
    *(pytest.param(partial(budgetmax, budget=b), id=f"budgetmax{b}") for b in (0.3, 1.0, 3.9, 7.5)),
]


def hard_rows(n: int, dtype: torch.dtype) -> Tensor:
    """Rows that need few steps beside rows that need many, or that stall above the tolerance in fp32."""
    generator = torch.Generator().manual_seed(n)
    z = torch.randn(40, n, generator=generator, dtype=torch.float64)
    z[0:8] *= 100.0
    z[8:16] *= 1e-3
    z[16] = 0.0
    z[17] = torch.linspace(0.0, 1e-6, n)
    z[18, 0] = 1e4
    z[19] = torch.logspace(-12, 2, n, dtype=torch.float64)
    z[20] += 1e5  # few digits are left after the point
    z[21, n // 2 :] = -torch.inf
    z[22] = torch.arange(n)
    return z.to(dtype)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("n", "dtype", "tolerance"), [(8, torch.float64, 1e-13), (8, torch.float32, 3e-6), (700, torch.float32, 3e-6)]
)
def test_a_row_does_not_depend_on_the_others(
    transform: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, tolerance: float
):
    z = hard_rows(n, dtype)
    together = transform(z)
    alone = torch.cat([transform(row) for row in z.split(1)])
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(together, alone, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(transform(z[order]), alone[order], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_spoilt_rows_spoil_nobody(transform: Callable[[Tensor], Tensor]):
    z = hard_rows(9, torch.float64)
    alone = torch.cat([transform(row) for row in z.split(1)])
    spoilt = torch.tensor([[torch.nan] * 9, [torch.inf] + [0.0] * 8, [-torch.inf] * 9], dtype=torch.float64)
    mixed = transform(torch.stack([row for row in z for row in (row, *spoilt)]))[::4]
    torch.testing.assert_close(mixed, alone, rtol=0.0, atol=1e-13)
