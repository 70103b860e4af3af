"""The `entmax` package 1.3: one test for each defect that ours must not have, and agreement where it is right."""

from __future__ import annotations

import importlib.metadata
import math

import entmax as package
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tamis
from oracles import entmax15_by_sorting, entmax_by_bisection, entmax_exact

INF = math.inf

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("entmax") != "1.3", reason="the defects are those of entmax 1.3"
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mass_error(p: Tensor) -> float:
    return (p.double().sum(-1) - 1.0).abs().max().item()


# ---------------------------------------------------------------------------------------------------------------
# Transforms


def test_all_minus_infinity_row_raises_or_is_nan() -> None:
    z = torch.randn(3, 4)
    z[1] = -INF
    for theirs in (package.sparsemax, package.entmax15):
        with pytest.raises(RuntimeError, match="out of bounds"):
            theirs(z)
    assert package.entmax_bisect(z, 1.5)[1].isnan().all()
    for alpha in (1.0, 1.2, 1.5, 2.0, 3.0):
        p = tamis.entmax(z, alpha)
        assert (p[1] == 0.0).all()
        assert mass_error(p[[0, 2]]) <= 1e-5


def test_alpha_one_is_uniform() -> None:
    z = torch.randn(3, 4)
    torch.testing.assert_close(package.entmax_bisect(z, 1.0), torch.full((3, 4), 0.25))
    torch.testing.assert_close(tamis.entmax(z, 1.0), torch.softmax(z, -1))
    torch.testing.assert_close(tamis.entmax(z, torch.tensor(1.0)), torch.softmax(z, -1))


def test_alpha_just_above_one_is_off() -> None:
    z = torch.randn(3, 9)
    exact = entmax_exact(z, 1.0001)
    assert (package.entmax_bisect(z, 1.0001) - exact).abs().sum(-1).max() > 1e-5
    assert (tamis.entmax(z, 1.0001) - exact).abs().sum(-1).max() <= 5e-6


def test_bfloat16_bisection_is_nan() -> None:
    z = torch.tensor([[1000.0, 0.0], [300.0, 299.0]]).bfloat16()
    assert package.entmax_bisect(z, 1.5)[0].isnan().all()
    p = tamis.entmax(z, 1.5)
    assert p.dtype == torch.bfloat16
    torch.testing.assert_close(p.double(), entmax15_by_sorting(z.float()), rtol=2.0**-8, atol=1e-6)


def test_bfloat16_entmax15_does_not_sum_to_one() -> None:
    z = torch.randn(8, 4096).bfloat16()
    assert mass_error(package.entmax15(z)) > 0.01
    assert mass_error(tamis.entmax15(z.float())) <= 1e-5
    assert mass_error(tamis.entmax15(z)) < 2.0**-8  # what rounding the weights costs
    torch.testing.assert_close(tamis.entmax15(z).double(), entmax15_by_sorting(z.float()), rtol=2.0**-8, atol=1e-6)


def test_one_alpha_per_head_raises() -> None:
    z, alpha = torch.randn(2, 3, 4, 5), torch.tensor([1.2, 1.5, 2.0])
    with pytest.raises(RuntimeError, match="must match the existing size"):
        package.entmax_bisect(z, alpha)
    p = tamis.entmax(z, alpha)
    for head in range(3):
        expected = package.entmax_bisect(z[:, head].double(), alpha[head].double())
        torch.testing.assert_close(p[:, head].double(), expected, rtol=0.0, atol=1e-6)


def test_module_with_a_parameter_as_alpha_raises() -> None:
    with pytest.raises(AttributeError, match="cannot assign parameters before"):
        package.EntmaxBisect(alpha=nn.Parameter(torch.tensor(1.5)))
    layer = tamis.nn.Entmax(alpha=nn.Parameter(torch.tensor(1.5)))
    assert [name for name, _ in layer.named_parameters()] == ["alpha"]
    layer(torch.randn(3, 4))[:, 0].sum().backward()
    assert layer.alpha.grad is not None
    assert layer.alpha.grad.item() != 0.0


def test_negative_inner_dim_with_top_k_raises() -> None:
    z = 0.1 * torch.randn(2, 30, 3)
    for theirs in (package.entmax15, package.sparsemax):
        with pytest.raises(RuntimeError, match="number of dimensions"):
            theirs(z, dim=-2, k=2)
    for alpha in (1.5, 2.0):
        torch.testing.assert_close(tamis.entmax(z, alpha, -2), tamis.entmax(z, alpha, 1))
        assert mass_error(tamis.entmax(z, alpha, -2).transpose(1, 2)) <= 1e-5


