"""EntmaxCategorical: a categorical distribution that knows what cannot happen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import Categorical, Distribution, Independent, kl_divergence

from tamis import entmax
from tamis.distributions import EntmaxCategorical

INF = math.inf


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(x: Tensor | float | list) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).clone().requires_grad_()


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def sparse() -> EntmaxCategorical:
    """Two distributions over four outcomes; each has one that cannot happen, the second one more at -inf."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -4.0], [0.0, -INF, 0.3, -5.0]], dtype=torch.float64)
    d = EntmaxCategorical(logits, 1.5, validate_args=True)
    assert d.support_mask.tolist() == [[True, True, True, False], [True, False, True, False]]
    return d


# ---------------------------------------------------------------------------------------------------------------
# Sampling


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sample_frequencies(alpha: float, dtype: torch.dtype):
    d = EntmaxCategorical(randn(3, 6, dtype=dtype), alpha)
    count = 20000
    samples = d.sample((count,))
    assert samples.shape == (count, 3)
    assert samples.dtype == torch.long
    observed = torch.stack([(samples == k).sum(0) for k in range(6)], -1).double()
    probs = d.probs.double() / d.probs.double().sum(-1, keepdim=True)
    assert torch.equal(observed[probs == 0.0], torch.zeros_like(observed[probs == 0.0]))
    expected = count * probs
    common = expected >= 10.0
    chi_square = torch.where(common, (observed - expected).square() / expected.clamp(min=1.0), 0.0).sum(-1)
    assert (chi_square < 22.0).all()  # 5 degrees of freedom: exceeded with probability 5e-4


def test_never_samples_what_cannot_happen(sparse: EntmaxCategorical):
    samples = sparse.sample((50, 400))
    assert samples.shape == (50, 400, 2)
    assert sparse.support_mask.expand(50, 400, 2, 4).gather(-1, samples.unsqueeze(-1)).all()
    assert torch.isfinite(sparse.log_prob(samples)).all()
    assert set(samples[..., 0].unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 4), (0,)])
def test_shapes(batch_shape: tuple[int, ...], sample_shape: tuple[int, ...]):
    # torch cannot validate an empty batch, its own Categorical included
    d = EntmaxCategorical(randn(*batch_shape, 5), 1.5, validate_args=0 not in batch_shape)
    assert d.batch_shape == batch_shape
    assert d.event_shape == ()
    samples = d.sample(sample_shape)
    assert samples.shape == sample_shape + batch_shape
    assert d.log_prob(samples).shape == sample_shape + batch_shape
    assert d.entropy().shape == batch_shape
    assert d.mode.shape == batch_shape
    assert d.mean.shape == d.variance.shape == batch_shape
    assert d.probs.shape == d.support_mask.shape == (*batch_shape, 5)


def test_samples_keep_to_their_row():
    logits = torch.full((3, 4), -5.0)
    logits[torch.arange(3), torch.tensor([2, 0, 3])] = 5.0
    samples = EntmaxCategorical(logits, 2.0).sample((7,))
    assert torch.equal(samples, torch.tensor([2, 0, 3]).expand(7, 3))


def test_seed_makes_samples_repeat():
    d = EntmaxCategorical(randn(4, 6))
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(d.sample((50,)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ---------------------------------------------------------------------------------------------------------------
# log_prob


def test_log_prob_of_possible_and_impossible(sparse: EntmaxCategorical):
    values = sparse.enumerate_support()
    log_probs = sparse.log_prob(values).T
    possible = sparse.support_mask
    torch.testing.assert_close(log_probs[possible], sparse.probs[possible].log())
    assert (log_probs[~possible] == -INF).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 2.5])
def test_log_prob_gradients(alpha: float):
    logits, a = leaf(randn(3, 4, seed=1) * 0.5), leaf([[alpha]] * 3)
    value = EntmaxCategorical(logits.detach(), a.detach()).mode
    assert gradcheck(lambda z, a: EntmaxCategorical(z, a).log_prob(value), (logits, a))


