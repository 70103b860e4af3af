"""Dropout: the same forward and backward, and its own in every call."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, EXACT, Case, call, every_function, leaf, randn, seeded
from tamis.attention import blocked, blocks
from tamis.attention.blocked import Blocked
from tamis.attention.call import Dropout, Part, check_call
from tamis.attention.dense import Dense
from tamis.attention.dropout import NO_PARTS, Factors
from tamis.attention.rules import Softmax, bind
from tamis.attention.sdpa import Sdpa
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


def counted(seed: int, b: int, h: int, q: int, k: int) -> int:
    """The word of one weight, in Python's own integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    row = mixed((seed + 0x9E3779B97F4A7C15) % 2**64)
    for index, step in ((b, 0xBF58476D1CE4E5B9), (h, 0x94D049BB133111EB), (q, 0xD6E8FEB86659FD93)):
        row = mixed(row ^ index * step % 2**64)
    x = (k * 0x9E3779B9 + row) % 2**32
    for shift, factor, added in (
        (16, 0x7FEB352D, 0),
        (15, 0x846CA68B, 0),
        (16, 1, row >> 32),
        (17, 0xED5AD4BB, 0),
        (11, 0xAC4C1B51, 0),
        (15, 1, 0),
    ):
        x = ((x ^ x >> shift) * factor + added) % 2**32
    return x


def test_parts_of_a_call_drop_what_the_whole_does() -> None:
    seed, p = 2**61 + 12345, 0.3
    whole = Factors.draw(Dropout(p, None, Part(seed))).of(torch.empty(2, 4, 6, 70), 0)
    part = Factors.draw(Dropout(p, None, Part(seed, head=2, query=1)))
    assert torch.equal(part.of(torch.empty(1, 2, 3, 30), 9, (1, 0, 2, 40)), whole[1:, 2:, 3:, 40:])
    for place in [(0, 0, 0, 0), (1, 3, 5, 69), (0, 2, 1, 33), (1, 0, 4, 7)]:
        kept = counted(seed, *place) >= int(p * 2**32)
        assert whole[place] == (torch.tensor(1.0) / 0.7 if kept else 0.0)


def test_the_share_of_a_part_is_p() -> None:
    """Of all weights, and of neighbours in every direction together."""
    p = 0.3
    kept = Factors.draw(Dropout(p, None, Part(7))).of(torch.empty(4, 8, 64, 256), 0) > 0.0
    assert abs(kept.float().mean().item() - (1 - p)) < 3e-3  # a standard deviation is 6e-4
    for dim in range(4):
        length = kept.shape[dim]
        both = kept.narrow(dim, 0, length - 1) & kept.narrow(dim, 1, length - 1)
        assert abs(both.float().mean().item() - (1 - p) ** 2) < 3e-3
    assert not (Factors.draw(Dropout(1.0, None, Part(7))).of(torch.empty(1, 1, 8, 8), 0) > 0.0).any()


def test_backends_with_factors_of_their_own_leave_parts_to_others() -> None:
    call = check_call(*(torch.randn(1, 2, 8, 8) for _ in range(3)))
    part = dataclasses.replace(call, dropout=Dropout(0.5, None, Part(1)))
    assert Sdpa().obstacle(call, bind(Softmax(), call)) is None
    assert Sdpa().obstacle(part, bind(Softmax(), part)) == NO_PARTS
    blocked, dense = (backend.attend(part, bind(Softmax(), part)) for backend in (Blocked(), Dense()))
    torch.testing.assert_close(blocked, dense)
