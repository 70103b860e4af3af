"""Derivatives in the scores and in alpha: every order and every mode of autograd, against differences and oracles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import tamis
from oracles import alpha_derivative, entmax_mp, jacobian

ALPHAS = (0.5, 0.9, 1.0, 1.0 + 1e-6, 1.05, 1.2, 1.5, 1.8, 2.0, 2.3, 3.0, 5.0)
REGIMES = (0.5, 1.0, 1.05, 1.3, 1.5, 2.0, 3.0)
INF = math.inf


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def scores(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=dtype)).requires_grad_()


def alphas(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """One alpha per row, (rows, 1)."""
    return torch.tensor(values, dtype=dtype).unsqueeze(-1).requires_grad_()


def first_and_second(z: Tensor, alpha: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
    (first,) = torch.autograd.grad((weights * tamis.entmax(z, alpha)).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad((weights * first).sum(), z)
    return first.detach(), second


# ---------------------------------------------------------------------------------------------------------------
# Finite differences


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradcheck_in_scores(alpha: float) -> None:
    assert gradcheck(lambda x: tamis.entmax(x, alpha), scores(2, 5), check_forward_ad=True)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.3, 1.5])
def test_gradcheck_in_alpha(alpha: float, scale: float) -> None:
    assert gradcheck(tamis.entmax, (scores(2, 4, scale=scale), alphas(alpha, alpha)), check_forward_ad=True)


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.5, 2.3])
def test_gradcheck_of_batched_gradients(alpha: float) -> None:
    z, a = scores(2, 4, scale=0.7), torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        tamis.entmax, (z, a), check_batched_grad=True, check_batched_forward_grad=True, check_forward_ad=True
    )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradgradcheck(alpha: float) -> None:
    z, a = scores(2, 3, scale=0.3), alphas(alpha, alpha)
    assert gradgradcheck(lambda x: tamis.entmax(x, alpha), z)
    assert gradgradcheck(tamis.entmax, (z, a))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradgradcheck_of_sparse_rows(alpha: float) -> None:
    fixed = torch.tensor([[-3.0, -40.0], [-INF, -INF]], dtype=torch.float64)
    free = torch.tensor([[2.0, 1.8], [0.1, 0.05]], dtype=torch.float64, requires_grad=True)

    def weights(top: Tensor, a: Tensor) -> Tensor:
        return tamis.entmax(torch.cat([top, fixed], -1), a)

    assert gradcheck(weights, (free, alphas(alpha, alpha)), check_forward_ad=True)
    assert gradgradcheck(weights, (free, alphas(alpha, alpha)))


def test_gradgradcheck_forward_over_reverse() -> None:
    inputs = scores(7, 4, scale=0.3), alphas(*REGIMES)
    assert gradgradcheck(
        tamis.entmax, inputs, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 1, 1), (1, 3, 1, 1), (4, 1), (2, 3, 4, 1)])
def test_gradcheck_of_broadcast_alpha(shape: tuple[int, ...]) -> None:
    z = scores(2, 3, 4, 5)
    a = (1.2 + 0.7 * torch.rand(shape, dtype=torch.float64)).requires_grad_()
    assert gradcheck(tamis.entmax, (z, a), fast_mode=True)
    assert torch.autograd.grad(tamis.entmax(z, a).square().sum(), a)[0].shape == a.shape


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_gradcheck_along_other_dims(dim: int) -> None:
    z = scores(3, 4, 2)
    a = torch.full([1 if i == dim % 3 else size for i, size in enumerate(z.shape)], 1.4, dtype=torch.float64)
    assert gradcheck(lambda x, a: tamis.entmax(x, a, dim), (z, a.requires_grad_()), check_forward_ad=True)
    assert gradgradcheck(lambda x, a: tamis.entmax(x, a, dim), (z, a), fast_mode=True)


# ---------------------------------------------------------------------------------------------------------------
# The alpha gradient, against the exact one


@pytest.mark.parametrize(
    "alpha",
    [0.5, 0.9, 1.0 - 1e-3, 1.0, 1.0 + 1e-6, 1.0001, 1.001, 1.01, 1.1, 1.125, 1.5, 1.9, 2.0, 2.5, 4.0, 10.0, 64.0],
)
def test_alpha_gradient_is_exact(alpha: float) -> None:
    z = scores(3, 6, scale=0.6)
    a = alphas(alpha, alpha, alpha)
    upstream = torch.randn(3, 6, dtype=torch.float64)
    (ours,) = torch.autograd.grad(tamis.entmax(z, a), a, upstream)
    digits = 400 if alpha > 5.0 else 60
    exact = torch.stack([upstream[i] @ alpha_derivative(row, alpha, digits) for i, row in enumerate(z.tolist())])
    torch.testing.assert_close(ours.squeeze(-1), exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [1.001, 1.01, 1.2, 1.5, 2.0, 3.0])
def test_alpha_gradient_by_plain_differences_of_the_oracle(alpha: float) -> None:
    row, step = [0.9, 0.3, 0.2, -0.4, -5.0], 1e-6
    after, before = entmax_mp(row, alpha + step), entmax_mp(row, alpha - step)
    slopes = torch.tensor([float(a - b) / (2 * step) for a, b in zip(after, before, strict=True)], dtype=torch.float64)
    z = torch.tensor(row, dtype=torch.float64)
    ours = jacrev(lambda a: tamis.entmax(z, a))(torch.tensor(alpha, dtype=torch.float64))
    torch.testing.assert_close(ours, slopes, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-6, 1.0001, 1.01, 1.1, 1.5, 2.0])
@pytest.mark.parametrize("n", [5, 64, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_alpha_gradient_in_fp32(alpha: float, n: int, scale: float) -> None:
    z = scale * torch.randn(32, n)
    upstream = torch.randn(32, n)
    a = alphas(*[alpha] * 32, dtype=torch.float32)
    (ours,) = torch.autograd.grad(tamis.entmax(z, a), a, upstream)
    precise = a.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(tamis.entmax(z.double(), precise), precise, upstream.double())
    assert ours.dtype == torch.float32
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_alpha_gradient_at_one_is_the_limit_of_the_paper() -> None:
    z = scores(4, 7)
    a = alphas(1.0, 1.0, 1.0, 1.0)
    upstream = torch.randn(4, 7, dtype=torch.float64)
    (ours,) = torch.autograd.grad(tamis.entmax(z, a), a, upstream)
    p = torch.softmax(z.detach(), -1)
    entropies = -p * p.log()
    slope = 0.5 * (entropies * p.log() - p * (entropies * p.log()).sum(-1, keepdim=True))
    torch.testing.assert_close(ours, (slope * upstream).sum(-1, keepdim=True), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_gradient_is_continuous_across_one(dtype: torch.dtype) -> None:
    z = torch.randn(8, 20, dtype=dtype)
    upstream = torch.randn(8, 20, dtype=dtype)

    def slope(alpha: float) -> Tensor:
        a = alphas(*[alpha] * 8, dtype=dtype)
        return torch.autograd.grad(tamis.entmax(z, a), a, upstream)[0].double()

    at_one = slope(1.0)
    for distance in (2.0**-23, 1e-6, 1e-5, 1e-4):
        for alpha in (1.0 - distance, 1.0 + distance):
            assert (slope(alpha) - at_one).norm() <= (1e-5 + 50.0 * distance) * at_one.norm()


@pytest.mark.parametrize("alpha", [1.125, 1.5, 2.0])
def test_gradients_are_continuous_where_the_solver_changes_form(alpha: float) -> None:
    z = scores(6, 20)
    upstream = torch.randn(6, 20, dtype=torch.float64)

    def gradients(value: float) -> tuple[Tensor, ...]:
        a = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(tamis.entmax(z, a), (z, a), upstream)

    for value in (alpha - 1e-9, alpha + 1e-9):
        for near, at in zip(gradients(value), gradients(alpha), strict=True):
            torch.testing.assert_close(near, at, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0])
def test_alpha_gradient_of_half_precision_scores(alpha: float) -> None:
    z = torch.randn(16, 40).bfloat16()
    upstream = torch.randn(16, 40).bfloat16()
    a = torch.tensor(alpha, requires_grad=True)
    (half,) = torch.autograd.grad(tamis.entmax(z, a), a, upstream)
    (full,) = torch.autograd.grad(tamis.entmax(z.float(), a), a, upstream.float())
    torch.testing.assert_close(half, full, rtol=1e-5, atol=0.0)


# ---------------------------------------------------------------------------------------------------------------
# Special values


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minus_infinity_passes_no_gradient(alpha: float, dtype: torch.dtype) -> None:
    z = torch.randn(4, 6, dtype=dtype)
    z[:, 1::3] = -INF
    z[2] = -INF
    upstream = torch.randn(4, 6, dtype=dtype)
    kept = [0, 2, 3, 5]
    for value in (alpha, torch.tensor(alpha, dtype=dtype, requires_grad=True)):
        full, part = z.clone().requires_grad_(), z[:, kept].requires_grad_()
        for of_full, of_part in zip(
            first_and_second(full, value, upstream), first_and_second(part, value, upstream[:, kept]), strict=True
        ):
            assert of_full.isfinite().all()
            assert (of_full[:, 1::3] == 0.0).all()
            assert (of_full[2] == 0.0).all()
            torch.testing.assert_close(of_full[:, kept], of_part, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", REGIMES)
def test_fully_masked_rows_have_zero_gradients(alpha: float) -> None:
    z, a = scores(3, 5, scale=0.1), alphas(alpha, alpha, alpha)
    mask = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
    p = tamis.entmax(z, a, mask=mask)
    first = torch.autograd.grad(p[..., 0].sum() + p[..., 2].square().sum(), (z, a), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (z, a))
    for gradient in (*first, *second):
        assert gradient.isfinite().all()
        assert (gradient[1] == 0.0).all()
        assert (gradient[0] != 0.0).any()
    assert (first[0][~mask] == 0.0).all()


@pytest.mark.parametrize("alpha", REGIMES)
def test_infinite_scores_pass_no_gradient(alpha: float) -> None:
    z = torch.tensor([[INF, 0.0, INF], [0.3, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    a = alphas(alpha, alpha)
    gradients = torch.autograd.grad(tamis.entmax(z, a)[:, 0].sum(), (z, a), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in gradients), (z, a), allow_unused=True)
    for gradient in (*gradients, *(g for g in second if g is not None)):
        assert (gradient[0] == 0.0).all()
        assert gradient.isfinite().all()
    assert (gradients[0][1] != 0.0).any()


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_nan_stays_in_its_row(alpha: float, create_graph: bool) -> None:
    z = torch.randn(3, 5)
    z[1, 2] = math.nan
    z.requires_grad_()
    a = alphas(alpha, alpha, alpha, dtype=torch.float32)
    upstream = torch.randn(3, 5)
    dz, da = torch.autograd.grad(tamis.entmax(z, a), (z, a), upstream, create_graph=create_graph)
    clean, b = z.detach()[[0, 2]].requires_grad_(), a.detach()[[0, 2]].requires_grad_()
    expected = torch.autograd.grad(tamis.entmax(clean, b), (clean, b), upstream[[0, 2]])
    torch.testing.assert_close((dz[[0, 2]], da[[0, 2]]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("poison", [INF, -INF, math.nan])
@pytest.mark.parametrize("create_graph", [False, True])
def test_upstream_poison_at_zero_weights_goes_nowhere(alpha: float, poison: float, create_graph: bool) -> None:
    z = torch.tensor([[0.2, 0.0, -9.0, 0.1], [1.0, 0.9, -INF, 0.8]], requires_grad=True)
    a = alphas(alpha, alpha, dtype=torch.float32)
    upstream = torch.randn(2, 4)
    p = tamis.entmax(z, a)
    assert (p[:, 2] == 0.0).all()
    expected = torch.autograd.grad(p, (z, a), upstream, retain_graph=True)
    poisoned = upstream.index_fill(-1, torch.tensor([2]), poison)
    torch.testing.assert_close(torch.autograd.grad(p, (z, a), poisoned, create_graph=create_graph), expected)


@pytest.mark.parametrize("alpha", REGIMES)
def test_score_gradients_sum_to_zero(alpha: float) -> None:
    z = torch.randn(20, 300, requires_grad=True)
    upstream = torch.randn(20, 300) + 100.0
    (gradient,) = torch.autograd.grad(tamis.entmax(z, alpha), z, upstream)
    assert (gradient.double().sum(-1).abs() <= 1e-5 * upstream.abs().amax()).all()


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.001, 1.05, 1.3, 1.5, 2.0, 2.5, 5.0])
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_underflowing_weights_leave_second_derivatives_finite(alpha: float, scale: float) -> None:
    z = scores(20, 64, dtype=torch.float32, scale=scale)
    a = torch.tensor(alpha, requires_grad=True)
    upstream = torch.randn(20, 64)
    first = torch.autograd.grad((upstream * tamis.entmax(z, a)).sum(), (z, a), create_graph=True)
    second = torch.autograd.grad((upstream * first[0]).sum() + first[1], (z, a))
    for gradient in (*first, *second):
        assert gradient.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------
# The fast backward and the differentiable one


@pytest.mark.parametrize("alpha", [*REGIMES, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 300])
def test_fast_backward_is_the_differentiable_one(alpha: float, dtype: torch.dtype, n: int) -> None:
    z = scores(20, n, dtype=dtype)
    a = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    upstream = torch.randn(20, n, dtype=dtype)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-10, 1e-12)
    for inputs, value in (((z,), alpha), ((z, a), a)):
        p = tamis.entmax(z, value)
        fast = torch.autograd.grad(p, inputs, upstream, retain_graph=True)
        slow = torch.autograd.grad(p, inputs, upstream, create_graph=True)
        torch.testing.assert_close(fast, slow, rtol=rtol, atol=atol)


def test_fast_backward_over_many_blocks_and_regimes() -> None:
    z = scores(700, 400, dtype=torch.float32)
    a = torch.tensor(REGIMES).repeat(100).unsqueeze(-1).requires_grad_()
    upstream = torch.randn(700, 400)
    dz, da = torch.autograd.grad(tamis.entmax(z, a), (z, a), upstream)
    for i in (0, 3, 4, 5, 6, 350, 699):
        row, b = z.detach()[i].double().requires_grad_(), a.detach()[i].double().requires_grad_()
        expected = torch.autograd.grad(tamis.entmax(row, b), (row, b), upstream[i].double())
        torch.testing.assert_close(dz[i].double(), expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(da[i].double(), expected[1], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------
# Large alpha


def exact_vjp(z: Tensor, alpha: float, upstream: Tensor) -> Tensor:
    """The score gradient of one row whose last entries may be -inf."""
    row = [value for value in z.tolist() if value > -INF]
    columns = jacobian(row, alpha, digits=400 if alpha > 5.0 else 60)
    products = [float(sum(x * g for x, g in zip(column, upstream.tolist(), strict=False))) for column in columns]
    return torch.tensor(products + [0.0] * (z.numel() - len(row)), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.01, 1.5, 2.0, 3.0, 10.0, 64.0])
@pytest.mark.parametrize(
    "row", [[0.0, -0.01, -0.3, -2.0], [0.25, 0.25, 0.25, 0.0], [0.5, 0.5 - 2.0**-20, 0.0, -INF], [1.0, 0.9, 0.8, 0.7]]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_score_gradients_are_exact(alpha: float, row: list[float], dtype: torch.dtype, tolerance: float) -> None:
    upstream = torch.tensor([0.7, -1.3, 0.4, 2.0], dtype=dtype)
    z = torch.tensor(row, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(tamis.entmax(z, alpha), z, upstream)
    exact = exact_vjp(z, alpha, upstream)
    largest = exact.abs().max()
    assert gradient.isfinite().all()
    assert largest < torch.finfo(dtype).max
    # s = p^(2 - alpha) multiplies the relative error of p by alpha
    assert (gradient.double() - exact).abs().max() <= tolerance * max(alpha, 2.0) * largest


@pytest.mark.parametrize("alpha", [4.0, 10.0, 64.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 200])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0])
def test_gradients_of_large_alpha_are_finite(alpha: float, dtype: torch.dtype, n: int, scale: float) -> None:
    z = scores(4, n, dtype=dtype, scale=scale)
    a = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    p = tamis.entmax(z, a)
    upstream = torch.randn(4, n, dtype=dtype)
    for gradient in torch.autograd.grad(p, (z, a), upstream, retain_graph=True):
        assert gradient.isfinite().all()
    for gradient in torch.autograd.grad(p, (z, a), upstream, create_graph=True):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("alpha", [4.0, 10.0, 64.0])
def test_equal_scores_at_large_alpha(alpha: float) -> None:
    """k equal scores: s = k^(alpha - 2), the largest gradient there is."""
    upstream = torch.tensor([1.0, 0.0, 0.0, -1.0])
    z = torch.full((4,), 0.3, requires_grad=True)
    (gradient,) = torch.autograd.grad(tamis.entmax(z, alpha), z, upstream)
    largest = 4.0 ** (alpha - 2.0)
    torch.testing.assert_close(gradient, upstream * largest, rtol=1e-5 * alpha, atol=1e-6 * largest)


# ---------------------------------------------------------------------------------------------------------------
# torch.func


@pytest.mark.parametrize("alpha", REGIMES)
def test_vmap_is_a_batch(alpha: float) -> None:
    z = torch.randn(3, 4, 5, dtype=torch.float64)
    a = torch.full((3,), alpha, dtype=torch.float64)
    torch.testing.assert_close(vmap(lambda x: tamis.entmax(x, alpha))(z), tamis.entmax(z, alpha))
    torch.testing.assert_close(
        vmap(lambda x: tamis.entmax(x, alpha, 0), in_dims=2)(z), tamis.entmax(z, alpha, 0).movedim(2, 0)
    )
    torch.testing.assert_close(vmap(tamis.entmax)(z, a), tamis.entmax(z, alpha))
    torch.testing.assert_close(
        vmap(tamis.entmax, in_dims=(None, 0))(z[0], a), tamis.entmax(z[0], alpha).expand(3, 4, 5)
    )
    torch.testing.assert_close(vmap(vmap(tamis.entmax, in_dims=(0, None)))(z, a), tamis.entmax(z, alpha))


def test_vmap_over_different_alphas() -> None:
    z = torch.randn(7, 5, dtype=torch.float64)
    a = torch.tensor(REGIMES, dtype=torch.float64)
    torch.testing.assert_close(vmap(tamis.entmax)(z, a), tamis.entmax(z, a.unsqueeze(-1)))
    each = torch.stack([tamis.entmax(z[0], alpha) for alpha in REGIMES])
    torch.testing.assert_close(vmap(tamis.entmax, in_dims=(None, 0))(z[0], a), each)


@pytest.mark.parametrize("alpha", REGIMES)
def test_jacobians_of_both_modes_are_exact(alpha: float) -> None:
    z = torch.tensor([0.4, 0.35, 0.1, -0.2, -6.0], dtype=torch.float64)
    a = torch.tensor(alpha, dtype=torch.float64)
    exact = torch.tensor([[float(x) for x in column] for column in jacobian(z.tolist(), alpha)], dtype=torch.float64)
    slope = alpha_derivative(z.tolist(), alpha)
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(transform(lambda x: tamis.entmax(x, alpha))(z), exact, rtol=1e-9, atol=1e-11)
        in_scores, in_alpha = transform(tamis.entmax, argnums=(0, 1))(z, a)
        torch.testing.assert_close(in_scores, exact, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(in_alpha, slope, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", REGIMES)
def test_jvp_is_the_jacobian_times_the_tangent(alpha: float) -> None:
    z, tangent = torch.randn(2, 3, 5, dtype=torch.float64)
    a = torch.full((3, 1), alpha, dtype=torch.float64)
    a_tangent = torch.randn(3, 1, dtype=torch.float64)
    p, moved = jvp(tamis.entmax, (z, a), (tangent, a_tangent))
    in_scores, in_alpha = jacrev(tamis.entmax, argnums=(0, 1))(z, a)
    torch.testing.assert_close(p, tamis.entmax(z, alpha))
    expected = torch.einsum("ijkl,kl->ij", in_scores, tangent) + torch.einsum("ijkl,kl->ij", in_alpha, a_tangent)
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize("alpha", REGIMES)
def test_hessian_is_symmetric_and_that_of_autograd(alpha: float) -> None:
    z = torch.tensor([0.4, 0.35, 0.1, -6.0], dtype=torch.float64)
    a = torch.tensor(alpha, dtype=torch.float64)
    weights = torch.randn(4, dtype=torch.float64)

    def loss(x: Tensor, a: Tensor) -> Tensor:
        return tamis.entmax(x, a) @ weights

    (zz, za), (az, aa) = hessian(loss, argnums=(0, 1))(z, a)
    torch.testing.assert_close(zz, zz.T, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(za, az, rtol=1e-9, atol=1e-11)
    reference = torch.autograd.functional.hessian(loss, (z, a))
    torch.testing.assert_close(((zz, za), (az, aa)), reference, rtol=1e-9, atol=1e-11)
    for nested in (jacrev(jacrev(loss)), jacrev(jacfwd(loss))):
        torch.testing.assert_close(nested(z, a), zz, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", REGIMES)
def test_vmap_of_grad_is_per_sample_gradients(alpha: float) -> None:
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    a = torch.full((6,), alpha, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64)

    def loss(x: Tensor, a: Tensor) -> Tensor:
        return tamis.entmax(x, a).square() @ weights

    expected = torch.autograd.grad((tamis.entmax(z, a.unsqueeze(-1)).square() @ weights).sum(), (z, a))
    per_sample = vmap(grad(loss, argnums=(0, 1)))(z.detach(), a.detach())
    torch.testing.assert_close(per_sample, expected)
    shared = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None))(z.detach(), a.detach()[0])
    torch.testing.assert_close(shared, expected)
    number = vmap(grad(lambda x: tamis.entmax(x, alpha).square() @ weights))(z.detach())
    torch.testing.assert_close(number, expected[0])


def test_forward_mode_with_masked_rows() -> None:
    z = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    _, tangent = jvp(lambda x: tamis.entmax(x, 1.5, mask=mask), (z,), (torch.randn(3, 4, dtype=torch.float64),))
    assert tangent.isfinite().all()
    assert (tangent[~mask] == 0.0).all()
    assert (tangent[0] != 0.0).any()


# ---------------------------------------------------------------------------------------------------------------
# torch.compile and torch.library


def check_compiled(backend: str, as_tensor: bool, alpha: float) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tamis.entmax, fullgraph=True, dynamic=True, backend=backend)
    for calls, (rows, n) in enumerate([(6, 17), (9, 130), (4, 33)]):
        z = torch.randn(rows, n, requires_grad=True)
        a: Any = torch.full((rows, 1), alpha, requires_grad=True) if as_tensor else alpha
        inputs = (z, a) if as_tensor else (z,)
        upstream = torch.randn(rows, n)
        with torch._dynamo.config.patch(error_on_recompile=calls > 0):
            p = compiled(z, a)
        expected = tamis.entmax(z, a)
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad(p, inputs, upstream)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, upstream), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_compile(as_tensor: bool, alpha: float) -> None:
    check_compiled("aot_eager", as_tensor, alpha)


@pytest.mark.slow
@pytest.mark.parametrize("as_tensor", [False, True])
def test_compile_with_inductor(as_tensor: bool) -> None:
    check_compiled("inductor", as_tensor, 1.5)


def test_compile_inside_a_model() -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(6, 8)
    raw = torch.zeros(2, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        heads = layer(x).view(3, 2, 4, -1).transpose(-1, -2) @ layer(x).view(3, 2, 4, -1)
        mask = torch.ones(heads.shape[-2:], dtype=torch.bool).tril()
        return tamis.entmax(heads, 1.0 + raw.sigmoid(), mask=mask).square().sum()

    x = torch.randn(3, 10, 6)
    parameters = (raw, *layer.parameters())
    expected = torch.autograd.grad(forward(x), parameters)
    actual = torch.autograd.grad(torch.compile(forward, fullgraph=True, backend="aot_eager")(x), parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("alpha", "dtype"), [(1.0, torch.float32), (1.5, torch.bfloat16), (3.0, torch.float64)])
def test_opcheck(alpha: float, dtype: torch.dtype, native: bool) -> None:
    work = torch.promote_types(dtype, torch.float32)
    z = torch.randn(2, 3, 5).to(dtype)
    excess = torch.full((1, 3, 1), alpha - 1.0, dtype=work)
    for e, value in ((None, alpha - 1.0), (excess, None)):
        torch.library.opcheck(torch.ops.tamis.entmax_forward, (z, e, value, native))
        p, floor = torch.ops.tamis.entmax_forward(z, e, value, native)
        assert p.dtype == floor.dtype == work
        assert floor.shape == (2, 3, 1)
        for alpha_gradient in (False, True):
            arguments = (p, e, value, floor, torch.randn_like(p), alpha_gradient, native)
            torch.library.opcheck(torch.ops.tamis.entmax_backward, arguments)


def test_saved_tensors_survive_and_inputs_are_untouched() -> None:
    z = scores(3, 5)
    before = z.detach().clone()
    p = tamis.entmax(z, 1.5)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    kept = p.detach().clone(), upstream.clone()
    first = torch.autograd.grad(p, z, upstream, retain_graph=True)
    second = torch.autograd.grad(p, z, upstream)
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    assert torch.equal(z, before)
    assert torch.equal(p, kept[0])
    assert torch.equal(upstream, kept[1])


def test_gradients_that_overflow_saturate():
    """Ties of 127 scores at alpha 20 have derivatives of 127^18, more than fp32 has room for."""
    z = torch.zeros(127, requires_grad=True)
    torch.manual_seed(0)
    (tamis.entmax(z, 20.0) * torch.randn(127) * 1e6).sum().backward()
    assert z.grad.isfinite().all()
    assert z.grad.abs().max() > 1e35