@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_double_backward_is_nan_on_sparse_rows(alpha: float) -> None:
    z = torch.tensor([[2.0, 1.0, -3.0, 0.0]], dtype=torch.float64, requires_grad=True)

    def second(p: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(p.square().sum(), z, create_graph=True)
        return torch.autograd.grad(first.square().sum(), z)[0]

    assert second(package.entmax_bisect(z, alpha)).isnan().any()
    p = tamis.entmax(z, alpha)
    assert (p == 0.0).any()
    ours = second(p)
    assert ours.isfinite().all()
    assert torch.autograd.gradgradcheck(lambda x: tamis.entmax(x, alpha), z)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_vmap_and_jacrev_fail(name: str) -> None:
    theirs, ours = getattr(package, name), getattr(tamis, name)
    z = torch.randn(3, 4, dtype=torch.float64)
    for transform in (torch.func.vmap(theirs), torch.func.jacrev(theirs)):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(z)
    torch.testing.assert_close(torch.func.vmap(ours)(z), theirs(z))
    expected = torch.autograd.functional.jacobian(theirs, z)
    torch.testing.assert_close(torch.func.jacrev(ours)(z), expected)
    torch.testing.assert_close(torch.func.jacfwd(ours)(z), expected)


@pytest.mark.parametrize(("alpha", "error"), [(10.0, 0.1), (64.0, 0.3)])
def test_large_alpha_is_far_off(alpha: float, error: float) -> None:
    z = torch.tensor([[1.0, 0.99, 0.9], [0.3, 0.29, 0.28], [1.0, 1.0 - 2.0**-12, 0.5], [0.7, 0.65, 0.6]])
    exact = entmax_exact(z, alpha)
    assert (package.entmax_bisect(z, alpha, ensure_sum_one=False) - exact).abs().sum(-1).max() > error
    assert (tamis.entmax(z, alpha) - exact).abs().sum(-1).max() <= 5e-6


def test_alpha_drifting_below_one_is_out_of_range() -> None:
    z = torch.randn(4, 6)
    assert (tamis.entmax(z, 0.7) - entmax_exact(z, 0.7)).abs().sum(-1).max() <= 5e-6


# ---------------------------------------------------------------------------------------------------------------
# Losses


def test_loss_gives_alpha_no_gradient() -> None:
    z, y = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2])
    alpha = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    package.entmax_bisect_loss(z, y, alpha).sum().backward()
    assert alpha.grad is None
    tamis.entmax_loss(z, y, alpha, reduction="sum").backward()
    step = 1e-6
    after, before = (tamis.entmax_loss(z, y, alpha.item() + s, reduction="sum") for s in (step, -step))
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx((after - before).item() / (2 * step), rel=1e-6)


def test_per_row_alpha_gives_a_square_of_losses() -> None:
    z, y = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 1, 2])
    values = [1.2, 1.5, 2.0]
    assert package.entmax_bisect_loss(z, y, torch.tensor(values).double().unsqueeze(-1)).shape == (3, 3)
    expected = torch.cat([package.entmax_bisect_loss(z[i : i + 1], y[i : i + 1], a) for i, a in enumerate(values)])
    for alpha in (torch.tensor(values).double(), torch.tensor(values).double().unsqueeze(-1)):
        losses = tamis.entmax_loss(z, y, alpha, reduction="none")
        assert losses.shape == (3,)
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_minus_infinity_logits_give_nan_losses(alpha: float) -> None:
    z, y = torch.randn(3, 5), torch.tensor([0, 1, 2])
    z[:, 4] = -INF
    assert package.entmax15_loss(z, y).isnan().all()
    z.requires_grad_()
    losses = tamis.entmax_loss(z, y, alpha, reduction="none")
    torch.testing.assert_close(losses, tamis.entmax_loss(z[:, :4], y, alpha, reduction="none"))
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert gradient.isfinite().all()
    assert (gradient[:, 4] == 0.0).all()


def test_reduction_mean_is_rejected() -> None:
    with pytest.raises(AssertionError):
        package.Entmax15Loss(reduction="mean")
    z, y = torch.randn(4, 5), torch.tensor([0, -100, 2, 3])
    mean = tamis.entmax_loss(z, y, 1.5, reduction="mean")
    each = tamis.entmax_loss(z, y, 1.5, reduction="none")
    torch.testing.assert_close(mean, each[[0, 2, 3]].mean())
    assert each[1].item() == 0.0
    torch.testing.assert_close(tamis.nn.EntmaxLoss(1.5, reduction="mean")(z, y), mean)


