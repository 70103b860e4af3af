"""Positions against formulas and lists written here a second time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from tamis.nn import Attention
from tamis.positions import NAPE, ALiBi, LearnedPositions, NoPE, Position, RoPE, Sinusoidal

HALF = (torch.float16, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------------------------------------------------
# Sinusoidal


@pytest.mark.parametrize(("width", "base"), [(2, 10000.0), (16, 10000.0), (64, 10000.0), (16, 500.0)])
def test_sinusoidal_is_the_formula(width: int, base: float):
    places = [0, 1, 2, 7, 100, 999]
    table = Sinusoidal(width, base).table(torch.tensor(places))
    for row, place in zip(table, places, strict=True):
        for i in range(width // 2):
            angle = place / base ** (2 * i / width)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=2e-4)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=2e-4)


def test_sinusoidal_is_added_in_the_dtype_of_the_input():
    position = Sinusoidal(8)
    x = normal(2, 3, 8)
    torch.testing.assert_close(
        position.embed(x, torch.arange(3)[None]) - x, position.table(torch.arange(3))[None] + 0 * x
    )
    for dtype in (*HALF, torch.float64):
        assert position.to(dtype).embed(x.to(dtype), torch.arange(3)[None]).dtype == dtype
    half = Sinusoidal(8).bfloat16().embed(torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.tensor([[1001]]))
    assert torch.equal(half[0, 0], position.float().table(torch.tensor([1001]))[0].bfloat16())


# ---------------------------------------------------------------------------------------------------------------
# Rotary


def rotated(x: Tensor, places: Tensor, base: float, scaling: float) -> Tensor:
    """Pairs (x_i, x_(i + d/2)) as complex numbers, turned by pos / (scaling base^(2i / d))."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    rates = torch.tensor([1.0 / (scaling * base ** (2.0 * i / x.shape[-1])) for i in range(half)]).double()
    turned = pairs * torch.exp(1j * places.double()[:, None, :, None] * rates)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize(("base", "scaling"), [(10000.0, 1.0), (500000.0, 1.0), (10000.0, 4.0), (100.0, 0.5)])
@pytest.mark.parametrize("places", [[[0, 1, 2, 3, 4]], [[0, 0, 1, 2, 3], [5, 9, 17, 100, 200]]])
def test_rope_is_a_complex_rotation(base: float, scaling: float, places: list[list[int]]):
    x, positions = normal(2, 3, 5, 8), torch.tensor(places)
    out = RoPE(8, base, scaling).rotate(x, positions)
    torch.testing.assert_close(out.double(), rotated(x, positions, base, scaling), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_rope_turns_heads_of_its_own_size_only():
    with pytest.raises(ValueError, match="RoPE was built for head_dim=8, got heads of 4"):
        RoPE(8).rotate(normal(1, 2, 3, 4), torch.arange(3))


def test_rope_at_position_zero_changes_nothing():
    x = normal(1, 2, 1, 8)
    assert torch.equal(RoPE(8).rotate(x, torch.tensor([[0]])), x)


@pytest.mark.parametrize("shift", [1, 17, 300])
def test_rope_scores_depend_on_distance_only(shift: int):
    rope, query, key = RoPE(16), normal(1, 2, 6, 16, seed=1), normal(1, 2, 6, 16, seed=2)
    places = torch.arange(6)[None]
    here = rope.rotate(query, places) @ rope.rotate(key, places).mT
    there = rope.rotate(query, places + shift) @ rope.rotate(key, places + shift).mT
    torch.testing.assert_close(there, here, atol=2e-4, rtol=2e-4)
    moved = rope.rotate(query, places + shift) @ rope.rotate(key, places).mT
    assert (moved - here).abs().max() > 0.1


def test_rope_scaling_stretches_positions():
    x, places = normal(1, 2, 4, 8), torch.tensor([[0, 4, 8, 12]])
    torch.testing.assert_close(RoPE(8, scaling=4.0).rotate(x, places), RoPE(8).rotate(x, places // 4))


@pytest.mark.parametrize("dtype", HALF)
def test_rope_turns_in_fp32(dtype: torch.dtype):
    """Position 4097 is no bf16 number: angles must not be computed in half."""
    x, places = normal(1, 1, 3, 8, dtype=dtype), torch.tensor([[257, 4097, 2049]])
    out = RoPE(8).to(dtype).rotate(x, places)
    assert out.dtype == dtype
    assert torch.equal(out, RoPE(8).rotate(x.float(), places).to(dtype))


def test_rope_has_nothing_to_save_or_learn():
    assert RoPE(8).state_dict() == {}
    assert list(RoPE(8).parameters()) == []


# ---------------------------------------------------------------------------------------------------------------
# Slopes

# Press, Smith and Lewis: 1/2 ... 1/256 for eight heads; for twelve, the eight and every second of sixteen.
PUBLISHED = {
    1: [0.00390625],
    2: [0.0625, 0.00390625],
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
    12: [
        *(0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625),
        *(0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849),
    ],
    3: [0.0625, 0.00390625, 0.25],
}


@pytest.mark.parametrize("heads", PUBLISHED)
def test_alibi_slopes_are_the_published_ones(heads: int):
    slopes = ALiBi(heads).slopes()
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(PUBLISHED[heads]), atol=0.0, rtol=1e-7)


@pytest.mark.parametrize("heads", [1, 5, 8])
def test_harmonic_slopes(heads: int):
    torch.testing.assert_close(ALiBi(heads, "harmonic").slopes(), torch.tensor([1.0 / k for k in range(1, heads + 1)]))


def test_nape_is_half_harmonic_half_nothing():
    position = NAPE(8)
    torch.testing.assert_close(position.slopes(), torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4, 0.0, 0.0, 0.0, 0.0]))
    assert position.scaled_heads().tolist() == [False] * 4 + [True] * 4
    assert ALiBi(8).scaled_heads() is None


