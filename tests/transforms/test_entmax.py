"""Weights: against oracles, against the conditions that define them, and on every shape, dtype and special value."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp
from torch import Tensor

import tamis
from oracles import (
    entmax15_by_sorting,
    entmax_by_bisection,
    entmax_exact,
    entmax_mp,
    multiplier_gap,
    sparsemax_by_sorting,
)
from transforms.cases import INF, L1_FP32, L1_FP64, MASS_FP32, REGIMES, l1, mass_error

ALPHAS = (0.5, 0.9, 1.0, 1.0 + 1e-6, 1.0001, 1.001, 1.01, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0, 10.0, 64.0)
SPARSE_ALPHAS = tuple(alpha for alpha in ALPHAS if alpha > 1.0)

bounded = settings(derandomize=True, deadline=None, max_examples=100, database=None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------------------------
# The oracles themselves


@pytest.mark.parametrize("alpha", ALPHAS)
def test_exact_oracle_is_optimal(alpha: float) -> None:
    for row in small_rows(alpha).values():
        for scores in row.tolist():
            weights = entmax_mp(scores, alpha, digits=50)
            with mp.workdps(60):
                assert abs(mp.fsum(weights) - 1) < 1e-49
            assert multiplier_gap(scores, weights, alpha, tiny=1e-300) < 1e-40


def test_oracles_agree_with_each_other() -> None:
    z = torch.randn(6, 9)
    exact = {alpha: entmax_exact(z, alpha) for alpha in (1.0001, 1.3, 1.5, 2.0, 2.5)}
    assert l1(sparsemax_by_sorting(z), exact[2.0]) < 1e-14
    assert l1(entmax15_by_sorting(z), exact[1.5]) < 1e-14
    for alpha, weights in exact.items():
        assert l1(entmax_by_bisection(z, alpha), weights) < 1e-11


# ---------------------------------------------------------------------------------------------------------------
# Exactness


def small_rows(alpha: float) -> dict[str, Tensor]:
    """fp32 rows of 9 scores, among them rows at the edge of the support for this alpha."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4, 9, generator=generator)
    power = alpha - 1.0
    edge = 3.0**-power / power if power > 0.0 else 1.0  # below three equal scores, where a fourth gets its first weight
    ladder = torch.arange(9, dtype=torch.float32)
    return {
        "normal": normal,
        "scale 1e-6": 1e-6 * normal,
        "scale 1e-3": 1e-3 * normal,
        "scale 30": 30.0 * normal,
        "scale 1e4": 1e4 * normal,
        "equal": torch.full((1, 9), -0.7),
        "ties": torch.tensor([[1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.0, -3.0]]),
        "one ulp apart": (1.0 + ladder * 2.0**-23).unsqueeze(0),
        "one dominant": (-10.0 * ladder).unsqueeze(0),
        "one above near ties": torch.cat([torch.zeros(1), -0.9 + 1e-4 * ladder[:8]]).unsqueeze(0),
        "edge": torch.tensor([[0.0] * 3 + [-edge * (1.0 + 1e-4 * step) for step in range(-3, 3)]]),
        "offset 1e4": normal + 1e4,
        "offset -1e4": 0.1 * normal - 1e4,
        "with -inf": normal.index_fill(-1, torch.tensor([0, 4, 8]), -INF),
    }


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", small_rows(1.5))
def test_small_rows_match_the_exact_weights(alpha: float, kind: str) -> None:
    z = small_rows(alpha)[kind]
    exact = entmax_exact(z, alpha)
    assert l1(tamis.entmax(z, alpha), exact) <= L1_FP32
    assert l1(tamis.entmax(z.double(), alpha), exact) <= L1_FP64


@pytest.mark.parametrize("alpha", ALPHAS)
def test_tensor_alpha_matches_the_exact_weights(alpha: float) -> None:
    z = torch.randn(5, 9)
    rounded = torch.tensor(alpha)
    assert l1(tamis.entmax(z, rounded), entmax_exact(z, rounded.item())) <= L1_FP32
    precise = torch.tensor(alpha, dtype=torch.float64)
    assert l1(tamis.entmax(z, precise), entmax_exact(z, alpha)) <= L1_FP32


