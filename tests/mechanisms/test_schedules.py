"""What moves in the course of training: where it is, and that a moved mechanism computes what it should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tamis.mechanisms import ASEntmaxAttention, EntmaxAttention, LearnedAlpha, Ramp, ReLAttention, SoftmaxAttention
from tamis.mechanisms.schedules import distance_from_sparsest, press


def heads(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_a_ramp_is_a_straight_line_between_two_steps():
    ramp = Ramp(start=1.0, target=0.5, begin=10, end=20)
    assert [ramp.at(step) for step in (0, 1, 10, 15, 20, 21)] == [1.0, 1.0, 1.0, 0.75, 0.5, 0.5]
    sudden = Ramp(start=0.0, target=0.1, begin=7, end=7)
    assert [sudden.at(step) for step in (6, 7)] == [0.0, 0.1]
    with pytest.raises(ValueError, match="begin=3 and end=2"):
        Ramp(start=0.0, target=1.0, begin=3, end=2)


@pytest.mark.parametrize("slope", [1.0, 0.3])
def test_rela_on_its_way_is_leaky(slope: float):
    q, k, v = (x.requires_grad_() for x in heads())
    mechanism = ReLAttention(8, 2, bias=0.1).double()
    mechanism.move("slope", slope)
    expected = F.leaky_relu(q @ k.mT / 2.0 + 0.1, slope)
    torch.testing.assert_close(mechanism.weights(q, k), expected, rtol=0, atol=1e-6)
    out = mechanism(q, k, v)
    torch.testing.assert_close(out, expected @ v, rtol=0, atol=1e-6)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for found, wanted in zip(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(expected @ v, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_at_its_end_rela_is_the_rectifier_to_the_bit():
    q, k, v = heads()
    mechanism = ReLAttention(8, 2)
    before = mechanism(q, k, v)
    mechanism.move("slope", 0.5)
    assert not mechanism.at_rest
    assert not torch.equal(mechanism(q, k, v), before)
    mechanism.move("slope", 0.0)
    assert mechanism.at_rest
    assert torch.equal(mechanism(q, k, v), before)
    assert torch.equal(mechanism.weights(q, k), (q @ k.mT / 2.0).relu())


@pytest.mark.parametrize("make", [lambda: EntmaxAttention(2, 1.5), lambda: ASEntmaxAttention(8, 2)])
def test_alpha_goes_from_softmax_to_what_was_built(make):
    q, k, _ = heads()
    mechanism = make().double()
    hidden = torch.zeros(2, 5, 8, dtype=torch.float64)
    built = mechanism.weights(q, k, hidden=hidden)
    mechanism.move("alpha", 1.0)
    scaled, _ = mechanism.resolve(q, k, hidden, {})
    dense = mechanism.weights(q, k, hidden=hidden)
    torch.testing.assert_close(dense, (scaled @ k.mT / 2.0).softmax(-1), rtol=0, atol=1e-7)
    mechanism.move("alpha", 1.5)
    torch.testing.assert_close(mechanism.weights(q, k, hidden=hidden), built, rtol=0, atol=1e-7)
    assert (built == 0.0).any()
    assert not (dense == 0.0).any()


def test_no_file_has_what_was_moved_and_what_cannot_move_says_nothing():
    mechanism = ReLAttention(8, 2)
    names = set(mechanism.state_dict())
    mechanism.move("slope", 0.5)
    assert set(mechanism.state_dict()) == names
    for still in (SoftmaxAttention(), EntmaxAttention(2), ReLAttention(8, 2, activation="gelu")):
        assert still.movable() == {}


def test_compiled_code_sees_where_it_is():
    """The value is read, not baked in: nothing is compiled again on the way."""
    q, k, v = heads()
    mechanism = ReLAttention(8, 2)
    mechanism.move("slope", 1.0)
    counter = CompileCounter()
    compiled = torch.compile(lambda *args: mechanism(*args), backend=counter)
    for slope in (1.0, 0.6, 0.2):
        mechanism.move("slope", slope)
        expected = F.leaky_relu(q @ k.mT / 2.0, slope) @ v
        torch.testing.assert_close(compiled(q, k, v), expected, rtol=0, atol=1e-6)
    once = counter.frame_count
    mechanism.move("slope", 0.4)
    compiled(q, k, v)
    assert counter.frame_count == once
    torch._dynamo.reset()


def test_pressure_adds_its_gradient_to_that_of_the_loss():
    alphas = [LearnedAlpha(3, init=1.25), LearnedAlpha(1, init=1.5)]
    assert distance_from_sparsest(alphas).item() == pytest.approx((3 * 0.75 + 0.5) / 4)
    alphas[0].raw.grad = torch.ones(3)
    kept = alphas[0].raw.grad
    press(alphas, 2.0)
    slope = 0.25 * 0.75  # of the sigmoid at alpha 1.25
    torch.testing.assert_close(alphas[0].raw.grad, torch.full((3,), 1.0 - 2.0 * slope / 4))
    assert alphas[0].raw.grad is kept
    torch.testing.assert_close(alphas[1].raw.grad, torch.tensor([-2.0 * 0.25 / 4]))