@pytest.mark.parametrize("position", [ALiBi(12), NAPE(6)], ids=["alibi", "nape"])
def test_slopes_are_not_saved(position: Position):
    assert position.state_dict() == {}
    assert list(position.parameters()) == []


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("make", [lambda: ALiBi(12), lambda: NAPE(6)], ids=["alibi", "nape"])
def test_a_cast_to_half_keeps_the_slopes(make: Any, dtype: torch.dtype):
    """1/3 in bf16 is off by 0.2 %: at a distance of 1000 the bias would be off by 0.65."""
    expected = make().slopes()
    slopes = make().to(dtype).slopes()
    assert torch.equal(slopes.float(), expected)


@pytest.mark.parametrize("kind", ["geometric", "harmonic"])
def test_alibi_in_a_layer_is_the_bias_of_the_formula(kind: str):
    torch.manual_seed(0)
    position = ALiBi(4, kind)
    layer, x = Attention(16, 4, position=position), normal(2, 5, 16)
    query, key = (f(x).view(2, 5, 4, 4).transpose(1, 2) for f in (layer.q_proj, layer.k_proj))
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    scores = query @ key.mT / 2.0 - position.slopes()[:, None, None] * distance
    torch.testing.assert_close(layer.weights(x), scores.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda: ALiBi(4), lambda: NAPE(4), lambda: RoPE(4)], ids=["alibi", "nape", "rope"])
def test_a_layer_compares_the_positions_it_is_given(make: Any):
    """Tokens at positions 0, 2, 4 are twice as far apart as at 0, 1, 2, per batch."""
    torch.manual_seed(0)
    layer, x = Attention(16, 4, position=make()), normal(2, 9, 16)
    full = layer.weights(x)  # whose rows and columns 0, 2, ... 8 are what the sparse positions should give
    full = full[..., ::2, ::2] / full[..., ::2, ::2].sum(-1, keepdim=True)
    positions = torch.arange(0, 9, 2).expand(2, -1)
    torch.testing.assert_close(layer.weights(x[:, ::2], positions=positions), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [lambda: ALiBi(4), lambda: NAPE(4), lambda: RoPE(4)], ids=["alibi", "nape", "rope"])
def test_a_common_shift_of_positions_changes_nothing(make: Any):
    torch.manual_seed(0)
    layer, x = Attention(16, 4, position=make()), normal(2, 5, 16)
    positions = torch.arange(5) + torch.tensor([[3], [40]])
    torch.testing.assert_close(
        layer(x, positions=positions, is_causal=True), layer(x, is_causal=True), atol=1e-5, rtol=1e-4
    )


# ---------------------------------------------------------------------------------------------------------------
# Learned