@cache
def wide_rows(n: int) -> dict[str, Tensor]:
    """fp32 rows (n) with every shape of score that has troubled a solver."""
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator)
    jitter = torch.rand(n, generator=generator)
    rows = {f"scale {scale:g}": scale * normal for scale in (1e-6, 1e-3, 1.0, 10.0, 1e4)}
    rows["equal"] = torch.full((n,), 0.37)
    rows["two values"] = torch.where(normal > 0.5, 1.0, 0.25)
    rows["line"] = torch.linspace(-1.0, 0.0, n)
    rows["heavy tails"] = normal / (jitter + 1e-3)
    rows["one dominant"] = normal.index_fill(-1, torch.tensor([n // 2]), 1e3)
    for gap in (1e-3, 0.5, 0.9, 0.99, 1.9, 5.0):
        flat = torch.full((n,), -gap).index_fill(-1, torch.tensor([n // 2]), 0.0)
        rows[f"one {gap:g} above ties"] = flat
        rows[f"one {gap:g} above near ties"] = flat + 1e-4 * jitter
    for offset in (100.0, 1e4, -1e4):
        rows[f"offset {offset:g}"] = normal + offset
        rows[f"offset {offset:g}, narrow"] = 0.05 * normal + offset
        for gap in (0.9, 0.999, 1.999):
            rows[f"offset {offset:g}, one {gap:g} above ties"] = torch.where(
                normal == normal.amax(), offset, offset - gap
            )
    return rows


@pytest.mark.parametrize("n", [200, 8192])
@pytest.mark.parametrize("alpha", [1.001, 1.1, 1.25, 1.5, 1.75, 2.0])
def test_wide_rows_match_float64(alpha: float, n: int) -> None:
    z = torch.stack(list(wide_rows(n).values()))
    # The solution for the differences as fp32 has them: next to thousands of near ties, half a unit in each of them
    # (which is a smaller change than that of the scores to their neighbours) is worth 1e-4 of weight in all.
    d = z - z.amax(-1, keepdim=True)
    if alpha == 2.0:
        expected = sparsemax_by_sorting(d)
    else:
        expected = entmax15_by_sorting(d) if alpha == 1.5 else entmax_by_bisection(d, alpha)
    distance = (tamis.entmax(z, alpha).double() - expected).abs().sum(-1).nan_to_num(INF, INF)
    wrong = {kind: d for kind, d in zip(wide_rows(n), distance.tolist(), strict=True) if d > L1_FP32}
    assert not wrong


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_sum_to_one_at_every_width(alpha: float) -> None:
    wrong = {}
    for n in (1, 2, 7, 63, 128, 135, 1000, 4097):
        rows = wide_rows(n)
        together = tamis.entmax(torch.stack(list(rows.values())), alpha)
        for i, (kind, row) in enumerate(rows.items()):
            alone = tamis.entmax(row, alpha) if n == 135 else together[i]
            errors = mass_error(together[i]), mass_error(alone)
            if max(errors) > MASS_FP32:
                wrong[n, kind] = errors
    assert not wrong


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_sum_to_one_at_131072(alpha: float) -> None:
    hardest = ("scale 1", "equal", "one 0.9 above ties", "one 0.9 above near ties", "offset 10000, narrow")
    rows = {kind: row for kind, row in wide_rows(131072).items() if kind in hardest}
    assert len(rows) == len(hardest)
    p = tamis.entmax(torch.stack(list(rows.values())), alpha)
    wrong = {kind: mass_error(row) for kind, row in zip(rows, p, strict=True) if mass_error(row) > MASS_FP32}
    assert not wrong


@pytest.mark.parametrize("magnitude", [1e6, 1e7, 1e8, 1e20, 3e38])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.3, 1.5, 2.0, 3.0, 64.0])
def test_scores_of_any_finite_size(alpha: float, magnitude: float) -> None:
    z = magnitude * torch.tensor([[1.0, 0.0, -1.0], [-1.0, -0.5, -0.5], [1.0, 1.0, 0.5]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    assert l1(tamis.entmax(z, alpha), expected) <= L1_FP32


@pytest.mark.parametrize("alpha", [2.25, 2.5, 3.0, 4.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_exactly_at_the_edge_in_a_batch(alpha: float, dtype: torch.dtype) -> None:
    """Rows whose lowest scores lie where the last weight reaches zero, next to rows that take longer to solve."""
    power = alpha - 1.0
    shares = torch.rand(200, 3, dtype=torch.float64)
    shares /= shares.sum(-1, keepdim=True)
    z = torch.zeros(200, 8, dtype=dtype)
    z[:, :3] = (shares**power / power).to(dtype)
    p = tamis.entmax(z, alpha)
    assert mass_error(p) <= MASS_FP32
    assert l1(p[:10], entmax_exact(z[:10], alpha)) <= L1_FP32


@pytest.mark.parametrize("alpha", [*REGIMES, 10.0])
def test_a_row_does_not_depend_on_its_batch(alpha: float) -> None:
    z = torch.cat([torch.randn(40, 160) * 10.0 ** torch.linspace(-4.0, 3.0, 40).unsqueeze(-1), torch.zeros(1, 160)])
    assert l1(tamis.entmax(z, alpha), torch.stack([tamis.entmax(row, alpha) for row in z])) <= L1_FP32


def test_blocks_of_rows_leave_no_seam() -> None:
    z = torch.randn(700, 400)  # more than one block
    assert l1(tamis.entmax(z), entmax15_by_sorting(z)) <= L1_FP32


# ---------------------------------------------------------------------------------------------------------------
# Theory


@pytest.mark.parametrize("alpha", SPARSE_ALPHAS)
def test_zeros_are_exact(alpha: float) -> None:
    margin = 1.0 / (alpha - 1.0)
    z = torch.tensor([0.0, -1.001 * margin, -2.0 * margin])
    assert tamis.entmax(z, alpha).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_zero_at_the_very_margin(alpha: float) -> None:
    z = torch.tensor([3.0, 3.0 - 1.0 / (alpha - 1.0)])
    assert tamis.entmax(z, alpha).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("alpha", [1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0, 10.0])
def test_the_support_is_that_of_the_exact_weights(alpha: float) -> None:
    z = torch.randn(12, 9) * torch.tensor([0.1, 1.0, 3.0]).repeat(4).unsqueeze(-1)
    exact = entmax_exact(z, alpha)
    clear = (exact == 0.0) | (exact > 1e-30)
    assert (exact == 0.0).any()
    assert torch.equal((tamis.entmax(z, alpha) > 0.0)[clear], (exact > 0.0)[clear])


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_no_zeros_up_to_alpha_one(alpha: float) -> None:
    assert (tamis.entmax(10.0 * torch.randn(20, 30), alpha) > 0.0).all()


@pytest.mark.parametrize("one", [1.0, torch.tensor(1.0), torch.ones(50, 1)], ids=["float", "scalar", "per row"])
@pytest.mark.parametrize("n", [1, 5, 200, 5000])
def test_alpha_one_is_softmax(one: float | Tensor, n: int) -> None:
    z = 5.0 * torch.randn(50, n)
    torch.testing.assert_close(tamis.entmax(z, one), torch.softmax(z.double(), -1).float(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("alpha", [1.0 - 1e-4, 1.0 - 1e-6, 1.0 - 1e-9, 1.0 + 1e-9, 1.0 + 1e-6, 1.0 + 1e-4])
def test_softmax_is_the_limit_from_both_sides(alpha: float) -> None:
    z = torch.randn(20, 30, dtype=torch.float64)
    distance = l1(tamis.entmax(z, alpha), torch.softmax(z, -1))
    assert 1e-2 * abs(alpha - 1.0) < distance < 10.0 * abs(alpha - 1.0)


@pytest.mark.parametrize("boundary", [1.0, 1.125, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_jumps_where_the_solver_changes_form(boundary: float, dtype: torch.dtype) -> None:
    z = torch.randn(20, 200, dtype=dtype)
    step = 1e-9
    below, at, above = (tamis.entmax(z, boundary + shift) for shift in (-step, 0.0, step))
    tolerance = L1_FP32 if dtype == torch.float32 else 100.0 * step
    assert l1(below, at) <= tolerance
    assert l1(at, above) <= tolerance


def test_named_functions_are_entmax() -> None:
    z = torch.randn(4, 7)
    assert torch.equal(tamis.sparsemax(z, 0), tamis.entmax(z, 2.0, 0))
    assert torch.equal(tamis.entmax15(z, 0), tamis.entmax(z, 1.5, 0))
    assert torch.equal(tamis.entmax(z), tamis.entmax15(z))


scores = st.floats(-30.0, 30.0, allow_subnormal=False)
rows = st.one_of(
    st.lists(scores, min_size=1, max_size=12),
    st.lists(st.integers(-8, 8).map(lambda k: k / 8.0), min_size=1, max_size=12),
    st.lists(st.floats(-1e-3, 1e-3, allow_subnormal=False), min_size=2, max_size=12),
)
alphas = st.one_of(st.sampled_from(ALPHAS), st.floats(0.2, 3.0), st.floats(0.999, 1.001), st.floats(3.0, 20.0))


@bounded
@given(row=rows, alpha=alphas)
def test_weights_are_optimal(row: list[float], alpha: float) -> None:
    z = torch.tensor(row, dtype=torch.float32)
    for dtype, tolerance, tiny in ((torch.float64, 1e-12, 1e-300), (torch.float32, 5e-6, 1e-36)):
        p = tamis.entmax(z.to(dtype), alpha)
        assert (p >= 0.0).all()
        assert mass_error(p) <= tolerance
        scale = 1.0 + z.abs().max().item()
        assert multiplier_gap(z.tolist(), p.tolist(), alpha, tiny) <= tolerance * scale


@bounded
@given(
    row=st.lists(st.integers(-192, 192).map(lambda k: k / 64.0), min_size=1, max_size=20),
    alpha=st.sampled_from(ALPHAS),
    shift=st.sampled_from([-65536.0, -10000.0, -1024.0, -1.0, 3.0, 512.0, 10000.0, 65536.0]),
)
def test_shifting_all_scores_changes_nothing(row: list[float], alpha: float, shift: float) -> None:
    z = torch.tensor(row)  # multiples of 1/64: the shifted scores are exact
    assert l1(tamis.entmax(z + shift, alpha), tamis.entmax(z, alpha)) <= L1_FP32


@bounded
@given(row=rows, alpha=alphas, data=st.data())
def test_permuting_scores_permutes_weights(row: list[float], alpha: float, data: st.DataObject) -> None:
    z = torch.tensor(row, dtype=torch.float64)
    order = torch.tensor(data.draw(st.permutations(range(len(row)))))
    torch.testing.assert_close(tamis.entmax(z[order], alpha), tamis.entmax(z, alpha)[order], rtol=1e-9, atol=1e-12)


@bounded
@given(row=rows, alpha=alphas)
def test_weights_keep_the_order_of_scores(row: list[float], alpha: float) -> None:
    z = torch.tensor(row, dtype=torch.float32)
    p = tamis.entmax(z, alpha)
    order = z.argsort()
    assert (p[order].diff() >= -1e-6 * p[order][1:]).all()
    for i, j in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if z[i] == z[j]:
            torch.testing.assert_close(p[i], p[j], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("n", [130, 3000])
@pytest.mark.parametrize("alpha", [*REGIMES, 10.0])
def test_order_and_ties_in_wide_rows(alpha: float, n: int) -> None:
    z = torch.randint(-40, 40, (8, n)) / 16.0
    p = tamis.entmax(z, alpha)
    ordered = p.gather(-1, z.argsort(-1))
    assert (ordered.diff(dim=-1) >= -1e-6 * ordered[:, 1:]).all()
    for value in z.unique():
        same = torch.where(z == value, p, math.nan)
        spread = same.nan_to_num(-INF).amax(-1) - same.nan_to_num(INF).amin(-1)
        assert (spread <= 1e-6 * same.nan_to_num(0.0).amax(-1)).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_entropy_falls_as_alpha_grows(dim: int) -> None:
    z = torch.randn(40, 40)
    largest = torch.stack([tamis.entmax(z, alpha, dim).amax(dim) for alpha in ALPHAS])
    assert (largest.diff(dim=0) >= -1e-6).all()


# ---------------------------------------------------------------------------------------------------------------
# Special values


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("n", [1, 4, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_special_rows_and_their_neighbours(alpha: float, n: int, dtype: torch.dtype) -> None:
    plain = torch.randn(3, n)
    z = torch.cat([plain, torch.randn(4, n)]).to(dtype)
    z[3] = -INF
    z[4, 0] = INF
    z[5, -1] = math.nan
    z[6, 0], z[6, -1] = math.nan, INF
    p = tamis.entmax(z, alpha)
    assert l1(p[:3], tamis.entmax(z[:3], alpha)) <= L1_FP32
    assert (p[3] == 0.0).all()
    assert p[4].tolist() == [1.0] + [0.0] * (n - 1)
    assert p[5].isnan().all()
    assert n == 1 or p[6].isnan().all()


@pytest.mark.parametrize("alpha", REGIMES)
def test_infinite_scores_share_the_weight(alpha: float) -> None:
    z = torch.tensor([[INF, 0.0, INF, -INF, 3e38], [INF] * 5, [-INF, -INF, -INF, -INF, INF]])
    expected = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0], [0.2] * 5, [0.0, 0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(tamis.entmax(z, alpha), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("n", [6, 200])
def test_minus_infinity_is_as_if_absent(alpha: float, n: int) -> None:
    z = torch.randn(5, n)
    z[:, ::3] = -INF
    p = tamis.entmax(z, alpha)
    kept = [i for i in range(n) if i % 3]
    assert (p[:, ::3] == 0.0).all()
    assert l1(p[:, kept], tamis.entmax(z[:, kept], alpha)) <= L1_FP32


@pytest.mark.parametrize("alpha", REGIMES)
def test_mask_is_minus_infinity(alpha: float) -> None:
    z = torch.randn(2, 3, 4, 6)
    mask = torch.rand(3, 1, 6) > 0.4
    mask[1] = False
    p = tamis.entmax(z, alpha, mask=mask)
    assert torch.equal(p, tamis.entmax(z.masked_fill(~mask, -INF), alpha))
    assert (p[:, 1] == 0.0).all()
    assert mass_error(p[:, [0, 2]]) <= MASS_FP32


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("poison", [math.nan, INF, 3e38])
def test_masked_scores_do_not_matter(alpha: float, poison: float) -> None:
    z = torch.randn(3, 5)
    mask = torch.tensor([True, True, False, True, False])
    assert torch.equal(tamis.entmax(z.masked_fill(~mask, poison), alpha, mask=mask), tamis.entmax(z, alpha, mask=mask))


def test_mask_along_another_dim() -> None:
    z = torch.randn(4, 5)
    mask = torch.tensor([True, False, True, True]).unsqueeze(-1)
    p = tamis.entmax(z, 1.5, 0, mask=mask)
    assert (p[1] == 0.0).all()
    assert mass_error(p.T) <= MASS_FP32


def test_wrong_scores_dims_and_masks_raise() -> None:
    z = torch.randn(2, 3)
    with pytest.raises(TypeError, match="input must be a floating-point tensor"):
        tamis.entmax(torch.ones(3, dtype=torch.long))
    for dim in (-3, 2):
        with pytest.raises(ValueError, match="dim must lie in"):
            tamis.entmax(z, 1.5, dim)
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        tamis.entmax(z, mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="does not broadcast"):
        tamis.entmax(z, mask=torch.ones(3, 2, dtype=torch.bool))


# ---------------------------------------------------------------------------------------------------------------
# Shapes and dtypes


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dim(alpha: float, dim: int) -> None:
    z = torch.randn(3, 4, 5)
    p = tamis.entmax(z, alpha, dim)
    assert p.shape == z.shape
    assert l1(p.movedim(dim, -1), tamis.entmax(z.movedim(dim, -1).contiguous(), alpha)) <= 1e-6


@pytest.mark.parametrize("alpha", REGIMES)
def test_strided_scores(alpha: float) -> None:
    base = torch.randn(10, 12, 14)
    for view in (base[::2, ::3, ::2], base.transpose(0, 2), base[:, :, :1].expand(10, 12, 7), base.permute(2, 0, 1)):
        before = view.clone()
        assert l1(tamis.entmax(view, alpha), tamis.entmax(view.contiguous(), alpha)) <= 1e-6
        assert torch.equal(view, before)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 3.0, torch.tensor(1.5)], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_empty_tensors(alpha: float | Tensor, shape: tuple[int, ...]) -> None:
    z = torch.empty(shape, requires_grad=True)
    for dim in range(len(shape)):
        p = tamis.entmax(z, alpha, dim)
        assert p.shape == z.shape
        assert p.dtype == z.dtype
        (gradient,) = torch.autograd.grad(p.sum(), z)
        assert gradient.shape == z.shape


@pytest.mark.parametrize("alpha", REGIMES)
def test_a_single_score_gets_everything(alpha: float) -> None:
    assert tamis.entmax(torch.tensor(-7.5), alpha).tolist() == 1.0
    assert tamis.entmax(torch.tensor(-INF), alpha).tolist() == 0.0
    assert tamis.entmax(torch.tensor(-7.5), alpha, 0).shape == ()
    assert tamis.entmax(torch.tensor(-7.5), torch.tensor(alpha)).shape == ()
    torch.testing.assert_close(tamis.entmax(torch.randn(4, 1, 3), alpha, 1), torch.ones(4, 1, 3), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 7, 700])
def test_dtype_is_kept_and_only_the_weights_are_rounded(alpha: float, dtype: torch.dtype, n: int) -> None:
    z = (4.0 * torch.randn(6, n)).to(dtype)
    for value in (alpha, torch.tensor(alpha)):
        p = tamis.entmax(z, value)
        assert p.dtype == dtype
        assert torch.equal(p, tamis.entmax(z.to(torch.promote_types(dtype, torch.float32)), value).to(dtype))


@pytest.mark.parametrize("alpha", REGIMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_beyond_its_resolution(alpha: float, dtype: torch.dtype) -> None:
    z = (torch.randn(5, 64) * 50.0 + 300.0).to(dtype)
    p = tamis.entmax(z.float(), alpha)
    assert mass_error(p) <= MASS_FP32
    assert torch.equal(tamis.entmax(z, alpha), p.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [1.5, torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16)], ids=str)
def test_autocast_gives_what_softmax_gives(dtype: torch.dtype, alpha: float | Tensor) -> None:
    z = torch.randn(3, 6).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        p = tamis.entmax(z, alpha)
        expected = torch.softmax(z, -1).dtype
    assert p.dtype == (torch.float32 if dtype in (torch.bfloat16, torch.float16) else expected)
    torch.testing.assert_close(p, tamis.entmax(z.to(p.dtype), alpha))
    (gradient,) = torch.autograd.grad(p[..., 0].sum(), z)
    assert gradient.dtype == dtype
