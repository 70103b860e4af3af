"""alpha as a number and as a tensor: of every shape, dtype and value, for rows of several regimes at once."""

from __future__ import annotations

import math

import pytest
import torch

import tamis
from oracles import entmax_exact
from transforms.cases import INF, L1_FP32, L1_FP64, l1

MIXED = (0.3, 0.9, 1.0, 1.0 + 2.0**-20, 1.01, 1.1, 1.125, 1.3, 1.5, 1.9, 2.0, 2.001, 3.0, 10.0, 64.0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("n", [5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_every_regime_at_once(n: int, dtype: torch.dtype) -> None:
    alpha = torch.tensor(MIXED, dtype=dtype)[torch.randperm(len(MIXED))].unsqueeze(-1)
    z = torch.randn(len(MIXED), n, dtype=dtype)
    rows = torch.stack([tamis.entmax(row, a.item()) for row, a in zip(z, alpha, strict=True)])
    assert l1(tamis.entmax(z, alpha), rows) <= (L1_FP32 if dtype == torch.float32 else L1_FP64)


@pytest.mark.parametrize("pair", [(1.0, 1.05), (0.9, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, 2.5), (0.5, 64.0)])
def test_two_regimes_at_once_with_special_rows(pair: tuple[float, float]) -> None:
    z = torch.randn(2, 4, 6)
    z[:, 1], z[:, 2, 0], z[:, 3, 0] = -INF, INF, math.nan
    p = tamis.entmax(z, torch.tensor(pair).view(2, 1, 1))
    for i in range(2):
        torch.testing.assert_close(p[i], tamis.entmax(z[i], pair[i]), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_one_alpha_per_head() -> None:
    z = torch.randn(2, 3, 4, 5)
    alpha = torch.tensor([1.0, 1.5, 2.0])
    p = tamis.entmax(z, alpha)
    assert torch.equal(p, tamis.entmax(z, alpha.view(3, 1, 1)))
    for head in range(3):
        assert l1(p[:, head], tamis.entmax(z[:, head], alpha[head].item())) <= L1_FP32


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (1, 1), (4, 1), (3, 1, 1), (3, 4, 1), (2, 1, 1, 1), (1, 3, 1, 1), (2, 3, 4, 1)]
)
def test_alpha_broadcasts(shape: tuple[int, ...]) -> None:
    z = torch.randn(2, 3, 4, 5)
    alpha = 1.0 + torch.rand(shape)
    per_head = alpha.view(3, 1, 1) if shape == (3,) else alpha
    every = per_head.expand(2, 3, 4, 1)
    expected = torch.stack(
        [tamis.entmax(row, a.item()) for row, a in zip(z.reshape(-1, 5), every.reshape(-1), strict=True)]
    )
    assert l1(tamis.entmax(z, alpha).reshape(-1, 5), expected) <= L1_FP32


@pytest.mark.parametrize(("shape", "dim"), [((4,), 0), ((1, 4), 0), ((3, 1), 1), ((3, 1), -1), ((1, 1), 0)])
def test_alpha_broadcasts_along_any_dim(shape: tuple[int, ...], dim: int) -> None:
    z = torch.randn(3, 4)
    alpha = 1.0 + torch.rand(shape)
    every = alpha.expand([1 if i == dim % 2 else size for i, size in enumerate(z.shape)])
    p = tamis.entmax(z, alpha, dim).movedim(dim, -1)
    for weights, row, a in zip(p, z.movedim(dim, -1), every.flatten(), strict=True):
        assert l1(weights, tamis.entmax(row, a.item())) <= L1_FP32


@pytest.mark.parametrize("shape", [(2,), (5,), (1, 5), (4, 5), (2, 3, 4, 5), (1, 2, 3, 4, 1), (2, 1, 3, 1)])
def test_alpha_of_a_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"alpha of shape .* does not fit input \(2, 3, 4, 5\)"):
        tamis.entmax(torch.randn(2, 3, 4, 5), torch.full(shape, 1.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_and_alpha_may_differ_in_dtype(dtype: torch.dtype, alpha_dtype: torch.dtype) -> None:
    z = torch.randn(4, 9).to(dtype).requires_grad_()
    alpha = torch.tensor(1.25, dtype=alpha_dtype, requires_grad=True)
    p = tamis.entmax(z, alpha)
    assert p.dtype == dtype
    torch.testing.assert_close(p, tamis.entmax(z, 1.25))
    dz, da = torch.autograd.grad(p[:, 0].sum(), (z, alpha))
    assert dz.dtype == dtype
    assert da.dtype == alpha_dtype
    assert da.item() != 0.0


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, INF])
def test_alpha_out_of_range_raises(alpha: float) -> None:
    z = torch.randn(2, 3)
    with pytest.raises(ValueError, match="alpha must be"):
        tamis.entmax(z, alpha)
    with pytest.raises(ValueError, match="alpha must be"):
        tamis.entmax(z, torch.tensor([[1.5], [alpha]]))


@pytest.mark.parametrize("alpha", [1e-10, 1e-4, 1e4, 1e30, 1e300])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_alpha_in_range_has_weights(alpha: float, as_tensor: bool) -> None:
    z = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, -4.0]])
    expected = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]) if alpha > 1.0 else entmax_exact(z, alpha)
    value = torch.tensor(alpha, dtype=torch.float64) if as_tensor else alpha
    assert l1(tamis.entmax(z, value), expected) <= L1_FP32
    assert l1(tamis.entmax(z.double(), value), expected) <= L1_FP32


@pytest.mark.parametrize("alpha", [True, "1.5", None, torch.tensor(2)])
def test_alpha_of_a_wrong_type_raises(alpha: object) -> None:
    with pytest.raises(TypeError, match="alpha must be"):
        tamis.entmax(torch.randn(2, 3), alpha)  # type: ignore[arg-type]
