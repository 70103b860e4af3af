"""Dropout: the same forward and backward, and its own in every call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, EXACT, Case, call, every_function, leaf, randn, seeded
from tamis.attention import blocked, blocks
from tamis.functional import entmax_attention


def with_identity_values(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values under which the output is the weights."""
    query, key, _ = Case(queries=queries, keys=keys).inputs()
    return query, key, torch.eye(keys, dtype=torch.float64).expand(2, 4, keys, keys)


@every_function
@pytest.mark.parametrize("block", [200, 1 << 19])
def test_dropout_keeps_or_scales(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", block)
    inputs = with_identity_values(64, 64)
    plain = call(name, inputs)
    dropped = call(name, inputs, dropout_p=0.3, generator=seeded())
    kept = dropped != 0.0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.7, **EXACT)
    positive = plain > 0.0
    share = (kept & positive).sum() / positive.sum()
    assert abs(float(share) - 0.7) < 5.0 * math.sqrt(0.21 / float(positive.sum()))
    assert torch.equal(dropped, call(name, inputs, dropout_p=0.3, generator=seeded()))
    assert not torch.equal(dropped, call(name, inputs, dropout_p=0.3, generator=seeded(1)))
    if name == "softmax":  # every weight is positive: blocks must not repeat one another
        rows = kept.reshape(-1, 64)
        assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]


@every_function
def test_dropout_calls_differ_and_follow_the_global_seed(name: str) -> None:
    inputs = with_identity_values(9, 9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (call(name, inputs, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(0)
        again = call(name, inputs, dropout_p=0.5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@every_function
@pytest.mark.parametrize("generator", [False, True])
def test_dropout_of_nothing_and_of_everything(name: str, generator: bool) -> None:
    inputs = [leaf(x) for x in CASES["cross"].inputs()]
    drawn = seeded() if generator else None
    torch.testing.assert_close(call(name, inputs, dropout_p=0.0, generator=drawn), call(name, inputs), **EXACT)
    nothing = call(name, inputs, dropout_p=1.0, generator=drawn)
    assert bool((nothing == 0.0).all())
    assert all(bool((x == 0.0).all()) for x in torch.autograd.grad(nothing.sum(), inputs))


def test_no_dropout_draws_nothing() -> None:
    generator = seeded()
    before = generator.get_state()
    entmax_attention(*CASES["cross"].inputs(), generator=generator)
    assert torch.equal(generator.get_state(), before)


@every_function
@pytest.mark.parametrize("block", [200, 1 << 19])
@pytest.mark.parametrize("keep", [0, 1 << 25])
def test_dropout_gradient_uses_the_same_mask(name: str, block: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", block)
    monkeypatch.setattr(blocked, "_KEEP", keep)
    inputs = [leaf(x) for x in Case(heads=2, key_heads=1, queries=18, keys=7, dim=2, value_dim=2).inputs()]
    directions = [randn(*x.shape, seed=20 + i) for i, x in enumerate(inputs)]
    probe = randn(2, 2, 18, 2, seed=9)

    def loss(step: float) -> Tensor:
        moved = [x + step * d for x, d in zip(inputs, directions, strict=True)]
        options = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.4, "generator": seeded(3)}
        return (call(name, moved, **options) * probe).sum()

    gradients = torch.autograd.grad(loss(0.0), inputs)
    got = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        want = float(loss(1e-7) - loss(-1e-7)) / 2e-7
    assert got == pytest.approx(want, rel=1e-5)