def test_log_prob_off_the_support_has_finite_gradient():
    logits, alpha = leaf([0.5, 0.2, -9.0, -INF]), leaf(1.5)
    log_probs = EntmaxCategorical(logits, alpha).log_prob(torch.tensor([0, 2, 3]))
    assert log_probs[1:].tolist() == [-INF, -INF]
    for grad in torch.autograd.grad(log_probs.sum(), (logits, alpha)):
        assert torch.isfinite(grad).all()
        assert grad.abs().sum() > 0.0


@pytest.mark.parametrize("value_shape", [(), (1,), (3,), (2, 1), (2, 3), (5, 2, 3)])
def test_log_prob_broadcasts(value_shape: tuple[int, ...]):
    d = EntmaxCategorical(randn(2, 3, 4), 1.2)
    value = torch.randint(4, value_shape)
    expected = Categorical(probs=d.probs).log_prob(value)
    torch.testing.assert_close(d.log_prob(value), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
def test_log_prob_takes_any_numeric_outcome(sparse: EntmaxCategorical, dtype: torch.dtype):
    value = torch.tensor([0, 2])
    assert torch.equal(sparse.log_prob(value.to(dtype)), sparse.log_prob(value))


# ---------------------------------------------------------------------------------------------------------------
# Entropy and divergence


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_entropy(alpha: float):
    d = EntmaxCategorical(randn(5, 6) * 2, alpha)
    expected = [-math.fsum(p * math.log(p) for p in row if p > 0.0) for row in d.probs.tolist()]
    torch.testing.assert_close(d.entropy(), torch.tensor(expected, dtype=torch.float64))
    assert EntmaxCategorical(torch.tensor([9.0, 0.0, 0.0]), 2.0).entropy() == 0.0
    assert EntmaxCategorical(torch.zeros(8), alpha).entropy().item() == pytest.approx(math.log(8), rel=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_entropy_gradients(alpha: float):
    logits, a = leaf([[0.4, 0.1, -0.2, -3.0], [0.0, 0.1, 0.2, 0.3]]), leaf(alpha)
    assert gradcheck(lambda z, a: EntmaxCategorical(z, a).entropy(), (logits, a))


def test_kl_of_finite_pairs():
    p, q = EntmaxCategorical(randn(4, 5), 2.0), EntmaxCategorical(randn(4, 5, seed=1), 1.0)
    assert not p.support_mask.all()
    expected = [
        math.fsum(a * math.log(a / b) for a, b in zip(x, y, strict=True) if a > 0.0)
        for x, y in zip(p.probs.tolist(), q.probs.tolist(), strict=True)
    ]
    torch.testing.assert_close(kl_divergence(p, q), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(4, dtype=torch.float64))


def test_kl_is_infinite_where_q_cannot_follow():
    narrow = EntmaxCategorical(torch.tensor([[1.0, 0.9, -5.0], [1.0, -5.0, -5.0]]), 2.0)
    wide = EntmaxCategorical(torch.tensor([0.3, 0.2, 0.1]), 2.0)
    assert kl_divergence(wide, narrow).tolist() == [INF, INF]
    assert torch.isfinite(kl_divergence(narrow, wide)).all()
    assert (kl_divergence(narrow, wide) > 0.0).all()
    disjoint = EntmaxCategorical(torch.tensor([-INF, -INF, 0.0]), 1.5)
    assert kl_divergence(disjoint, narrow).tolist() == [INF, INF]


def test_kl_broadcasts_and_has_gradients():
    logits, alpha = leaf([[0.4, 0.1, -4.0]]), leaf(1.5)
    other = leaf([[0.2, 0.0, 0.1], [0.1, 0.2, 0.3]])

    def divergence(z: Tensor, a: Tensor, w: Tensor) -> Tensor:
        return kl_divergence(EntmaxCategorical(z, a), EntmaxCategorical(w, 1.3))

    assert divergence(logits, alpha, other).shape == (2,)
    assert gradcheck(divergence, (logits, alpha, other))


def test_infinite_kl_has_finite_gradient():
    p, q = leaf([0.4, 0.3, 0.2]), leaf([5.0, 0.1, 0.0])
    value = kl_divergence(EntmaxCategorical(p, 1.5), EntmaxCategorical(q, 1.5))
    assert value == INF
    for grad in torch.autograd.grad(value, (p, q)):
        assert torch.isfinite(grad).all()


# ---------------------------------------------------------------------------------------------------------------
# The interface of torch.distributions


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)])
def test_enumerate_support(batch_shape: tuple[int, ...], expand: bool):
    logits = randn(*batch_shape, 5)
    ours = EntmaxCategorical(logits).enumerate_support(expand)
    assert torch.equal(ours, Categorical(logits=logits).enumerate_support(expand))


