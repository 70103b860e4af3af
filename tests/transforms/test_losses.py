"""The Fenchel-Young losses against cross-entropy, against their definition in float64, and under bad conditions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tamis import entmax, entmax_loss, normmax, normmax_loss, sparsemax_loss

INF = math.inf
ALPHAS = (0.7, 1.0, 1.2, 1.5, 2.0, 2.5)
SHAPES = [(5,), (7, 5), (3, 5, 4, 2)]
LOSSES = [
    *(pytest.param(partial(entmax_loss, alpha=a), id=f"entmax{a:g}") for a in (1.0, 1.2, 1.5, 2.0, 2.5)),
    pytest.param(sparsemax_loss, id="sparsemax"),
    pytest.param(partial(normmax_loss, alpha=1.5), id="normmax1.5"),
    pytest.param(partial(normmax_loss, alpha=3.0), id="normmax3"),
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(x: Tensor | float | list) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).clone().requires_grad_()


def class_dim(shape: tuple[int, ...]) -> int:
    return 0 if len(shape) == 1 else 1


def indices(shape: tuple[int, ...], ignored: int | None = None) -> Tensor:
    """Class indices for scores of this shape; about a third of them `ignored`, never all."""
    samples = [n for i, n in enumerate(shape) if i != class_dim(shape)]
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(shape[class_dim(shape)], samples, generator=generator)
    if ignored is not None and samples:
        hidden = torch.rand(samples, generator=generator) < 0.33
        hidden.view(-1)[0] = False
        target[hidden] = ignored
    return target


def probabilities(shape: tuple[int, ...], *, sparse: bool = False) -> Tensor:
    dim = class_dim(shape)
    q = torch.softmax(randn(*shape, seed=8), dim)
    if sparse:
        q = torch.where(q >= q.median(dim, keepdim=True).values, q, 0.0)
        q = q / q.sum(dim, keepdim=True)
    return q


# ---------------------------------------------------------------------------------------------------------------
# Definitions, float64


def entmax_oracle(z: Tensor, alpha: float) -> Tensor:
    """Bisection on the threshold of alpha-entmax, alpha > 1, over the last dim."""
    x = (alpha - 1.0) * z.double()
    low, high = x.amax(-1, keepdim=True) - 1.0, x.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        over = (x - middle).clamp(min=0.0).pow(1.0 / (alpha - 1.0)).sum(-1, keepdim=True) > 1.0
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    p = (x - low).clamp(min=0.0).pow(1.0 / (alpha - 1.0))
    return p / p.sum(-1, keepdim=True)


def tsallis(p: Tensor, alpha: float) -> Tensor:
    return (p - p.pow(alpha)).sum(-1) / (alpha * (alpha - 1.0))


def entmax_definition(z: Tensor, q: Tensor, alpha: float) -> Tensor:
    p = entmax_oracle(z, alpha)
    return ((p - q) * z).sum(-1) + tsallis(p, alpha)


def normmax_definition(z: Tensor, q: Tensor, alpha: float) -> Tensor:
    """1 - ||p||_a + <p - q, z>, with p by bisection on sum (z - tau)_+^(a / (a - 1)) = 1."""
    exponent = alpha / (alpha - 1.0)
    low, high = z.amax(-1, keepdim=True) - 1.0, z.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        over = (z - middle).clamp(min=0.0).pow(exponent).sum(-1, keepdim=True) > 1.0
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    p = (z - low).clamp(min=0.0).pow(exponent - 1.0)
    p = p / p.sum(-1, keepdim=True)
    return 1.0 - p.pow(alpha).sum(-1).pow(1.0 / alpha) + ((p - q) * z).sum(-1)


# ---------------------------------------------------------------------------------------------------------------
# alpha = 1 is cross-entropy, in every spelling


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "ignored", "ignored class", "probabilities", "sparse probabilities"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy_at_alpha_one(shape: tuple[int, ...], kind: str, weighted: bool, label_smoothing: float):
    options = {"label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    if kind == "ignored class":
        options["ignore_index"] = 1
    if "probabilities" in kind:
        target = probabilities(shape, sparse="sparse" in kind)
    else:
        target = indices(shape, {"indices": None, "ignored": -100, "ignored class": 1}[kind])
    for reduction in ("none", "sum", "mean"):
        results = []
        for loss in (partial(entmax_loss, alpha=1.0), F.cross_entropy):
            z = leaf(randn(*shape) * 3)
            value = loss(z, target, reduction=reduction, **options)
            results.append((value, *torch.autograd.grad(value.sum(), z)))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_in_target_probabilities(shape: tuple[int, ...], weighted: bool, label_smoothing: float, sparse: bool):
    weight = torch.tensor([0.5, 2.0, 0.25, 1.0, 3.0], dtype=torch.float64) if weighted else None
    z = randn(*shape)
    ours, other = (leaf(probabilities(shape, sparse=sparse)) for _ in range(2))
    entmax_loss(z, ours, 1.0, weight=weight, label_smoothing=label_smoothing).backward()
    F.cross_entropy(z, other, weight=weight, label_smoothing=label_smoothing).backward()
    torch.testing.assert_close(ours.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_samples_ignored(loss):
    z = torch.zeros(3, 4, requires_grad=True)
    target = torch.full((3,), -100)
    assert loss(z, target).isnan()
    assert loss(z, target, reduction="sum") == 0.0
    assert torch.equal(loss(z, target, reduction="none"), torch.zeros(3))
    (grad,) = torch.autograd.grad(loss(z, target, reduction="sum"), z)
    assert torch.equal(grad, torch.zeros(3, 4))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_samples(loss):
    z, target = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)
    assert loss(z, target).isnan()
    assert loss(z, target, reduction="sum") == 0.0
    assert loss(z, target, reduction="none").shape == (0,)


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_samples_do_not_count(loss):
    z = leaf(randn(6, 5))
    target = torch.tensor([0, -1, 2, -1, 4, 1])
    kept = target >= 0
    value = loss(z, target, ignore_index=-1)
    torch.testing.assert_close(value, loss(z[kept], target[kept]))
    (grad,) = torch.autograd.grad(value, z)
    assert torch.equal(grad[~kept], torch.zeros(2, 5, dtype=torch.float64))
    assert (loss(z, target, ignore_index=-1, reduction="none")[~kept] == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_index_dtypes(dtype: torch.dtype):
    z, target = randn(4, 5), torch.tensor([0, 4, 2, 1])
    assert entmax_loss(z, target.to(dtype), 1.5) == entmax_loss(z, target, 1.5)


# ---------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("alpha", [1.0001, 1.001, 1.01, 1.1, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("classes", [2, 50, 2000])
def test_value_matches_its_definition_in_fp32(classes: int, scale: float, alpha: float):
    z = randn(8, classes, dtype=torch.float32) * scale
    target = torch.randint(classes, (8,), generator=torch.Generator().manual_seed(1))
    ours = entmax_loss(z, target, alpha, reduction="none")
    expected = entmax_definition(z.double(), F.one_hot(target, classes).double(), alpha)
    assert ((ours.double() - expected).abs() <= 1e-6 * expected.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("alpha", [1.0001, 1.2, 1.5, 2.0, 2.5])
def test_value_and_gradient_for_probabilities(alpha: float):
    z, q = leaf(randn(6, 9)), probabilities((6, 9))
    ours = entmax_loss(z, q, alpha, reduction="none")
    torch.testing.assert_close(ours, entmax_definition(z.detach(), q, alpha), rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(ours.sum(), z)
    torch.testing.assert_close(grad, entmax_oracle(z.detach(), alpha) - q, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 5.0])
def test_normmax_value_and_gradient(alpha: float):
    z, q = leaf(randn(6, 9) * 0.7), probabilities((6, 9))
    ours = normmax_loss(z, q, alpha, reduction="none")
    torch.testing.assert_close(ours, normmax_definition(z.detach(), q, alpha), rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(ours.sum(), z)
    torch.testing.assert_close(grad, normmax(z.detach(), alpha) - q, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 5.0])
def test_normmax_gradient_in_alpha_matches_the_closed_formula(alpha: float):
    z, a = leaf(randn(6, 9) * 0.7), leaf([alpha] * 6)
    (grad,) = torch.autograd.grad(normmax_loss(z, indices((6, 9)), a, reduction="sum"), a)
    p = normmax(z.detach(), alpha)
    power = p.pow(alpha).sum(-1)
    log_p = torch.where(p > 0.0, p, 1.0).log()
    slope = (p.pow(alpha) * log_p).sum(-1) / (alpha * power) - power.log() / alpha**2
    torch.testing.assert_close(grad, -power.pow(1.0 / alpha) * slope, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        pytest.param(partial(entmax_loss, alpha=1.5), partial(entmax, alpha=1.5), id="entmax1.5"),
        pytest.param(sparsemax_loss, partial(entmax, alpha=2.0), id="sparsemax"),
        pytest.param(partial(normmax_loss, alpha=2.0), partial(normmax, alpha=2.0), id="normmax2"),
        pytest.param(partial(normmax_loss, alpha=5.0), partial(normmax, alpha=5.0), id="normmax5"),
    ],
)
def test_gradient_is_weights_minus_target_on_near_ties(loss, weights, dtype: torch.dtype):
    """Scores that differ by less than the weights can resolve, as at the start of training."""
    step = torch.finfo(dtype).eps / 8
    z = torch.tensor([[step, 0.0, -0.2], [0.0, -step, step], [0.1, 0.1, 0.1]], dtype=dtype, requires_grad=True)
    target = torch.tensor([2, 0, 1])
    (grad,) = torch.autograd.grad(loss(z, target, reduction="sum"), z)
    torch.testing.assert_close(grad, weights(z.detach()) - F.one_hot(target, 3), rtol=1e-5, atol=1e-6)


def test_sparsemax_loss_is_the_quadratic_one():
    z, target = randn(7, 5), indices((7, 5))
    p = entmax_oracle(z, 2.0)
    expected = ((p - F.one_hot(target, 5)) * z).sum(-1) + (1.0 - p.square().sum(-1)) / 2
    torch.testing.assert_close(sparsemax_loss(z, target, reduction="none"), expected)
    options = {
        "weight": torch.linspace(0.5, 2.0, 5, dtype=torch.float64),
        "label_smoothing": 0.1,
        "ignore_index": 2,
        "reduction": "sum",
    }
    assert sparsemax_loss(z, target, **options) == entmax_loss(z, target, 2.0, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_smoothing_are_linear_in_the_target(loss):
    """The loss for v is sum_c v_c loss(c), so each option is a mixture of plain losses."""
    z, target = randn(6, 5), indices((6, 5))
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    plain = torch.stack([loss(z, torch.full((6,), c), reduction="none") for c in range(5)], -1)
    picked = plain.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ours = loss(z, target, weight=weight, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(ours, 0.7 * weight[target] * picked + 0.3 * (weight * plain).mean(-1))
    mean = loss(z, target, weight=weight, label_smoothing=0.3)
    torch.testing.assert_close(mean, ours.sum() / weight[target].sum())
    q = probabilities((6, 5))
    ours = loss(z, q, weight=weight, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(ours, (weight * (0.7 * q + 0.3 / 5) * plain).sum(-1))
    torch.testing.assert_close(loss(z, q, weight=weight, label_smoothing=0.3), ours.mean())


@pytest.mark.parametrize("loss", LOSSES)
def test_layouts_agree(loss):
    z, target = randn(3, 5, 4, 2), indices((3, 5, 4, 2))
    flat = loss(z.movedim(1, -1).reshape(-1, 5), target.reshape(-1), reduction="none")
    torch.testing.assert_close(loss(z, target, reduction="none"), flat.view(3, 4, 2))
    single = torch.stack([loss(row, t) for row, t in zip(z[:, :, 0, 0], target[:, 0, 0], strict=True)])
    torch.testing.assert_close(single, flat.view(3, 4, 2)[:, 0, 0])


# ---------------------------------------------------------------------------------------------------------------
# Derivatives


@pytest.mark.parametrize("options", [{}, {"weight": True, "label_smoothing": 0.2}], ids=["plain", "weight+smoothing"])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradcheck(alpha: float, kind: str, options: dict):
    if "weight" in options:
        options = {**options, "weight": torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)}
    target = indices((3, 4), -100) if kind == "indices" else probabilities((3, 4), sparse=True)

    def loss(z: Tensor, a: Tensor) -> Tensor:
        return entmax_loss(z, target, a, **options)

    inputs = (leaf(randn(3, 4, seed=3)), leaf([alpha] * 3))
    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 5.0])
def test_normmax_gradcheck(alpha: float):
    target, weight = indices((3, 4)), torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)

    def loss(z: Tensor, a: Tensor) -> Tensor:
        return normmax_loss(z, target, a, weight=weight, label_smoothing=0.2)

    inputs = (leaf(randn(3, 4, seed=3) * 0.4), leaf([alpha] * 3))
    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs)


@pytest.mark.parametrize("alpha", [0.9999, 1.0 - 1e-6, 1.0, 1.0 + 1e-8, 1.0 + 1e-6, 1.0001])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
def test_second_derivative_in_alpha_is_continuous_at_one(dtype: torch.dtype, tolerance: float, alpha: float):
    z, target = randn(4, 5, dtype=dtype), torch.tensor([0, 1, 2, 3])

    def slope(value: float) -> Tensor:
        a = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(entmax_loss(z.double(), target, a), a)
        return first

    a = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    (first,) = torch.autograd.grad(entmax_loss(z, target, a), a, create_graph=True)
    (second,) = torch.autograd.grad(first, a)
    expected = (slope(alpha + 1e-3) - slope(alpha - 1e-3)) / 2e-3
    assert second.item() == pytest.approx(expected.item(), rel=tolerance)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.0 + 1e-6, 1.1, 1.5, 2.0, 2.5, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_gradient_is_never_positive_for_hard_targets(alpha: float, dtype: torch.dtype):
    z = torch.cat([randn(200, 6, seed=k, dtype=dtype) * scale for k, scale in enumerate((1e-3, 0.3, 2.0, 30.0))])
    a = torch.full((800,), alpha, dtype=dtype, requires_grad=True)
    target = torch.cat([torch.randint(6, (400,), generator=torch.Generator().manual_seed(0)), z[400:].argmax(-1)])
    (grad,) = torch.autograd.grad(entmax_loss(z, target, a, reduction="sum"), a)
    assert (grad <= 0.0).all()
    assert (grad < 0.0).any()


@pytest.mark.parametrize("kind", ["float", "scalar", "per sample", "broadcast", "column"])
def test_kinds_of_alpha(kind: str):
    """Five samples and five classes: nothing but its meaning tells one dimension from the other."""
    z, target = randn(5, 5), indices((5, 5))
    values = torch.tensor([1.0, 1.2, 1.5, 2.0, 2.5], dtype=torch.float64)
    if kind in ("float", "scalar"):
        values = torch.full((5,), 1.3, dtype=torch.float64)
    alpha = {
        "float": 1.3,
        "scalar": leaf(1.3),
        "per sample": leaf(values),
        "broadcast": leaf([1.3]),
        "column": leaf(values.unsqueeze(-1)),
    }[kind]
    if kind == "broadcast":
        values = torch.full((5,), 1.3, dtype=torch.float64)
    ours = entmax_loss(z, target, alpha, reduction="none")
    expected = torch.stack([entmax_loss(z[i], target[i], values[i].item()) for i in range(5)])
    assert ours.shape == (5,)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(entmax_loss(z, target, alpha), expected.mean())
    if isinstance(alpha, Tensor):
        (grad,) = torch.autograd.grad(ours.sum(), alpha)
        assert grad.shape == alpha.shape
        assert (grad < 0.0).any()


@pytest.mark.parametrize("alpha_shape", [(2, 3, 4), (2, 1, 3, 4), (2, 1, 1, 1), (4,), (3, 1), ()])
def test_alpha_shapes_for_several_positions(alpha_shape: tuple[int, ...]):
    z, target = randn(2, 5, 3, 4), indices((2, 5, 3, 4))
    values = 1.0 + torch.rand(alpha_shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    per_sample = values if alpha_shape == (2, 3, 4) else values.expand(2, 1, 3, 4).squeeze(1)
    flat = entmax_loss(
        z.movedim(1, -1).reshape(-1, 5), target.reshape(-1), per_sample.reshape(-1), reduction="none"
    ).view(2, 3, 4)
    alpha = leaf(values)
    ours = entmax_loss(z, target, alpha, reduction="none")
    torch.testing.assert_close(ours, flat)
    (grad,) = torch.autograd.grad(ours.sum(), alpha)
    assert grad.shape == alpha_shape


# ---------------------------------------------------------------------------------------------------------------
# Signs, margins, shifts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_never_negative_for_hard_targets(loss, scale: float, dtype: torch.dtype):
    z = randn(1000, 8, dtype=dtype) * scale
    target = torch.cat([z[:800].argmax(-1), indices((200, 8))])
    assert loss(z, target, reduction="none").min() >= 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.05, 1.1, 1.2, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0])
def test_exactly_zero_beyond_the_margin(alpha: float, dtype: torch.dtype):
    margin = 1.0 / (alpha - 1.0)
    z = torch.tensor([[0.0, 0.25, -3.0, -INF]], dtype=dtype).repeat(2, 1)
    z[:, 1] += torch.tensor([1.001 * margin, 0.5 * margin - 0.25], dtype=dtype)
    losses = entmax_loss(z.requires_grad_(), torch.tensor([1, 1]), alpha, reduction="none")
    assert losses[0] == 0.0
    assert losses[1] > 0.0
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.equal(grad[0], torch.zeros(4, dtype=dtype))
    assert (grad[1] != 0.0).any()


@pytest.mark.parametrize(("alpha", "margin"), [(1.25, 4.0), (1.5, 2.0), (2.0, 1.0), (3.0, 0.5)])
def test_exactly_zero_at_the_margin(alpha: float, margin: float):
    z = torch.tensor([0.0, margin, -1.0])
    assert entmax_loss(z, torch.tensor(1), alpha) == 0.0


@pytest.mark.parametrize("alpha", [k / 10 for k in range(11, 80, 3)])
def test_normmax_loss_is_exactly_zero_from_a_lead_of_one(alpha: float):
    z = torch.tensor([[2.0, 0.75, -3.0], [1.0, 0.0, -1.0]], requires_grad=True)
    losses = normmax_loss(z, torch.tensor([0, 0]), alpha, reduction="none")
    assert torch.equal(losses, torch.zeros(2))
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.equal(grad[0], torch.zeros(3))
    assert normmax_loss(torch.tensor([0.5, 0.0, -1.0]), torch.tensor(0), alpha) > 0.0


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("loss", LOSSES)
def test_shifts_change_nothing(loss, shift: float):
    z = torch.round(randn(20, 7, dtype=torch.float32) * 2 * 512) / 512  # exact in fp32 after the shift too
    shifted = z + shift
    assert torch.equal(shifted - shift, z)
    results = []
    for scores in (z, shifted):
        scores.requires_grad_()
        for target in (indices((20, 7)), probabilities((20, 7)).float()):
            losses = loss(scores, target, reduction="none", label_smoothing=0.1)
            results += [losses, torch.autograd.grad(losses.sum(), scores)[0]]
    for plain, moved in zip(results[:4], results[4:], strict=True):
        assert torch.equal(plain, moved)


# ---------------------------------------------------------------------------------------------------------------
# Infinite scores


@pytest.mark.parametrize("loss", LOSSES)
def test_minus_infinity_as_the_target_costs_infinity(loss):
    z = torch.tensor([[0.3, -INF, 0.1], [0.3, 0.2, 0.1]], requires_grad=True)
    losses = loss(z, torch.tensor([1, 1]), reduction="none")
    assert losses[0] == INF
    assert torch.isfinite(losses[1])
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.isfinite(grad).all()
    assert grad[0, 1] == -1.0
    torch.testing.assert_close(grad.sum(-1), torch.zeros(2), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_minus_infinity_elsewhere_is_an_absent_class(loss):
    z = torch.tensor([[0.3, -INF, 0.1], [0.3, 0.2, -INF]], requires_grad=True)
    target = torch.tensor([2, 0])
    losses = loss(z, target, reduction="none")
    expected = torch.stack([loss(torch.tensor(r), torch.tensor(t)) for r, t in (([0.3, 0.1], 1), ([0.3, 0.2], 0))])
    torch.testing.assert_close(losses, expected)
    q = torch.tensor([[0.4, 0.0, 0.6], [0.2, 0.8, 0.0]])
    for value in (losses.sum(), loss(z, q, reduction="sum")):
        assert torch.isfinite(value)
        (grad,) = torch.autograd.grad(value, z)
        assert torch.isfinite(grad).all()
        assert grad[0, 1] == grad[1, 2] == 0.0


@pytest.mark.parametrize("loss", [entmax_loss, normmax_loss])
def test_minus_infinity_leaves_second_derivatives_and_alpha_finite(loss):
    z = torch.tensor([[0.3, -INF, 0.1, 0.0], [0.3, 0.2, 0.1, -INF]], requires_grad=True)
    alpha = torch.tensor([1.5, 1.8], requires_grad=True)
    value = loss(z, torch.tensor([2, 3]), alpha, reduction="none")
    grads = torch.autograd.grad(value.sum(), (z, alpha), create_graph=True)
    assert all(torch.isfinite(g).all() for g in grads)
    for second in torch.autograd.grad(sum(g.square().sum() for g in grads), (z, alpha)):
        assert torch.isfinite(second).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_minus_infinity(loss, smoothing: float):
    z = torch.tensor([[-INF, -INF, -INF], [0.3, 0.2, 0.1], [-INF, -INF, -INF]], requires_grad=True)
    target = torch.tensor([0, 1, -100])
    losses = loss(z, target, reduction="none", label_smoothing=smoothing)
    assert losses[0] == INF
    assert losses[2] == 0.0
    torch.testing.assert_close(losses[1], loss(z[1], target[1], label_smoothing=smoothing))
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.isfinite(grad).all()
    assert torch.equal(grad[2], torch.zeros(3))


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_stays_in_its_sample(loss):
    z = torch.tensor([[0.3, math.nan, 0.1], [0.3, 0.2, 0.1]], requires_grad=True)
    losses = loss(z, torch.tensor([0, 1]), reduction="none")
    assert losses[0].isnan()
    torch.testing.assert_close(losses[1], loss(z[1].detach(), torch.tensor(1)))
    (grad,) = torch.autograd.grad(losses[1], z)
    assert torch.isfinite(grad[1]).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_plus_infinity(loss):
    z = torch.tensor([[INF, 0.0, 1.0], [INF, 0.0, 1.0]])
    losses = loss(z, torch.tensor([0, 1]), reduction="none")
    assert torch.equal(losses, torch.tensor([0.0, INF]))


# ---------------------------------------------------------------------------------------------------------------
# Dtypes, autocast, compile, vmap


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_dtypes(loss, dtype: torch.dtype):
    z, target = randn(64, 20, dtype=dtype).requires_grad_(), indices((64, 20))
    value = loss(z, target)
    assert value.dtype == dtype
    wide = z.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    expected = loss(wide, target)
    assert torch.equal(value, expected.to(dtype))
    (grad,), (wide_grad,) = torch.autograd.grad(value, z), torch.autograd.grad(expected, wide)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, wide_grad.to(dtype))
    q = probabilities((64, 20)).to(dtype)
    assert torch.equal(loss(z, q), loss(wide, q.to(wide.dtype)).to(dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_sums_many_samples_in_fp32(loss):
    z = randn(5000, 4, dtype=torch.bfloat16)
    target = indices((5000, 4))
    expected = loss(z.float(), target, reduction="sum")
    assert expected > 1000.0
    assert torch.equal(loss(z, target, reduction="sum"), expected.to(torch.bfloat16))


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_runs_in_fp32(loss):
    z, target = randn(6, 20, dtype=torch.bfloat16), indices((6, 20))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(z, target)
    assert value.dtype == torch.float32
    assert torch.equal(value, loss(z.float(), target))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [entmax_loss, normmax_loss])
def test_compiles_whole_with_dynamic_shapes(loss, backend: str):
    torch._dynamo.reset()
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])

    def step(z: Tensor, target: Tensor, alpha: Tensor) -> Tensor:
        return loss(z, target, alpha, weight=weight, label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for samples in (4, 9):
        z = randn(samples, 5, dtype=torch.float32).requires_grad_()
        alpha = torch.linspace(1.2, 2.0, samples).requires_grad_()
        target = indices((samples, 5), -100)
        expected, ours = step(z, target, alpha), compiled(z, target, alpha)
        torch.testing.assert_close(ours, expected)
        for a, b in zip(*(torch.autograd.grad(value, (z, alpha)) for value in (ours, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("loss", [entmax_loss, normmax_loss])
def test_vmap_of_grad_gives_per_sample_gradients(loss, kind: str):
    z, alpha = randn(6, 5), torch.linspace(1.2, 2.4, 6, dtype=torch.float64)
    target = indices((6, 5)) if kind == "indices" else probabilities((6, 5))
    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 2)))(z, target, alpha)
    x, a = leaf(z), leaf(alpha)
    expected = torch.autograd.grad(loss(x, target, a, reduction="sum"), (x, a))
    for ours, theirs in zip(per_sample, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_forward_mode_agrees_with_reverse(alpha: float):
    z, tangent, target = randn(4, 5), randn(4, 5, seed=1), indices((4, 5))
    a, da = torch.tensor(alpha, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    loss = lambda z, a: entmax_loss(z, target, a)  # noqa: E731
    value, derivative = torch.func.jvp(loss, (z, a), (tangent, da))
    grads = torch.func.grad(loss, argnums=(0, 1))(z, a)
    torch.testing.assert_close(value, loss(z, a))
    torch.testing.assert_close(derivative, (grads[0] * tangent).sum() + grads[1] * da)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_hessian_is_the_jacobian_of_the_weights(alpha: float):
    z = randn(5)
    hessian = torch.func.hessian(lambda x: entmax_loss(x, torch.tensor(1), alpha))(z)
    torch.testing.assert_close(hessian, torch.func.jacrev(lambda x: entmax(x, alpha))(z))
