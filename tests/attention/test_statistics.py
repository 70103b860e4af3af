"""Weights, sparse weights, statistics, counts and scores: all views of one matrix, computed here from the dense one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.attention import blocked, blocks
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.attention.statistics import sparse_weights
from tamis.functional import (
    SparseWeights,
    Statistics,
    attention,
    attention_scores,
    attention_statistics,
    attention_weights,
    attention_with_statistics,
    entmax_attention,
    sparse_attention_weights,
    visible_counts,
)

INF = math.inf
B, H, LQ, LK = 2, 4, 21, 25
FIELDS = ("support_size", "zero_share", "entropy", "null_share", "mean_distance")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(key_heads: int = H, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    query = randn(B, H, LQ, 4, dtype=dtype) * 2.0
    return query, randn(B, key_heads, LK, 4, seed=1, dtype=dtype), randn(B, key_heads, LK, 3, seed=2, dtype=dtype)


def some_inf() -> Tensor:
    mask = torch.where(randn(B, 1, LQ, LK, seed=3) > -0.5, randn(B, 1, LQ, LK, seed=4), -INF)
    mask[0, 0, 3] = -INF
    return mask


def rows_hidden() -> Tensor:
    mask = randn(H, LQ, LK, seed=5) > 0.0
    mask[:, 4:7] = False
    return mask


EVERYTHING = torch.ones(B, 1, LQ, LK, dtype=torch.bool)
CAUSAL = (torch.arange(LK) <= torch.arange(LQ)[:, None] + LK - LQ)[None, None]
AHEAD = torch.arange(LK) - (torch.arange(LQ)[:, None] + LK - LQ)

# Options, and who sees whom under them.
OPTIONS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, EVERYTHING),
    "causal": ({"is_causal": True}, CAUSAL),
    "bool": ({"attn_mask": rows_hidden()}, rows_hidden()),
    "additive": ({"attn_mask": some_inf(), "is_causal": True}, CAUSAL & (some_inf() > -INF)),
    "key_lengths": (
        {"key_lengths": torch.tensor([7, 0])},
        (torch.arange(LK) < torch.tensor([7, 0])[:, None])[:, None, None],
    ),
    "window": ({"window": (4, 1)}, ((AHEAD >= -4) & (AHEAD <= 1))[None, None]),
    "alibi": ({"alibi_slopes": torch.tensor([1.0, 0.5, 0.1, 0.0], dtype=torch.float64), "is_causal": True}, CAUSAL),
}
RULES: dict[str, Rule] = {
    "softmax": Entmax(1.0),
    "entmax": Entmax(1.5),
    "learned": Entmax(torch.tensor([1.05, 1.3, 1.7, 2.0])),
    "relu": Activation("relu", bias=-1.5),
    "leaky_relu": Activation("leaky_relu", per_count=True),
}

every_option = pytest.mark.parametrize("option", OPTIONS)
every_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(params=["one_block", "tiny_blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiny_blocks":
        monkeypatch.setattr(blocks, "_BLOCK", 200)
        monkeypatch.setattr(blocked, "_KEEP", 0)
    return request.param


def seen_by(option: str) -> Tensor:
    return OPTIONS[option][1].expand(B, H, LQ, LK)


def arguments(option: str, rule: str) -> dict[str, Any]:
    """Where -inf meets an activation that does not send it to 0 other tests fail already: mask by booleans there."""
    options = dict(OPTIONS[option][0])
    if option == "additive" and rule == "leaky_relu":
        options["attn_mask"] = some_inf() > -INF
    return options | {"rule": RULES[rule]}


# ---------------------------------------------------------------------------------------------------------------
# Dense weights, scores, counts


@every_option
@every_rule
def test_weights_times_values_are_the_output(option: str, rule: str) -> None:
    query, key, value = inputs(2)
    options = arguments(option, rule)
    weights = attention_weights(query, key, value, enable_gqa=True, **options)
    assert weights.shape == (B, H, LQ, LK)
    assert bool((weights[~seen_by(option)] == 0.0).all())
    out = attention(query, key, value, enable_gqa=True, **options)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out, rtol=0.0, atol=1e-12)
    if isinstance(options["rule"], Entmax):
        torch.testing.assert_close(weights.sum(-1), seen_by(option).any(-1).double(), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rule", ["entmax", "relu"])
def test_weights_are_at_least_fp32(dtype: torch.dtype, autocast: bool, rule: str) -> None:
    """Of the inputs as given: under autocast, of the inputs in its dtype."""
    query, key, _ = inputs(dtype=dtype)
    rounded = torch.bfloat16 if autocast and dtype != torch.float64 else dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weights = attention_weights(query, key, is_causal=True, rule=RULES[rule])
        sparse = sparse_attention_weights(query, key, is_causal=True, rule=RULES[rule])
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = attention_weights(query.to(rounded).double(), key.to(rounded).double(), is_causal=True, rule=RULES[rule])
    torch.testing.assert_close(weights.double(), exact, rtol=0.0, atol=2e-5)
    torch.testing.assert_close(sparse.to_dense().double(), exact, rtol=0.0, atol=2e-5)


def test_value_and_dropout_change_no_weights() -> None:
    query, key, value = inputs()
    expected = attention_weights(query, key)
    assert torch.equal(attention_weights(query, key, value * 3.0, None, 0.7), expected)


def test_weights_are_differentiable() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    probe = randn(B, H, LQ, 3, seed=9)
    through_weights = attention_weights(query, key, is_causal=True) @ value
    through_output = entmax_attention(query, key, value, is_causal=True)
    pairs = zip(
        torch.autograd.grad(through_weights, (query, key, value), probe),
        torch.autograd.grad(through_output, (query, key, value), probe),
        strict=True,
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-10)


@every_option
def test_scores_and_visibility(option: str) -> None:
    query, key, _ = inputs(2)
    options = OPTIONS[option][0]
    scores, seen = attention_scores(query, key, enable_gqa=True, scale=0.3, **options)
    assert scores.shape == seen.shape == (B, H, LQ, LK)
    assert seen.dtype == torch.bool
    assert torch.equal(seen, seen_by(option))
    expected = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(2, 1)) * 0.3
    if option == "additive":
        expected = expected + options["attn_mask"]
    if option == "alibi":
        expected = expected - options["alibi_slopes"].double()[:, None, None] * AHEAD.abs()
    torch.testing.assert_close(scores[seen_by(option)], expected[seen_by(option)], rtol=0.0, atol=1e-12)


def test_fp32_slopes_make_no_fp32_scores_of_fp64_inputs() -> None:
    query, key, _ = inputs()
    slopes = torch.tensor([1.0, 0.7, 0.1, 0.0])
    single, _ = attention_scores(query, key, alibi_slopes=slopes)
    double, _ = attention_scores(query, key, alibi_slopes=slopes.double())
    torch.testing.assert_close(single, double, rtol=0.0, atol=1e-12)


@every_option
def test_visible_counts(option: str) -> None:
    query, key, _ = inputs(2)
    counts = visible_counts(query, key, enable_gqa=True, **OPTIONS[option][0])
    assert counts.ndim == 3
    assert counts.shape[2] == LQ
    assert not counts.is_floating_point()
    assert torch.equal(counts.expand(B, H, LQ), seen_by(option).sum(-1))


def test_visible_counts_of_long_inputs() -> None:
    """More rows than are counted at a time."""
    x = torch.zeros(1, 1, 2500, 1)
    counts = visible_counts(x, x, is_causal=True, window=(99, 0))
    assert torch.equal(counts[0, 0], torch.arange(1, 2501).clamp(max=100))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_visible_counts_of_nothing(sizes: tuple[int, int], is_causal: bool) -> None:
    query, key = torch.zeros(2, 3, sizes[0], 4), torch.zeros(2, 3, sizes[1], 4)
    counts = visible_counts(query, key, is_causal=is_causal)
    assert counts.shape[2] == sizes[0]
    assert counts.sum() == 0


def test_visible_counts_of_packed_sequences() -> None:
    x = torch.zeros(1, 2, 7, 4)
    counts = visible_counts(x, x, is_causal=True, cu_seqlens_q=torch.tensor([0, 2, 2, 6]))
    assert counts.flatten().tolist() == [1, 2, 1, 2, 3, 4, 0]


# ---------------------------------------------------------------------------------------------------------------
# Sparse weights


def check_compressed(sparse: SparseWeights, dense: Tensor) -> None:
    rows = dense.reshape(-1, dense.shape[3])
    assert tuple(sparse.shape) == tuple(dense.shape)
    assert sparse.crow.dtype == sparse.col.dtype == torch.long
    assert sparse.crow.shape == (rows.shape[0] + 1,)
    assert sparse.crow[0] == 0
    assert sparse.crow[-1] == sparse.col.numel() == sparse.val.numel() == int((dense != 0.0).sum())
    for number, row in enumerate(rows):
        entries = slice(int(sparse.crow[number]), int(sparse.crow[number + 1]))
        assert sparse.col[entries].tolist() == row.nonzero().flatten().tolist()  # ascending, and the support exactly
    torch.testing.assert_close(sparse.val.double(), rows[rows != 0.0].double(), rtol=1e-6, atol=1e-7)
    assert torch.equal(sparse.dense(), sparse.to_dense())
    assert sparse.to_dense().shape == dense.shape
    torch.testing.assert_close(sparse.to_dense().double(), dense.double(), rtol=1e-6, atol=1e-7)


@every_option
@every_rule
def test_sparse_weights(option: str, rule: str, block_size: str) -> None:
    key_heads = 2 if block_size == "tiny_blocks" else 4
    query, key, value = inputs(key_heads)
    options = arguments(option, rule) | {"enable_gqa": True}
    check_compressed(
        sparse_attention_weights(query, key, value, **options), attention_weights(query, key, value, **options)
    )


def test_sparse_weights_keep_double_precision() -> None:
    """`The exact non-zeros of attention_weights`, which are float64 for float64 input."""
    query, key, _ = inputs()
    dense, sparse = attention_weights(query, key), sparse_attention_weights(query, key)
    assert sparse.val.dtype == dense.dtype
    torch.testing.assert_close(sparse.val, dense[dense != 0.0], rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)], ids=str)
def test_sparse_weights_of_nothing(sizes: tuple[int, int]) -> None:
    sparse = sparse_attention_weights(torch.zeros(2, 3, sizes[0], 4), torch.zeros(2, 3, sizes[1], 4))
    assert sparse.crow.tolist() == [0] * (6 * sizes[0] + 1)
    assert sparse.col.numel() == sparse.val.numel() == 0
    assert sparse.to_dense().shape == (2, 3, *sizes)
    assert sparse.to_torch().to_dense().shape == (6 * sizes[0], sizes[1])
    assert repr(sparse) == f"SparseWeights(shape={(2, 3, *sizes)}, 0 of 0 non-zero, torch.float32, cpu)"


def test_sparse_weights_as_a_tensor_of_torch() -> None:
    query, key, value = inputs()
    dense, sparse = attention_weights(query, key), sparse_attention_weights(query, key).to_torch()
    assert sparse.layout == torch.sparse_csr
    assert sparse.values().numel() == int((dense != 0.0).sum())
    torch.testing.assert_close(sparse.to_dense(), dense.flatten(0, 2), rtol=0.0, atol=1e-14)
    torch.testing.assert_close(sparse @ value[0, 0], dense.flatten(0, 2) @ value[0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sparse_weights_for_scipy(dtype: torch.dtype) -> None:
    pytest.importorskip("scipy")
    given = sparse_weights(attention_weights(*inputs()[:2]).to(dtype).requires_grad_())
    found = given.to_scipy()
    assert found.nnz == given.val.numel()
    assert found.dtype == ("float64" if dtype == torch.float64 else "float32")
    expected = given.to_dense().detach().flatten(0, 2).to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(torch.from_numpy(found.toarray()), expected)


def test_scipy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ImportError, match="to_scipy needs scipy: pip install scipy"):
        sparse_attention_weights(*inputs()[:2]).to_scipy()


def test_sparse_weights_print_in_a_line() -> None:
    weights = torch.tensor([[[[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]]])
    expected = "SparseWeights(shape=(1, 1, 2, 4), 3 of 8 (37.50%) non-zero, torch.float32, cpu)"
    assert repr(sparse_weights(weights)) == expected


# ---------------------------------------------------------------------------------------------------------------
# Statistics


def expected_statistics(weights: Tensor, seen: Tensor, distance: Tensor) -> Statistics:
    """Row by row, from the definitions."""
    columns: dict[str, list[float]] = {name: [] for name in FIELDS}
    for head in range(weights.shape[1]):
        support, entropy, distances, null, visible = [], [], [], [], 0
        for b in range(weights.shape[0]):
            for i in range(weights.shape[2]):
                keys = seen[b, head, i].nonzero().flatten()
                if keys.numel() == 0:
                    continue
                row = weights[b, head, i, keys].double().abs()
                visible += keys.numel()
                support.append(int((row > 0.0).sum()))
                null.append(float(support[-1] == 0))
                if support[-1]:
                    p = row / row.sum()
                    entropy.append(-sum(x * math.log(x) for x in p.tolist() if x > 0.0))
                    distances.append(float((p * distance[b, 0, i, keys]).sum()))
        columns["support_size"].append(sum(support) / len(support))
        columns["zero_share"].append(1.0 - sum(support) / visible)
        columns["entropy"].append(sum(entropy) / len(entropy))
        columns["null_share"].append(sum(null) / len(null))
        columns["mean_distance"].append(sum(distances) / len(distances))
    return Statistics(**{name: torch.tensor(values) for name, values in columns.items()})


def assert_same(got: Statistics, want: Statistics) -> None:
    for name in FIELDS:
        assert getattr(got, name).shape == (H,)
        assert getattr(got, name).dtype == torch.float32
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@every_option
@every_rule
def test_statistics(option: str, rule: str, block_size: str) -> None:
    key_heads = 2 if block_size == "tiny_blocks" else 4
    query, key, value = inputs(key_heads)
    options = arguments(option, rule) | {"enable_gqa": True}
    weights = attention_weights(query, key, **options)
    want = expected_statistics(weights, seen_by(option), AHEAD.abs().expand(B, 1, LQ, LK))
    assert_same(attention_statistics(query, key, value, **options), want)
    out, with_output = attention_with_statistics(query, key, value, **options)
    assert_same(with_output, want)
    torch.testing.assert_close(out, attention(query, key, value, **options), rtol=0.0, atol=1e-12)
    if rule == "relu":
        assert bool((want.null_share > 0.0).any())
    else:
        assert bool((want.null_share == 0.0).all())


def test_statistics_by_hand() -> None:
    """Two heads of one query at position 2: weights (1/2, 0, 1/2), and (0, 1, 0) with key 0 hidden."""
    query = torch.ones(1, 2, 1, 1)
    key = torch.tensor([[5.0, 0.0, 5.0], [9.0, 9.0, 0.0]]).view(1, 2, 3, 1)
    mask = torch.tensor([[True, True, True], [False, True, True]]).view(1, 2, 1, 3)
    got = attention_statistics(query, key, attn_mask=mask, rule=Entmax(2.0), scale=1.0)
    assert got.support_size.tolist() == [2.0, 1.0]
    assert got.zero_share.tolist() == pytest.approx([1 / 3, 1 / 2])
    assert got.entropy.tolist() == pytest.approx([math.log(2.0), 0.0])
    assert got.null_share.tolist() == [0.0, 0.0]
    assert got.mean_distance.tolist() == pytest.approx([1.0, 1.0])


def test_statistics_compare_positions() -> None:
    query, key, _ = inputs()
    positions = {"query_positions": torch.arange(LQ) * 3, "key_positions": torch.arange(LK).expand(B, -1) * 2}
    distance = (torch.arange(LK) * 2 - (torch.arange(LQ) * 3)[:, None]).abs().expand(B, 1, LQ, LK)
    want = expected_statistics(attention_weights(query, key), EVERYTHING.expand(B, H, LQ, LK), distance)
    assert_same(attention_statistics(query, key, **positions), want)


def test_statistics_are_those_before_dropout_and_differentiable_output(block_size: str) -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    generator = torch.Generator().manual_seed(0)
    out, got = attention_with_statistics(query, key, value, dropout_p=0.5, generator=generator)
    assert_same(got, attention_statistics(query, key))
    expected = entmax_attention(query, key, value, dropout_p=0.5, generator=generator.manual_seed(0))
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-12)
    probe = randn(*out.shape, seed=9)
    pairs = zip(torch.autograd.grad(out, (query, key), probe), torch.autograd.grad(expected, (query, key), probe))  # noqa: B905
    for gradient, want in pairs:
        torch.testing.assert_close(gradient, want, rtol=0.0, atol=1e-12)
    assert not any(getattr(got, name).requires_grad for name in FIELDS)


def run_under_grad(function: Callable[[Tensor], tuple[Tensor, Statistics]], query: Tensor) -> Statistics:
    def loss(query: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, statistics = function(query)
        return out.sum(), tuple(getattr(statistics, name) for name in FIELDS)

    return Statistics(*torch.func.grad(loss, has_aux=True)(query)[1])


def run_compiled(function: Callable[[Tensor], tuple[Tensor, Statistics]], query: Tensor) -> Statistics:
    def run(query: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(function(query)[1], name) for name in FIELDS)

    torch._dynamo.reset()
    return Statistics(*torch.compile(run, backend="eager")(query))


@pytest.mark.parametrize("run", [run_under_grad, run_compiled])
def test_statistics_with_output_are_never_silently_empty(
    run: Callable[[Callable[[Tensor], tuple[Tensor, Statistics]], Tensor], Statistics],
) -> None:
    """Both take the dense path, which shows its weights to the observer as well."""
    query, key, value = inputs()
    got = run(lambda query: attention_with_statistics(query, key, value, is_causal=True), query)
    assert_same(got, attention_statistics(query, key, is_causal=True))


def test_fully_masked_rows_do_not_count() -> None:
    query, key, _ = inputs()
    mask = torch.ones(B, 1, LQ, 1, dtype=torch.bool)
    mask[1, :, 5:] = False
    got = attention_statistics(query, key, attn_mask=mask)
    distance = AHEAD.abs().expand(B, 1, LQ, LK)
    assert_same(got, expected_statistics(attention_weights(query, key), mask.expand(B, H, LQ, LK), distance))


def test_nothing_visible_is_no_nan() -> None:
    query, key, _ = inputs()
    got = attention_statistics(query, key, key_lengths=torch.zeros(B, dtype=torch.long))
    assert all(bool(getattr(got, name).isfinite().all()) for name in FIELDS)
    assert bool((got.support_size == 0.0).all())
    assert "support_size=0" in repr(got)


def test_statistics_of_minus_inf_masks_with_leaky_relu() -> None:
    query, key, _ = inputs()
    rule = Activation("leaky_relu")
    got = attention_statistics(query, key, attn_mask=some_inf(), rule=rule)
    weights = attention_weights(query, key, attn_mask=some_inf(), rule=rule)
    assert bool(weights.isfinite().all())
    seen = (some_inf() > -INF).expand(B, H, LQ, LK)
    assert_same(got, expected_statistics(weights, seen, AHEAD.abs().expand(B, 1, LQ, LK)))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "rule": Activation()}], ids=["entmax", "relu"])
def test_statistics_compile_and_vmap(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    query, key, _ = inputs()

    def entropy(query: Tensor, key: Tensor) -> Tensor:
        return attention_statistics(query, key, **options).entropy

    expected = entropy(query, key)
    compiled = torch.compile(entropy, fullgraph=True, backend="aot_eager")(query, key)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.vmap(entropy)(query[None], key[None])[0], expected)