def test_mode_is_the_best_score():
    logits = randn(3, 4, 7)
    assert torch.equal(EntmaxCategorical(logits, 1.7).mode, logits.argmax(-1))


def test_mean_and_variance_are_nan_as_in_torch(sparse: EntmaxCategorical):
    assert sparse.mean.isnan().all()
    assert sparse.variance.isnan().all()


@pytest.mark.parametrize("shape", [(2,), (5, 2), (3, 5, 2)])
def test_expand(sparse: EntmaxCategorical, shape: tuple[int, ...]):
    d = sparse.expand(shape)
    assert isinstance(d, EntmaxCategorical)
    assert d.batch_shape == shape
    assert d.logits.shape == d.probs.shape == (*shape, 4)
    assert torch.equal(d.probs, sparse.probs.expand(*shape, 4))
    assert torch.equal(d.log_prob(torch.tensor(2)), sparse.log_prob(torch.tensor(2)).expand(shape))
    assert torch.equal(d.entropy(), sparse.entropy().expand(shape))
    assert d.sample((6,)).shape == (6, *shape)
    assert d.enumerate_support().shape == (4, *shape)
    assert torch.equal(kl_divergence(d, sparse), torch.zeros(shape, dtype=torch.float64))


def test_expand_of_a_learned_alpha():
    logits, alpha = leaf(randn(1, 3, 4)), leaf([[[1.2], [1.5], [1.9]]])
    d = EntmaxCategorical(logits, alpha).expand((2, 3)).expand((5, 2, 3))
    assert d.batch_shape == (5, 2, 3)
    d.entropy().sum().backward()
    assert (alpha.grad != 0.0).all()
    assert torch.isfinite(logits.grad).all()


def test_independent_wraps_it():
    d = Independent(EntmaxCategorical(randn(3, 4)), 1)
    assert d.event_shape == (3,)
    value = d.sample((5,))
    torch.testing.assert_close(d.log_prob(value), d.base_dist.log_prob(value).sum(-1))


def test_repr_and_support(sparse: EntmaxCategorical):
    assert isinstance(sparse, Distribution)
    assert "EntmaxCategorical" in repr(sparse)
    assert "[2, 4]" in repr(sparse)
    assert sparse.num_outcomes == 4
    assert sparse.support.check(torch.tensor([0, 3, 4, -1])).tolist() == [True, True, False, False]


def test_probs_are_entmax_of_the_logits():
    logits = randn(2, 3, 4, 5)
    assert torch.equal(EntmaxCategorical(logits, 1.3).probs, entmax(logits, 1.3))


@pytest.mark.parametrize(("logits", "match"), [([0.0, math.nan, 1.0], "logits"), (1.0, "0-dim")])
def test_bad_logits(logits, match: str):
    with pytest.raises(ValueError, match=match):
        EntmaxCategorical(torch.tensor(logits), validate_args=True)


