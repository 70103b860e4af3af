"""The threshold and the support size: what they reconstruct, what they count, and what theory says of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

import tamis
from oracles import entmax15_by_sorting, entmax_by_bisection, entmax_exact, entmax_mp, sparsemax_by_sorting

ALPHAS = (0.5, 0.9, 1.01, 1.05, 1.125, 1.3, 1.5, 1.75, 2.0, 2.5, 4.0)
INF = math.inf


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rebuild(z: Tensor, alpha: float | Tensor, tau: Tensor) -> Tensor:
    return ((alpha - 1.0) * z - tau).clamp(min=0.0) ** (1.0 / (alpha - 1.0))


# ---------------------------------------------------------------------------------------------------------------
# The threshold


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_threshold_rebuilds_the_weights(alpha: float, scale: float) -> None:
    z = scale * torch.randn(10, 30, dtype=torch.float64)
    tau, _ = tamis.entmax_threshold(z, alpha)
    assert tau.shape == (10, 1)
    # beyond alpha = 2 a threshold resolves weights to eps^(1 / (alpha - 1)) only
    tolerance = max(1e-11, (100.0 * torch.finfo(torch.float64).eps) ** (1.0 / (alpha - 1.0)) if alpha > 2.0 else 0.0)
    torch.testing.assert_close(rebuild(z, alpha, tau), tamis.entmax(z, alpha), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threshold_in_low_precision(alpha: float, dtype: torch.dtype) -> None:
    z = torch.randn(10, 30).to(dtype)
    tau, support = tamis.entmax_threshold(z, alpha)
    assert tau.dtype == torch.float32
    assert support.dtype == torch.int64
    torch.testing.assert_close(rebuild(z.float(), alpha, tau), tamis.entmax(z.float(), alpha), rtol=0.0, atol=5e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_threshold_is_the_exact_one(alpha: float) -> None:
    z = torch.randn(5, 8, dtype=torch.float64)
    tau, _ = tamis.entmax_threshold(z, alpha)
    for row, value in zip(z.tolist(), tau.flatten().tolist(), strict=True):
        exact = (alpha - 1.0) * max(row) - float(max(entmax_mp(row, alpha))) ** (alpha - 1.0)
        assert abs(value - exact) <= 1e-13 * (1.0 + abs(exact))


def test_threshold_at_alpha_one_is_its_limit() -> None:
    z = torch.randn(4, 6, dtype=torch.float64)
    for alpha in (1.0, torch.ones((), dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)):
        tau, support = tamis.entmax_threshold(z, alpha)
        assert (tau == -1.0).all()
        assert (support == 6).all()
    for alpha in (1.0 - 1e-9, 1.0 + 1e-9):
        torch.testing.assert_close(
            tamis.entmax_threshold(z, alpha)[0], torch.full((4, 1), -1.0).double(), rtol=1e-7, atol=0
        )


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_threshold_along_any_dim(dim: int) -> None:
    z = torch.randn(3, 4, 5)
    tau, support = tamis.entmax_threshold(z, 1.5, dim)
    assert tau.shape == support.shape == tuple(1 if i == dim % 3 else size for i, size in enumerate(z.shape))
    torch.testing.assert_close(rebuild(z, 1.5, tau), tamis.entmax(z, 1.5, dim), rtol=0.0, atol=5e-6)
    assert torch.equal(support, (tamis.entmax(z, 1.5, dim) > 0.0).sum(dim, keepdim=True))


def test_threshold_of_one_alpha_per_head() -> None:
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    alpha = torch.tensor([1.2, 1.5, 2.0], dtype=torch.float64)
    tau, support = tamis.entmax_threshold(z, alpha)
    assert tau.shape == support.shape == (2, 3, 4, 1)
    torch.testing.assert_close(rebuild(z, alpha.view(3, 1, 1), tau), tamis.entmax(z, alpha), rtol=0.0, atol=1e-11)
    for head, value in enumerate(alpha.tolist()):
        torch.testing.assert_close(tau[:, head], tamis.entmax_threshold(z[:, head], value)[0])


def test_shift_moves_the_threshold_by_its_scale() -> None:
    z = torch.randn(6, 9, dtype=torch.float64)
    for alpha in (0.5, 1.0, 1.2, 2.0, 4.0):
        tau, support = tamis.entmax_threshold(z, alpha)
        moved, same = tamis.entmax_threshold(z + 100.0, alpha)
        torch.testing.assert_close(moved, tau + 100.0 * (alpha - 1.0), rtol=1e-12, atol=1e-12)
        assert torch.equal(same, support)


# ---------------------------------------------------------------------------------------------------------------
# The support


@pytest.mark.parametrize("n", [1, 2, 30, 500])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_support_sizes_match_the_oracles(n: int, scale: float) -> None:
    z = scale * torch.randn(20, n)
    for alpha, p in (
        (1.3, entmax_by_bisection(z, 1.3)),
        (1.5, entmax15_by_sorting(z)),
        (2.0, sparsemax_by_sorting(z)),
    ):
        power = alpha - 1.0
        tau = power * z.double().amax(-1, keepdim=True) - p.amax(-1, keepdim=True) ** power
        sure = ((power * z - tau).abs() > 1e-6 * (1.0 + tau.abs())).all(-1)  # no score at the threshold, to rounding
        assert sure.float().mean() >= 0.5
        _, support = tamis.entmax_threshold(z, alpha)
        assert torch.equal(support[sure], (p > 0.0).sum(-1, keepdim=True)[sure])
        assert torch.equal(support[sure], (tamis.entmax(z, alpha) > 0.0).sum(-1, keepdim=True)[sure])


@pytest.mark.parametrize("alpha", [2.5, 4.0, 10.0, 64.0])
def test_support_sizes_at_large_alpha(alpha: float) -> None:
    z = 0.1 * torch.randn(10, 8)
    _, support = tamis.entmax_threshold(z, alpha)
    assert torch.equal(support, (entmax_exact(z, alpha) > 0.0).sum(-1, keepdim=True))
    z = z.index_fill(-1, torch.tensor([0, 5]), 7.0)
    assert (tamis.entmax_threshold(z, alpha)[1] == 2).all()


def test_support_is_counted_by_the_threshold_and_not_by_underflow() -> None:
    """At alpha = 1.01 a weight is x^100: fp32 loses it below x = 0.4, and float64 below 6e-4."""
    z = torch.linspace(-99.0, 0.0, 100)
    exact = [weight > 0 for weight in entmax_mp(z.tolist(), 1.01)]
    for scores in (z, z.double()):
        _, support = tamis.entmax_threshold(scores, 1.01)
        assert support.item() == sum(exact)
    assert (tamis.entmax(z, 1.01) > 0.0).sum() < sum(exact) - 10


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_everything_is_in_the_support_up_to_alpha_one(alpha: float) -> None:
    z = torch.tensor([[0.0, -200.0, -1e4, 3.0], [0.0, -INF, 1.0, -INF]])
    for value in (alpha, torch.tensor(alpha)):
        assert tamis.entmax_threshold(z, value)[1].flatten().tolist() == [4, 2]


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
def test_one_score_far_above_is_alone(alpha: float) -> None:
    z = torch.zeros(1, 1000)
    z[0, 5] = 1.001 / (alpha - 1.0)
    tau, support = tamis.entmax_threshold(z, alpha)
    assert support.item() == 1
    assert tau.item() == pytest.approx((alpha - 1.0) * z[0, 5].item() - 1.0, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------
# Special values


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 3.0])
def test_rows_with_nothing_to_attend_to(alpha: float) -> None:
    z = torch.randn(3, 4)
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    for value in (alpha, torch.tensor(alpha), torch.full((3, 1), alpha)):
        tau, support = tamis.entmax_threshold(z, value, mask=mask)
        assert tau[1].item() == INF
        assert tau[[0, 2]].isfinite().all()
        assert support[1].item() == 0
        assert support[0].item() <= 3
        part = tamis.entmax_threshold(z[:1, [0, 1, 3]], alpha)
        torch.testing.assert_close((tau[:1], support[:1]), part, rtol=1e-5, atol=1e-6)
    assert tamis.entmax_threshold(torch.full((2, 3), -INF), alpha)[1].tolist() == [[0], [0]]


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 3.0])
def test_infinite_scores_are_the_support(alpha: float) -> None:
    z = torch.tensor([[INF, 0.0, INF, -INF], [0.0, 0.0, 0.0, 0.0]])
    for value in (alpha, torch.tensor(alpha)):
        tau, support = tamis.entmax_threshold(z, value)
        assert support.flatten().tolist() == [2, 4]
        assert not tau.isnan().any()


def test_nan_stays_in_its_row() -> None:
    z = torch.tensor([[0.0, math.nan, 1.0], [0.0, 0.5, 1.0]])
    tau, _ = tamis.entmax_threshold(z, 1.5)
    assert tau[0].isnan()
    torch.testing.assert_close(tau[1:], tamis.entmax_threshold(z[1:], 1.5)[0])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty_rows(shape: tuple[int, ...]) -> None:
    tau, support = tamis.entmax_threshold(torch.empty(shape), 1.5)
    assert tau.shape == support.shape == (*shape[:-1], 1)
    assert (tau == INF).all()
    assert (support == 0).all()


def test_a_single_number() -> None:
    tau, support = tamis.entmax_threshold(torch.tensor(3.0), 1.5)
    assert tau.item() == 0.5
    assert support.item() == 1


# ---------------------------------------------------------------------------------------------------------------
# Derivatives


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.05, 1.3, 1.5, 2.0, 3.0])
def test_threshold_gradients(alpha: float) -> None:
    z = (0.5 * torch.randn(2, 4, dtype=torch.float64)).requires_grad_()
    a = torch.full((2, 1), alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: tamis.entmax_threshold(x, alpha)[0], z, check_forward_ad=True)
    assert gradcheck(lambda x, a: tamis.entmax_threshold(x, a)[0], (z, a), check_forward_ad=True)
    assert gradgradcheck(lambda x, a: tamis.entmax_threshold(x, a)[0], (z, a), fast_mode=True)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 3.0])
def test_threshold_gradient_is_the_escort_distribution(alpha: float) -> None:
    """d tau / d z = (alpha - 1) s / sum s with s = p^(2 - alpha)."""
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(tamis.entmax_threshold(z, alpha)[0].sum(), z)
    p = tamis.entmax(z.detach(), alpha)
    s = torch.where(p > 0.0, p ** (2.0 - alpha), 0.0)
    torch.testing.assert_close(gradient, (alpha - 1.0) * s / s.sum(-1, keepdim=True), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 3.0])
def test_threshold_gradients_of_ties_and_masked_rows(alpha: float) -> None:
    z = torch.tensor([[1.0, 1.0, 1.0, -9.0], [0.3, 0.2, 0.1, 0.0], [0.3, -INF, 0.2, 0.1]], dtype=torch.float64)
    z.requires_grad_()
    a = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True], [False], [True]])
    tau, _ = tamis.entmax_threshold(z, a, mask=mask)
    dz, da = torch.autograd.grad(tau[[0, 2]].sum(), (z, a))
    assert dz.isfinite().all()
    assert da.isfinite().all()
    assert (dz[1] == 0.0).all()
    assert da[1].item() == 0.0
    assert dz[2, 1].item() == 0.0
    torch.testing.assert_close(dz.sum(-1)[[0, 2]], torch.full((2,), alpha - 1.0, dtype=torch.float64))


def test_threshold_under_vmap() -> None:
    z = torch.randn(3, 5)
    torch.testing.assert_close(vmap(lambda x: tamis.entmax_threshold(x, 1.5))(z), tamis.entmax_threshold(z, 1.5))


# ---------------------------------------------------------------------------------------------------------------
# Theory


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.75, 2.0, 2.5, 4.0])
@pytest.mark.parametrize("extra", [1, 30, 1000])
def test_scores_below_the_threshold_change_no_weight(alpha: float, extra: int) -> None:
    z = torch.randn(12, 20)
    tau, support = tamis.entmax_threshold(z, alpha)
    highest = tau / (alpha - 1.0)
    highest = highest - 1e-5 * (1.0 + highest.abs())  # below the threshold after rounding as well
    more = highest - torch.rand(12, extra) * torch.tensor([0.0, 1e-3, 10.0]).repeat(4).unsqueeze(-1)
    order = torch.randperm(20 + extra)
    longer = torch.cat([z, more], -1)[:, order]
    p = torch.empty_like(longer)
    p[:, order] = tamis.entmax(longer, alpha)
    assert (p[:, 20:] == 0.0).all()
    # Exactly equal on paper, and to 1e-14 in float64 below; here each solution is right to a few units of fp32.
    assert (p[:, :20] - tamis.entmax(z, alpha)).abs().max() <= 2 * torch.finfo(torch.float32).eps
    after, same = tamis.entmax_threshold(longer, alpha)
    torch.testing.assert_close(after, tau, rtol=1e-6, atol=1e-6)
    assert torch.equal(same, support)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.75, 2.0, 2.5, 4.0])
def test_scores_below_the_threshold_change_no_weight_in_float64(alpha: float) -> None:
    z = torch.randn(12, 20, dtype=torch.float64)
    tau, _ = tamis.entmax_threshold(z, alpha)
    more = tau / (alpha - 1.0) - 1e-9 - torch.rand(12, 50, dtype=torch.float64)
    p = tamis.entmax(torch.cat([z, more], -1), alpha)
    assert (p[:, 20:] == 0.0).all()
    assert (p[:, :20] - tamis.entmax(z, alpha)).abs().max() <= 1e-14


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.75, 2.0, 2.5, 4.0])
def test_a_score_above_the_threshold_gets_weight(alpha: float) -> None:
    z = torch.randn(12, 20, dtype=torch.float64)
    tau, support = tamis.entmax_threshold(z, alpha)
    longer = torch.cat([z, tau / (alpha - 1.0) + 0.05], -1)
    assert (tamis.entmax(longer, alpha)[:, -1] > 0.0).all()
    assert (tamis.entmax_threshold(longer, alpha)[1] <= support + 1).all()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 1.75, 2.0, 2.5, 4.0, 10.0])
@pytest.mark.parametrize("k", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("rest", [1, 100])
def test_k_equal_leaders_share_the_weight(alpha: float, k: int, rest: int) -> None:
    gap = k ** (1.0 - alpha) / (alpha - 1.0)
    z = torch.zeros(k + rest)
    z[:k] = max(gap, 1e-30) * 1.0001
    z = z[torch.randperm(k + rest)]
    p = tamis.entmax(z, alpha)
    assert (p[z > 0.0] - 1.0 / k).abs().max() <= 1e-6
    assert (p[z == 0.0] == 0.0).all()
    assert tamis.entmax_threshold(z, alpha)[1].item() == k
    z = torch.where(z > 0.0, gap * 0.9, 0.0).double()
    assert (tamis.entmax(z, alpha) > 0.0).all()
    assert tamis.entmax_threshold(z, alpha)[1].item() == k + rest
