"""normmax and budgetmax against oracles that share nothing with the library: bisection and sorted breakpoints."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tamis import budgetmax, normmax

ALPHAS = (1.1, 1.5, 2.0, 5.0, 20.0)
INF = math.inf
RELATIVES = [
    pytest.param(partial(normmax, alpha=1.5), id="normmax1.5"),
    pytest.param(partial(normmax, alpha=5.0), id="normmax5"),
    pytest.param(partial(budgetmax, budget=1.5), id="budgetmax1.5"),
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(x: Tensor | float | list) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).clone().requires_grad_()


# ---------------------------------------------------------------------------------------------------------------
# Oracles, float64


def normmax_oracle(z: Tensor, alpha: float) -> Tensor:
    """Bisection on sum (z - tau)_+^(a / (a - 1)) = 1, with tau measured from the lowest score that is kept.

    Scores are kept while those above them, measured from them, do not fill the sum.  Bisecting ln(edge - tau) rather
    than tau resolves the smallest weight, which is (edge - tau)^(1 / (a - 1)), for large alpha too.
    """
    z = z.double()
    q, b = alpha / (alpha - 1.0), 1.0 / (alpha - 1.0)
    ordered = z.sort(-1, descending=True).values
    filled = (ordered.unsqueeze(-2) - ordered.unsqueeze(-1)).clamp(min=0.0).pow(q).sum(-1)
    edge = ordered.gather(-1, (filled < 1.0).sum(-1, keepdim=True) - 1)
    above = torch.where(z >= edge, z - edge, -INF)
    low, high = torch.full_like(edge, -2000.0), torch.zeros_like(edge)
    for _ in range(70):
        middle = (low + high) / 2
        below = (above + middle.exp()).clamp(min=0.0).pow(q).sum(-1, keepdim=True) < 1.0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    weights = (above + low.exp()).clamp(min=0.0).pow(b)
    return weights / weights.sum(-1, keepdim=True)


def budgetmax_oracle(z: Tensor, budget: float) -> Tensor:
    """One row: the mass is linear in tau between the sorted breakpoints z and z - 1."""
    z = z.double()
    if budget >= z.numel():
        return torch.ones_like(z)
    points = torch.cat([z, z - 1.0]).sort().values

    def mass(index: int) -> float:
        return (z - points[index]).clamp(0.0, 1.0).sum().item()

    low, high = 0, points.numel() - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if mass(middle) >= budget else (low, middle)
    # Weights at the breakpoint, less the excess taken from those that move: no threshold is formed, so none rounds.
    p = (z - points[low]).clamp(0.0, 1.0)
    moving = (z >= points[high]) & (z - 1.0 <= points[low])
    return torch.where(moving, p - (p.sum() - budget) / moving.sum().clamp(min=1), p).clamp(0.0, 1.0)


def normmax_objective(p: Tensor, z: Tensor, alpha: float) -> Tensor:
    return (p * z).sum(-1) - p.pow(alpha).sum(-1).pow(1.0 / alpha)


def budgetmax_objective(p: Tensor, z: Tensor) -> Tensor:
    return (p * z).sum(-1) - p.square().sum(-1) / 2


def onto_simplex(x: Tensor) -> Tensor:
    """Euclidean projection of the last dim, by sorting."""
    sorted_x = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    thresholds = (sorted_x.cumsum(-1) - 1.0) / ranks
    count = (sorted_x > thresholds).sum(-1, keepdim=True)
    return (x - thresholds.gather(-1, count - 1)).clamp(min=0.0)


def test_oracles_agree_with_known_answers():
    # alpha = 2 on two scores a gap g apart: u^2 + (u + g)^2 = 1 for the smaller u.
    gap = 0.4
    u = (-gap + math.sqrt(2.0 - gap * gap)) / 2
    expected = [(u + gap) / (2 * u + gap), u / (2 * u + gap)]
    assert normmax_oracle(torch.tensor([0.4, 0.0], dtype=torch.float64), 2.0).tolist() == pytest.approx(
        expected, rel=1e-12
    )
    assert normmax_oracle(torch.tensor([2.0, 0.0]), 20.0).tolist() == [1.0, 0.0]
    assert budgetmax_oracle(torch.tensor([3.0, 0.5, 0.25, -4.0]), 1.5).tolist() == [1.0, 0.375, 0.125, 0.0]
    assert budgetmax_oracle(torch.tensor([0.0, 0.0, 0.0]), 2.0).tolist() == pytest.approx([2 / 3] * 3)


# ---------------------------------------------------------------------------------------------------------------
# normmax: values


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_matches_bisection(alpha: float, scale: float, dtype: torch.dtype, tolerance: float):
    z = (randn(16, 24) * scale).to(dtype)
    p = normmax(z, alpha)
    expected = normmax_oracle(z, alpha)
    assert (p.double() - expected).abs().sum(-1).max() < tolerance
    assert torch.equal(p > 0.0, expected > torch.finfo(dtype).tiny)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_wide_rows(alpha: float):
    z = randn(2, 2000, dtype=torch.float32) * 0.3
    p = normmax(z, alpha)
    assert (p.double() - normmax_oracle(z, alpha)).abs().sum(-1).max() < 1e-5
    assert (p.double().sum(-1) - 1.0).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normmax_is_one_hot_once_one_score_leads_by_one(dtype: torch.dtype):
    z = torch.tensor([0.5, 3.0, 1.5, -5.0], dtype=dtype)
    expected = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=dtype)
    wrong = [k / 10 for k in range(11, 300) if not torch.equal(normmax(z, k / 10), expected)]
    assert wrong == []


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("gap", [4, 10, 16, 22])
def test_normmax_resolves_scores_at_the_edge_of_the_support(alpha: float, gap: int):
    z = torch.tensor([1.0] + [2.0**-gap] * 50)  # a score leads by a hair less than what makes it alone
    assert (normmax(z, alpha).double() - normmax_oracle(z, alpha)).abs().sum() < 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_ties_and_single(alpha: float):
    assert torch.equal(normmax(torch.zeros(4), alpha), torch.full((4,), 0.25))
    assert torch.equal(normmax(torch.tensor([3.0]), alpha), torch.ones(1))
    p = normmax(torch.tensor([0.5, 0.5, 0.5, -2.0]), alpha)
    torch.testing.assert_close(p, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_is_optimal(alpha: float):
    generator = torch.Generator().manual_seed(1)
    z = randn(8, 10, seed=2) * 0.6
    p = normmax(z, alpha)
    best = normmax_objective(p, z, alpha)
    assert (p >= 0.0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(8, dtype=torch.float64), rtol=0.0, atol=1e-12)
    candidates = [
        torch.eye(10, dtype=torch.float64).unsqueeze(1).expand(10, 8, 10),
        torch.full((1, 8, 10), 0.1).double(),
    ]
    for sharpness in (0.1, 1.0, 10.0):
        raw = torch.randn(200, 8, 10, generator=generator, dtype=torch.float64)
        candidates.append(torch.softmax(raw * sharpness, -1))
    for radius in (1e-5, 1e-3, 1e-1):
        noise = torch.randn(200, 8, 10, generator=generator, dtype=torch.float64)
        candidates.append(onto_simplex(p + radius * noise))
    others = normmax_objective(torch.cat(candidates), z, alpha)
    assert (others <= best + 1e-14).all()
    assert (others.max(0).values > best - 1e-3).all()  # the perturbations come close enough to be a test


# ---------------------------------------------------------------------------------------------------------------
# normmax: derivatives


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_gradients_match_the_closed_formulas(alpha: float):
    z, a, g = leaf(randn(6, 9) * 0.5), leaf(alpha), randn(6, 9, seed=1)
    p = normmax(z, a)
    dz, da = torch.autograd.grad((p * g).sum(), (z, a))
    p = normmax_oracle(z.detach(), alpha)
    support = p > 0.0
    assert 1 < support.sum() < p.numel()
    log_p = torch.where(support, p, 1.0).log()
    norm = p.pow(alpha).sum(-1, keepdim=True).pow(1.0 / alpha)
    b = 1.0 / (alpha - 1.0)
    v = torch.where(support, ((2.0 - alpha) * log_p).exp() * (g - (p * g).sum(-1, keepdim=True)), 0.0)
    expected = norm.pow(alpha - 1.0) * b * (v - p * v.sum(-1, keepdim=True))
    torch.testing.assert_close(dz, expected, rtol=1e-8, atol=1e-10)

    log_r = (alpha - 1.0) * (log_p - norm.log())
    power = lambda k: torch.where(support, (k * log_r).exp(), 0.0)  # noqa: E731
    slope = -b * b / (1.0 + b) * (power(1.0 + b) * log_r).sum(-1, keepdim=True) / power(b).sum(-1, keepdim=True)
    dy = -b * b * power(b) * log_r - b * power(b - 1.0) * slope
    dp = norm * (dy - p * dy.sum(-1, keepdim=True))
    torch.testing.assert_close(da, (dp * g).sum(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_gradcheck(alpha: float):
    z = leaf(randn(3, 4, seed=3) * 0.3)
    per_row = leaf([[alpha]] * 3)
    assert gradcheck(normmax, (z, per_row))
    assert gradgradcheck(normmax, (z, per_row))
    assert gradcheck(lambda x: normmax(x, alpha), (z,))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_gradcheck_of_sparse_and_masked_rows(alpha: float):
    z = leaf([[0.5, 0.2, -3.0, 0.1], [0.0, 0.4, -INF, 0.35]])
    mask = torch.tensor([[True, True, True, True], [False, True, True, True]])

    def finite(x: Tensor, a: Tensor) -> Tensor:
        return normmax(torch.where(z.detach() == -INF, -INF, x), a, mask=mask)

    inputs = (leaf(z.detach().clamp(min=-5.0)), leaf(alpha))
    assert gradcheck(finite, inputs)
    assert gradgradcheck(finite, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_gradient_sums_to_zero(alpha: float, dtype: torch.dtype):
    z = randn(8, 50, dtype=dtype).mul(0.2).requires_grad_()
    g = randn(8, 50, seed=1, dtype=dtype)
    (dz,) = torch.autograd.grad((normmax(z, alpha) * g).sum(), z)
    assert (dz.sum(-1).abs() <= 32 * torch.finfo(dtype).eps * dz.abs().sum(-1)).all()


# ---------------------------------------------------------------------------------------------------------------
# budgetmax: values


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(
    ("n", "dtype", "tolerance"),
    [(n, torch.float32, 1e-5) for n in (1, 2, 7, 100, 20000)] + [(n, torch.float64, 1e-11) for n in (1, 7, 1001)],
)
def test_budgetmax_matches_sorted_breakpoints(n: int, dtype: torch.dtype, tolerance: float, scale: float):
    candidates = (0.01, 0.5, 1.5, 7.0, n / 3, n - 0.5, float(n)) if n < 1000 else (0.5, n / 3, n - 0.5)
    budgets = [b for b in candidates if 0.0 < b <= n]
    z = (randn(len(budgets), n, seed=n) * scale).to(dtype)
    p = budgetmax(z, torch.tensor(budgets, dtype=torch.float64).unsqueeze(-1)).double()
    assert ((p >= 0.0) & (p <= 1.0)).all()
    for row, scores, budget in zip(p, z, budgets, strict=True):
        assert abs(row.sum().item() - budget) <= tolerance * budget
        assert (row - budgetmax_oracle(scores, budget)).abs().sum().item() <= tolerance * budget


def test_budgetmax_whose_steps_would_grow_as_weights_fill_up():
    assert budgetmax(torch.tensor([0.9, 0.9, 0.9, 0.0]), 3.9).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.9])
    z = randn(3000, 8)
    for budget in (0.5, 2.0, 5.0, 7.9):
        p = budgetmax(z, budget)
        torch.testing.assert_close(p.sum(-1), torch.full((3000,), budget, dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_a_budget_of_nothing_gives_zeros():
    z = leaf(randn(2, 4))
    assert (budgetmax(z, 0.0) == 0.0).all()
    assert torch.autograd.grad(budgetmax(z, 0.0).sum(), z)[0].eq(0.0).all()
    assert budgetmax(z, torch.tensor([[0.0], [2.0]])).sum(-1).tolist() == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("budget", [1.0, 2.5, 300.0, 4999.5])
def test_budgetmax_near_ties(budget: float):
    z = 5.0 + randn(5000, dtype=torch.float32) * 1e-4
    z[:3] += 1.0
    p = budgetmax(z, budget).double()
    assert abs(p.sum().item() - budget) <= 1e-5 * budget
    assert (p - budgetmax_oracle(z, budget)).abs().sum().item() <= 1e-5 * budget


@pytest.mark.parametrize("fill", [-1e4, -1e6, -1e9, -1e20, torch.finfo(torch.float32).min])
def test_budgetmax_keeps_its_mass_where_scores_are_hidden_by_a_large_number(fill: float):
    p = budgetmax(torch.tensor([0.5, fill, fill, fill]), 2.0)
    torch.testing.assert_close(p, torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]), rtol=1e-5, atol=0.0)


def test_budgetmax_of_the_largest_finite_scores():
    p = budgetmax(torch.tensor([3e38, -3e38, 0.0]), 1.5)
    torch.testing.assert_close(p, torch.tensor([1.0, 0.0, 0.5]))


@pytest.mark.parametrize("budget", [0.5, 1.0, 2.5, 7.0])
def test_budgetmax_is_optimal(budget: float):
    generator = torch.Generator().manual_seed(1)
    z = randn(8, 10, seed=2)
    p = budgetmax(z, budget)
    best = budgetmax_objective(p, z)
    # Moving mass from one entry to another keeps the sum; as far as the box allows, it stays feasible.
    i, j = torch.randint(10, (2, 500, 8, 1), generator=generator)
    room = torch.minimum(p.expand(500, 8, 10).gather(-1, i), 1.0 - p.expand(500, 8, 10).gather(-1, j))
    step = room * torch.rand(500, 8, 1, generator=generator, dtype=torch.float64) ** 4
    moved = p.expand(500, 8, 10).scatter_add(-1, i, -step).scatter_add(-1, j, step)
    spread = budget * torch.softmax(torch.randn(500, 8, 10, generator=generator, dtype=torch.float64), -1)
    others = torch.cat([moved, spread[(spread <= 1.0).all(-1).all(-1)]])
    assert (budgetmax_objective(others, z) <= best + 1e-13).all()
    torch.testing.assert_close(p.sum(-1), torch.full((8,), budget, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert ((p >= 0.0) & (p <= 1.0)).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_budgetmax_gives_one_to_each_when_there_are_too_few(as_tensor: bool):
    z = torch.tensor([[1.0, -INF, -4.0, -INF], [1.0, 0.9, 0.8, -INF], [-INF, -INF, -INF, -INF]])
    budget = torch.tensor(2.0) if as_tensor else 2.0
    p = budgetmax(z, budget)
    assert torch.equal(p[0], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(p[1], torch.tensor([0.7667, 0.6667, 0.5667, 0.0]), rtol=0.0, atol=1e-4)
    assert torch.equal(p[2], torch.zeros(4))


def test_budgetmax_tensor_budget_beyond_the_size_gives_ones_and_no_gradient():
    z, budget = leaf(randn(2, 3)), leaf([[7.0], [3.0]])
    p = budgetmax(z, budget)
    assert torch.equal(p, torch.ones_like(p))
    dz, db = torch.autograd.grad((p * randn(2, 3, seed=1)).sum(), (z, budget))
    assert torch.equal(dz, torch.zeros_like(dz))
    assert torch.equal(db, torch.zeros_like(db))


@pytest.mark.parametrize(
    ("scores", "budget", "expected"),
    [
        ([INF, 1.0, 2.0, -1.0], 1.5, [1.0, 0.0, 0.5, 0.0]),
        ([INF, 1.0, 2.0, -1.0], 0.5, [0.5, 0.0, 0.0, 0.0]),
        ([INF, INF, INF, 1.0], 1.5, [0.5, 0.5, 0.5, 0.0]),
        ([INF, INF, -INF, 1.0], 3.0, [1.0, 1.0, 0.0, 1.0]),
        ([INF, -INF, -INF, -INF], 2.0, [1.0, 0.0, 0.0, 0.0]),
        ([INF, 1.0, 1.0, 0.9], 3.0, [1.0, 0.7, 0.7, 0.6]),
    ],
)
def test_budgetmax_infinite_scores(scores: list[float], budget: float, expected: list[float]):
    z = torch.tensor([scores, [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    p = budgetmax(z, budget)
    torch.testing.assert_close(p[0], torch.tensor(expected), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(p[1], torch.full((4,), budget / 4))
    (dz,) = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum(), z)
    assert torch.isfinite(dz).all()
    assert torch.equal(dz[0][torch.tensor(scores) == INF], torch.zeros(scores.count(INF)))


# ---------------------------------------------------------------------------------------------------------------
# budgetmax: derivatives


@pytest.mark.parametrize("budget", [0.4, 1.0, 2.3, 4.2])
def test_budgetmax_gradcheck(budget: float):
    z, b = leaf(randn(4, 6, seed=5)), leaf([[budget + k / 8] for k in range(4)])
    p = budgetmax(z, b)
    assert torch.minimum(p, 1.0 - p)[(p > 0.0) & (p < 1.0)].min() > 1e-4  # finite differences stay on one side
    assert gradcheck(budgetmax, (z, b))
    assert gradgradcheck(budgetmax, (z, b))
    assert gradcheck(budgetmax, (z, leaf(budget + 0.01)))


def test_budgetmax_gradients_match_the_closed_formula():
    z, b, g = leaf(randn(5, 12)), leaf([[0.3], [1.2], [2.4], [5.3], [11.1]]), randn(5, 12, seed=1)
    dz, db = torch.autograd.grad((budgetmax(z, b) * g).sum(), (z, b))
    for row in range(5):
        p = budgetmax_oracle(z.detach()[row], b[row].item())
        inside = (p > 0.0) & (p < 1.0)
        mean = g[row][inside].mean()
        torch.testing.assert_close(dz[row], torch.where(inside, g[row] - mean, 0.0))
        torch.testing.assert_close(db[row].squeeze(), mean)


# ---------------------------------------------------------------------------------------------------------------
# Both


@pytest.mark.parametrize("transform", RELATIVES)
def test_masked_scores_are_as_if_absent(transform):
    z = randn(6, 9, dtype=torch.float32)
    mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, :2] = True
    p = transform(z, mask=mask)
    assert torch.equal(p, transform(torch.where(mask, z, -INF)))
    assert torch.equal(p[~mask], torch.zeros((~mask).sum()))
    for row in range(6):
        torch.testing.assert_close(p[row][mask[row]], transform(z[row][mask[row]]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("transform", RELATIVES)
def test_mask_hides_nan_and_infinity(transform):
    z = torch.tensor([0.3, math.nan, 0.1, INF, 0.2], requires_grad=True)
    p = transform(z, mask=torch.tensor([True, False, True, False, True]))
    torch.testing.assert_close(p[[0, 2, 4]], transform(torch.tensor([0.3, 0.1, 0.2])))
    assert p[1] == p[3] == 0.0
    (dz,) = torch.autograd.grad((p * torch.arange(5.0)).sum(), z)
    assert torch.isfinite(dz).all()
    assert dz[1] == dz[3] == 0.0


@pytest.mark.parametrize("parameter_grad", [False, True])
@pytest.mark.parametrize(("function", "value"), [(normmax, 1.5), (normmax, 5.0), (budgetmax, 1.5)])
def test_rows_without_scores_are_zero_with_zero_gradient(function, value: float, parameter_grad: bool):
    z = torch.tensor([[-INF, -INF, -INF], [0.3, -INF, 0.2], [0.1, 0.2, 0.3]], requires_grad=True)
    parameter = torch.full((3, 1), value, requires_grad=True) if parameter_grad else value
    mask = torch.tensor([[True, True, True], [True, True, True], [False, False, False]])
    p = function(z, parameter, mask=mask)
    assert torch.equal(p[[0, 2]], torch.zeros(2, 3))
    inputs = (z, parameter) if parameter_grad else (z,)
    grads = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 4.0])).sum(), inputs, create_graph=parameter_grad)
    for grad in grads:
        assert torch.isfinite(grad).all()
        assert torch.equal(grad[[0, 2]], torch.zeros_like(grad[[0, 2]]))
    if parameter_grad and grads[0].requires_grad:
        for second in torch.autograd.grad(sum(g.square().sum() for g in grads), inputs):
            assert torch.isfinite(second).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normmax_infinite_scores_share_the_mass(alpha: float):
    z = torch.tensor([[INF, 1.0, INF, -INF], [INF, 5.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    a = torch.tensor(alpha, requires_grad=True)
    p = normmax(z, a)
    torch.testing.assert_close(p[0], torch.tensor([0.5, 0.0, 0.5, 0.0]))
    assert torch.equal(p[1], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    dz, da = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum(), (z, a))
    assert torch.equal(dz[:2], torch.zeros(2, 4))
    assert dz[2].abs().sum() > 0.0
    assert torch.isfinite(da)


@pytest.mark.parametrize("transform", RELATIVES)
def test_nan_stays_in_its_row(transform):
    z = randn(3, 4, dtype=torch.float32)
    clean = transform(z)
    z[1, 2] = math.nan
    z.requires_grad_()
    p = transform(z)
    assert p[1].isnan().all()
    assert torch.equal(p[[0, 2]], clean[[0, 2]])
    (dz,) = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum(), z)
    assert torch.isfinite(dz[[0, 2]]).all()


@pytest.mark.parametrize("transform", RELATIVES)
def test_shift_invariance(transform):
    z = torch.round(randn(5, 7, dtype=torch.float32) * 512) / 512  # shifting these by 1e4 is exact in fp32
    torch.testing.assert_close(transform(z + 1e4), transform(z), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(transform(z - 1e4), transform(z), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("transform", RELATIVES)
def test_dims(transform, dim: int):
    z = randn(3, 4, 5, dtype=torch.float32)
    p = transform(z, dim=dim)
    assert p.shape == z.shape
    assert p.is_contiguous()
    assert torch.equal(p, transform(z.movedim(dim, -1).contiguous()).movedim(-1, dim))
    strided = z.transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(transform(strided, dim=dim), p)


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,), (0, 0)])
@pytest.mark.parametrize("transform", RELATIVES)
def test_empty_input_gives_empty_weights_as_softmax_does(transform, shape: tuple[int, ...]):
    assert transform(torch.zeros(shape)).shape == torch.softmax(torch.zeros(shape), -1).shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("transform", RELATIVES)
def test_dtypes(transform, dtype: torch.dtype):
    z = randn(4, 9, dtype=dtype).requires_grad_()
    p = transform(z)
    assert p.dtype == dtype
    wide = z.detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(p, transform(wide).to(dtype))  # the rounding of the fp32 weights, nothing less
    (dz,) = torch.autograd.grad((p * torch.arange(9).to(dtype)).sum(), z)
    assert dz.dtype == dtype
    assert dz.abs().sum() > 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transform", RELATIVES)
def test_autocast_gives_fp32(transform, dtype: torch.dtype):
    z = randn(4, 9, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        p = transform(z)
    assert p.dtype == torch.float32
    assert torch.equal(p, transform(z.float()))


@pytest.mark.parametrize(("function", "values"), [(normmax, (1.2, 1.7, 6.0)), (budgetmax, (0.4, 1.3, 3.0))])
def test_parameter_tensors_broadcast(function, values: tuple[float, ...]):
    z = randn(2, 3, 4, 5)
    expected = torch.stack([function(z[:, head], value) for head, value in enumerate(values)], 1)
    per_head = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(function(z, per_head), expected)
    torch.testing.assert_close(function(z, per_head.view(3, 1, 1)), expected)
    torch.testing.assert_close(function(z.movedim(-1, 1), per_head.view(3, 1), dim=1), expected.movedim(-1, 1))
    torch.testing.assert_close(function(z, torch.tensor(values[1])), function(z, values[1]), rtol=1e-6, atol=1e-7)
    grad = leaf(per_head)
    function(z, grad).square().sum().backward()
    assert grad.grad.shape == (3,)
    assert (grad.grad != 0.0).all()


@pytest.mark.parametrize("function", [normmax, budgetmax])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_vmap(function, in_dims: tuple[int | None, int | None]):
    z, values = randn(4, 4, 6), torch.tensor([1.1, 1.5, 2.0, 3.5], dtype=torch.float64)
    z = z[0] if in_dims[0] is None else z
    values = values[1] if in_dims[1] is None else values
    g = randn(6, seed=9)

    def gradients(x: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(lambda x, value: (function(x, value) * g).sum(), argnums=(0, 1))(x, value)

    weights = torch.vmap(function, in_dims=in_dims)(z, values)
    grads = torch.vmap(gradients, in_dims=in_dims)(z, values)
    for k in range(4):
        x = z if in_dims[0] is None else z.select(in_dims[0], k)
        value = values if in_dims[1] is None else values[k]
        torch.testing.assert_close(weights[k], function(x, value))
        for ours, expected in zip(grads, gradients(x, value), strict=True):
            torch.testing.assert_close(ours[k], expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [normmax, budgetmax])
def test_compiles_whole_with_dynamic_shapes(function, backend: str):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for shape in ((4, 7), (3, 12)):
        z = randn(*shape, dtype=torch.float32).requires_grad_()
        value = torch.linspace(1.2, 3.0, shape[0]).unsqueeze(-1).requires_grad_()
        g = randn(*shape, seed=1, dtype=torch.float32)
        expected, ours = function(z, value), compiled(z, value)
        torch.testing.assert_close(ours, expected)
        for a, b in zip(*(torch.autograd.grad((p * g).sum(), (z, value)) for p in (ours, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("budget", [1.5, torch.tensor(1.5, dtype=torch.float64)])
def test_budgetmax_has_forward_derivatives(budget):
    z, tangent = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    out, moved = torch.func.jvp(lambda z: budgetmax(z, budget), (z,), (tangent,))
    step = 1e-6
    torch.testing.assert_close(moved, (budgetmax(z + step * tangent, budget) - out) / step, atol=1e-5, rtol=1e-5)
    jacobian = torch.func.jacrev(lambda z: budgetmax(z, budget))(z)
    torch.testing.assert_close(torch.func.jacfwd(lambda z: budgetmax(z, budget))(z), jacobian)
    hessian = torch.func.hessian(lambda z: budgetmax(z, budget).square().sum())(z)
    torch.testing.assert_close(hessian, 2.0 * jacobian.T @ jacobian)


def test_budgetmax_moves_with_its_budget():
    z = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    budget = torch.tensor(1.5, dtype=torch.float64)
    _, moved = torch.func.jvp(lambda b: budgetmax(z, b), (budget,), (torch.ones_like(budget),))
    torch.testing.assert_close(moved, (budgetmax(z, budget + 1e-6) - budgetmax(z, budget)) / 1e-6, atol=1e-5, rtol=1e-5)