def test_learned_positions_are_rows_of_a_table():
    torch.manual_seed(0)
    position = LearnedPositions(8, 50)
    assert position.weight.std().item() == pytest.approx(0.02, rel=0.15)
    x, places = normal(2, 3, 8), torch.tensor([[0, 1, 2], [7, 49, 0]])
    out = position.embed(x, places)
    for b in range(2):
        for i in range(3):
            assert torch.equal(out[b, i], x[b, i] + position.weight[places[b, i]])
    out.sum().backward()
    assert position.weight.grad[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 7, 49]


@pytest.mark.parametrize("places", [[[0, 1, 2, 3]], [[3]], [[0, 7]]])
def test_a_position_beyond_the_learned_ones_is_an_error(places: list[list[int]]):
    """Also the single new position of a cached step, where a CUDA index error would kill the process."""
    position, positions = LearnedPositions(8, 3), torch.tensor(places)
    with pytest.raises(ValueError, match="learned"):
        position.embed(torch.zeros(1, positions.shape[1], 8), positions)


def test_more_tokens_than_learned_positions_are_fine_if_positions_repeat():
    """Documents packed end to end, or left padding, count from 0 again."""
    position, positions = LearnedPositions(8, 3), torch.tensor([[0, 1, 2, 0, 1, 2]])
    out = position.embed(torch.zeros(1, 6, 8), positions)
    assert torch.equal(out[0, 3:], position.weight)


# ---------------------------------------------------------------------------------------------------------------
# The interface


@pytest.mark.parametrize(
    "position",
    [NoPE(), Sinusoidal(8), RoPE(4), ALiBi(2), NAPE(2), LearnedPositions(8, 9)],
    ids=lambda position: type(position).__name__,
)
def test_each_does_one_thing_and_leaves_the_rest(position: Position):
    x, heads, places = normal(1, 3, 8), normal(1, 2, 3, 4), torch.tensor([[1, 2, 3]])
    does = {
        "embed": position.embed(x, places) is not x,
        "rotate": position.rotate(heads, places) is not heads,
        "slopes": position.slopes() is not None,
    }
    expected = {
        NoPE: set(),
        Sinusoidal: {"embed"},
        LearnedPositions: {"embed"},
        RoPE: {"rotate"},
        ALiBi: {"slopes"},
        NAPE: {"slopes"},
    }
    assert {name for name, done in does.items() if done} == expected[type(position)]
    assert type(position).__name__ in repr(position)


@pytest.mark.parametrize("position", [Sinusoidal(8), RoPE(8), LearnedPositions(8, 9)], ids=lambda p: type(p).__name__)
def test_positions_come_in_two_shapes(position: Position):
    """(L,) and (B or 1, L); three heads and three sequences, which (L,) must not be taken for."""
    apply = position.rotate if isinstance(position, RoPE) else position.embed
    x = normal(3, 3, 3, 8) if isinstance(position, RoPE) else normal(3, 3, 8)
    places = torch.tensor([0, 2, 5])
    for given in (places, places[None]):
        assert torch.equal(apply(x, given), apply(x, places.expand(3, -1)))
    for shape in ((), (2,), (2, 3), (3, 2), (3, 1), (1, 3, 3)):
        with pytest.raises(ValueError, match=r"positions must be \(3,\), \(1, 3\) or \(3, 3\), got"):
            apply(x, torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: Sinusoidal(7), "even"),
        (lambda: RoPE(5), "even"),
        (lambda: NAPE(3), "halves"),
        (lambda: ALiBi(4, "linear"), "geometric"),
        (lambda: ALiBi(0), "num_heads"),
        (lambda: NAPE(0), "num_heads|halves"),
        (lambda: RoPE(4, base=0.0), "base"),
        (lambda: RoPE(4, scaling=0.0), "scaling"),
    ],
)
def test_bad_arguments(construct: Any, message: str):
    with pytest.raises(ValueError, match=message):
        construct()


@pytest.mark.parametrize(("slope", "keys"), [(1, 2), (1 / 2, 4), (1 / 3, 5), (1 / 4, 6), (1 / 8, 9)])
def test_the_reach_of_a_sparse_head_where_contents_say_nothing(slope: float, keys: int) -> None:
    query = torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    slopes = torch.tensor([slope], dtype=torch.float64)
    weights = tamis.attention_weights(query, query, is_causal=True, alibi_slopes=slopes)
    assert (weights[0, 0, -1] > 0).nonzero().flatten().tolist() == list(range(64 - keys, 64))