@pytest.mark.parametrize("logits", [[1.0, 2.0], None, torch.tensor([1, 2])])
def test_logits_of_the_wrong_type(logits):
    with pytest.raises(TypeError, match="floating-point tensor"):
        EntmaxCategorical(logits)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, torch.tensor(-2.0)])
def test_bad_alpha(alpha):
    with pytest.raises(ValueError, match="alpha"):
        EntmaxCategorical(torch.zeros(3), alpha)


@pytest.mark.parametrize("value", [-1, 4, 1.5])
def test_values_outside_the_outcomes(sparse: EntmaxCategorical, value: float):
    with pytest.raises(ValueError, match="support"):
        sparse.log_prob(torch.tensor([value, value]))


def test_values_of_the_wrong_shape(sparse: EntmaxCategorical):
    with pytest.raises(ValueError, match=r"shape|broadcast"):
        sparse.log_prob(torch.zeros(3, dtype=torch.long))


def test_validation_can_be_turned_off():
    d = EntmaxCategorical(torch.tensor([0.0, math.nan]), validate_args=False)
    assert d.probs.isnan().all()
    assert d.expand((2,))._validate_args is False


# ---------------------------------------------------------------------------------------------------------------
# alpha


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_alpha_one_is_torch_categorical(as_tensor: bool, scale: float, dtype: torch.dtype):
    logits, other = randn(4, 6, dtype=dtype) * scale, randn(4, 6, seed=1, dtype=dtype) * scale
    alpha = torch.tensor(1.0) if as_tensor else 1.0
    ours, expected = EntmaxCategorical(logits, alpha), Categorical(logits=logits)
    value = ours.enumerate_support()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(ours.probs, expected.probs, **tolerance)
    torch.testing.assert_close(ours.log_prob(value), expected.log_prob(value), **tolerance)
    torch.testing.assert_close(ours.entropy(), expected.entropy(), **tolerance)
    torch.testing.assert_close(
        kl_divergence(ours, EntmaxCategorical(other, alpha)),
        # In fp64: torch calls the divergence infinite as soon as a probability underflows.
        kl_divergence(Categorical(logits=logits.double()), Categorical(logits=other.double())).to(dtype),
        **tolerance,
    )
    assert torch.equal(ours.mode, expected.mode)


def test_alpha_one_has_the_gradient_of_torch_categorical():
    ours, theirs = leaf(randn(4, 6)), leaf(randn(4, 6))
    value = torch.tensor([0, 1, 2, 3])
    EntmaxCategorical(ours, 1.0).log_prob(value).sum().backward()
    Categorical(logits=theirs).log_prob(value).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("alpha_shape", [(), (1,), (3, 1), (1, 3, 1), (2, 1, 1), (2, 3, 1)])
def test_alpha_per_distribution(alpha_shape: tuple[int, ...]):
    logits = randn(2, 3, 5)
    alpha = 1.0 + torch.rand(alpha_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    d = EntmaxCategorical(logits, alpha)
    values = alpha.expand(2, 3, 1)
    for i in range(2):
        for j in range(3):
            single = EntmaxCategorical(logits[i, j], values[i, j].item())
            torch.testing.assert_close(d.probs[i, j], single.probs)
            torch.testing.assert_close(d.entropy()[i, j], single.entropy())


def test_minus_infinity_is_an_outcome_that_cannot_happen():
    logits = torch.tensor([[0.2, -INF, 0.1], [-INF, -INF, 0.0]], dtype=torch.float64)
    d = EntmaxCategorical(logits, 1.2, validate_args=True)
    assert torch.equal(d.support_mask, logits > -INF)
    short = EntmaxCategorical(logits[0, [0, 2]], 1.2)
    torch.testing.assert_close(d.probs[0, [0, 2]], short.probs)
    torch.testing.assert_close(d.entropy()[0], short.entropy())
    assert d.entropy()[1] == 0.0
    assert not (d.sample((500,))[:, 0] == 1).any()
    assert (d.sample((500,))[:, 1] == 2).all()