def test_shifting_scores_changes_the_loss() -> None:
    z, y = torch.randint(-256, 256, (64, 200)) / 64.0, torch.randint(0, 200, (64,))
    far = z + 8192.0  # exact in fp32
    assert (package.entmax15_loss(far, y) - package.entmax15_loss(z, y)).abs().max() > 1e-3
    for alpha in (1.0, 1.3, 1.5, 2.0):
        near_losses, far_losses = (tamis.entmax_loss(x, y, alpha, reduction="none") for x in (z, far))
        torch.testing.assert_close(far_losses, near_losses, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# Agreement where the package is right


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("shape", [(7,), (6, 1), (4, 5), (2, 3, 40), (8, 300)])
def test_transforms_agree(shape: tuple[int, ...], scale: float) -> None:
    z = (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(shape, dtype=torch.float64)
    for theirs, ours in (
        (package.sparsemax(z), tamis.sparsemax(z)),
        (package.sparsemax_bisect(z), tamis.sparsemax(z)),
        (package.entmax15(z), tamis.entmax15(z)),
        (package.entmax_bisect(z, 1.3), tamis.entmax(z, 1.3)),
        (package.entmax_bisect(z, 1.75), tamis.entmax(z, 1.75)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
        gradients = (torch.autograd.grad(p, z, upstream, retain_graph=True)[0] for p in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_third_opinion_on_bisection() -> None:
    z = torch.randn(5, 20, dtype=torch.float64)
    torch.testing.assert_close(package.entmax_bisect(z, 1.3), entmax_by_bisection(z, 1.3), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.5, 1.9])
def test_alpha_gradients_agree(alpha: float) -> None:
    z = torch.randn(4, 6, dtype=torch.float64)
    upstream = torch.randn(4, 6, dtype=torch.float64)
    a = torch.full((4, 1), alpha, dtype=torch.float64, requires_grad=True)
    (theirs,) = torch.autograd.grad(package.entmax_bisect(z, a), a, upstream)
    (ours,) = torch.autograd.grad(tamis.entmax(z, a), a, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dim", [0, 1])
def test_other_dims_agree(dim: int) -> None:
    z = torch.randn(4, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(tamis.entmax15(z, dim), package.entmax15(z, dim))
    torch.testing.assert_close(tamis.sparsemax(z, dim), package.sparsemax(z, dim))
    torch.testing.assert_close(tamis.entmax(z, 1.3, dim), package.entmax_bisect(z, 1.3, dim), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 4.0])
def test_normmax_agrees(alpha: float) -> None:
    z = (0.5 * torch.randn(6, 8, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(6, 8, dtype=torch.float64)
    theirs, ours = package.normmax_bisect(z, alpha), tamis.normmax(z, alpha)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    gradients = (torch.autograd.grad(p, z, upstream)[0] for p in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [0.5, 1.0, 2.0, 3.7])
def test_budgetmax_agrees(budget: float) -> None:
    z = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(6, 8, dtype=torch.float64)
    theirs, ours = package.budget_bisect(z, budget), tamis.budgetmax(z, budget)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    inside = ((ours > 1e-6) & (ours < 1.0 - 1e-6)).any(-1)  # the package divides by zero without an inner weight
    gradients = (torch.autograd.grad(p, z, upstream)[0][inside] for p in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)


def test_losses_agree() -> None:
    z = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 12, (9,))
    for theirs, ours in (
        (package.sparsemax_loss(z, y), tamis.sparsemax_loss(z, y, reduction="none")),
        (package.sparsemax_bisect_loss(z, y), tamis.sparsemax_loss(z, y, reduction="none")),
        (package.entmax15_loss(z, y), tamis.entmax_loss(z, y, 1.5, reduction="none")),
        (package.entmax_bisect_loss(z, y, 1.3), tamis.entmax_loss(z, y, 1.3, reduction="none")),
        (package.normmax_bisect_loss(z, y, 2.0), tamis.normmax_loss(z, y, 2.0, reduction="none")),
        (F.cross_entropy(z, y, reduction="none"), tamis.entmax_loss(z, y, 1.0, reduction="none")),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
        gradients = (torch.autograd.grad(losses.sum(), z)[0] for losses in (ours, theirs))
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)


def test_loss_modules_agree() -> None:
    z, y = torch.randn(9, 12, dtype=torch.float64), torch.randint(0, 12, (9,))
    y[3] = 5
    for theirs, ours in (
        (package.SparsemaxLoss(ignore_index=5), tamis.nn.SparsemaxLoss(ignore_index=5)),
        (package.Entmax15Loss(ignore_index=5), tamis.nn.EntmaxLoss(1.5, ignore_index=5)),
        (package.Entmax15Loss(reduction="sum"), tamis.nn.EntmaxLoss(1.5, reduction="sum")),
    ):
        torch.testing.assert_close(ours(z, y), theirs(z, y))
