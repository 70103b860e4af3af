"""The solver of a fixed number of steps: the bound holds on rows made to break it, and the weights are right."""

import math

import pytest
import torch

from tamis.transforms.fixed import error_bound, fixed_entmax, steps_needed
from tamis.transforms.solver import solve_rows

POWERS = (1e-6, 1e-3, 0.02, 0.05, 0.124, 0.125, 0.3, 0.5, 0.75, 1.0)


def adversarial(n):
    """Rows of n scores that take many steps: one key above near-ties, clusters in geometric distance, ramps."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return torch.randn(n, generator=generator, dtype=torch.float64) * scale

    ramp = torch.linspace(-1, 0, n, dtype=torch.float64)
    rows = [normal(1), normal(5), normal(1e-4), torch.zeros(n, dtype=torch.float64), ramp, 2 * ramp, 8 * ramp**3]
    for gap in (0.1, 0.5, 0.9, 0.99, 0.999, 1.5, 1.9):
        rows += [torch.full((n,), -gap, dtype=torch.float64), -gap + normal(1e-4)]
        rows[-1][0] = rows[-2][0] = 0.0
    levels = torch.arange(1.0, 20.0, dtype=torch.float64)
    counts = (n * 0.5 ** (20.0 - levels)).long().clamp(min=1)  # twice as many at each level, each half as far
    for scale in (1.0, 2.0, 4.0, 8.0):
        cluster = torch.repeat_interleave(0.5**levels - 1.0, counts)[: n - 1]
        rows.append(torch.cat([torch.zeros(1), scale * cluster, torch.full((n - 1 - len(cluster),), -1e3)]).double())
    return torch.stack(rows)


def solved(z, e, steps, monkeypatch):
    monkeypatch.setattr("tamis.transforms.fixed.steps_needed", lambda *_: steps)
    return fixed_entmax(z[None, None], [e], z.shape[-1])[0, 0]


@pytest.mark.parametrize("width", [2, 3, 64, 1024])
@pytest.mark.parametrize("e", POWERS)
def test_the_bound_holds_after_every_step(e, width, monkeypatch):
    z = adversarial(width)
    exact, _ = solve_rows(z, e)
    for steps in range(1, steps_needed(e, width) + 1):
        error = (solved(z, e, steps, monkeypatch) - exact).abs().sum(-1).max().item()
        assert error <= error_bound(e, width, steps) + 1e-8  # the polynomial for log1p


@pytest.mark.parametrize("e", [0.3, 0.5, 1.0])
def test_fewer_steps_are_not_enough(e, monkeypatch):
    """Else the bound would say nothing: a third of its steps leaves an error that the tolerance does not allow."""
    z = adversarial(1024)
    exact, _ = solve_rows(z, e)
    error = (solved(z, e, steps_needed(e, 1024) // 3, monkeypatch) - exact).abs().sum(-1).max().item()
    assert error > 1e-6


def test_steps_grow_with_alpha_and_with_the_logarithm_of_the_width():
    found = [[steps_needed(e, width) for width in (16, 128, 1024, 8192)] for e in (0.05, 0.25, 0.5, 1.0)]
    assert found == [[5, 6, 6, 7], [7, 9, 10, 11], [9, 11, 13, 15], [12, 16, 19, 22]]
    assert steps_needed(0.0, 100) == steps_needed(0.5, 1) == 1


@pytest.mark.parametrize("arguments", [(1.1, 4), (-0.1, 4), (math.nan, 4), (0.5, 0), (0.5, 4, 0.0)])
def test_what_has_no_bound(arguments):
    with pytest.raises(ValueError, match="must"):
        steps_needed(*arguments)


def test_heads_of_every_form_masks_and_empty_rows():
    powers = [0.5, 0.0, 0.05, 1.0, 0.3, 1e-9]
    z = torch.randn(2, 6, 7, 33, generator=torch.Generator().manual_seed(1)) * 3
    z[:, :, :, 20:] = -math.inf
    z[0, :, 3] = -math.inf
    p = fixed_entmax(z, powers, 40)
    for head, e in enumerate(powers):
        exact, _ = solve_rows(z[:, head].reshape(-1, 33).double(), e)
        torch.testing.assert_close(p[:, head].reshape(-1, 33).double(), exact, rtol=0.0, atol=1e-6)
    assert (p[0, :, 3] == 0).all()
    assert (p[..., 20:] == 0).all()
    assert (p[:, [0, 2, 3, 4], :, :20] == 0).any()


def test_what_the_worst_of_these_rows_need(monkeypatch):
    """The figures of docs/models-that-travel.md."""
    z = adversarial(4096)
    needed = {}
    for e in (0.5, 1.0):
        exact, _ = solve_rows(z, e)
        proven = steps_needed(e, 4096)
        errors = [(solved(z, e, steps, monkeypatch) - exact).abs().sum(-1).max() for steps in range(1, proven + 1)]
        needed[e] = 1 + max(number for number, error in enumerate(errors, 1) if error > 1e-6), proven
        monkeypatch.undo()
    assert needed == {0.5: (5, 15), 1.0: (8, 21)}
