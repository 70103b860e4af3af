"""Metrics of attention weights against loops written from their formulas, closed forms and bounds."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from analysis.cases import cases, random_case, sparse_weights
from tamis.analysis import AttentionMetrics, density, head_diversity, null_share, sparsity_rate


def oracle(weights: Tensor, visible: Tensor) -> dict[str, object]:
    """All figures of (B, H, Lq, Lk), row by row in Python floats."""
    batch, heads, queries, keys = weights.shape
    shares: list[list[float]] = [[] for _ in range(heads)]
    zeros, seen, nulls = [0] * heads, [0] * heads, [0] * heads
    divergences = []
    for b in range(batch):
        for q in range(queries):
            rows, union = [], set()
            for h in range(heads):
                keep = [k for k in range(keys) if visible[b, h, q, k]]
                union |= set(keep)
                if not keep:
                    continue
                row = [abs(float(weights[b, h, q, k])) for k in keep]
                shares[h].append(sum(w != 0 for w in row) / len(row))
                zeros[h] += sum(w == 0 for w in row)
                seen[h] += len(row)
                if sum(row) == 0:
                    nulls[h] += 1
                else:
                    full = [abs(float(weights[b, h, q, k])) if k in keep else 0.0 for k in range(keys)]
                    rows.append([w / sum(full) for w in full])
            if len(rows) >= 2:
                mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
                js = entropy(mean) - sum(map(entropy, rows)) / len(rows)
                divergences.append(js / math.log(len(union)) if len(union) > 1 else 0.0)
    return {
        "density": [sum(s) / max(1, len(s)) for s in shares],
        "sparsity_rate": [z / max(1, n) for z, n in zip(zeros, seen, strict=True)],
        "null_share": [n / max(1, len(s)) for n, s in zip(nulls, shares, strict=True)],
        "diversity": sum(divergences) / max(1, len(divergences)),
        "compared": len(divergences),
    }


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_figures_equal_the_formulas(case):
    weights, visible = random_case(case)
    expected = oracle(weights, visible)
    torch.testing.assert_close(density(weights, visible).tolist(), expected["density"])
    torch.testing.assert_close(sparsity_rate(weights, visible).tolist(), expected["sparsity_rate"])
    torch.testing.assert_close(null_share(weights, visible).tolist(), expected["null_share"])
    assert float(head_diversity(weights, visible)) == pytest.approx(expected["diversity"], abs=1e-12)
    for figure in (density, sparsity_rate, null_share, head_diversity):
        value = figure(weights, visible)
        assert bool(((value >= 0) & (value <= 1)).all())


@settings(deadline=None, max_examples=30)
@given(cases, st.integers(1, 3))
def test_batches_of_any_size_add_up_to_the_whole(case, parts):
    seed, shape, *shares = case
    weights, visible = random_case((seed, (4, *shape[1:]), *shares))
    metrics = AttentionMetrics()
    for chunk, mask in zip(weights.tensor_split(parts), visible.tensor_split(parts), strict=True):
        metrics("encoder.0.self", chunk, mask)
    result, expected = metrics.results()["encoder.0.self"], oracle(weights, visible)
    assert result.density == pytest.approx(expected["density"])
    assert result.sparsity_rate == pytest.approx(expected["sparsity_rate"])
    assert result.null_share == pytest.approx(expected["null_share"])
    assert result.diversity == pytest.approx(expected["diversity"], abs=1e-12)
    assert result.compared == expected["compared"]


def test_rows_weigh_the_same_in_batches_of_different_sizes():
    """The mean of the batches' means would be 0.625."""
    metrics = AttentionMetrics()
    metrics("layers.0.self", torch.ones(1, 1, 3, 4))
    metrics("layers.0.self", torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4))
    assert metrics.results()["layers.0.self"].density == pytest.approx([(3 * 1.0 + 0.25) / 4])


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_identical_heads_have_no_diversity(heads):
    row = torch.rand(2, 1, 4, 7)
    assert float(head_diversity(row.expand(2, heads, 4, 7) * torch.rand(heads, 1, 1))) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_one_hot_heads_on_different_keys_have_log_heads_over_log_keys(heads):
    one_hot = torch.eye(heads, 8).view(1, heads, 1, 8)
    assert float(head_diversity(one_hot)) == pytest.approx(math.log(heads) / math.log(8))
    visible = torch.arange(8) < heads  # as many keys as heads: the largest there is
    assert float(head_diversity(one_hot, visible)) == pytest.approx(1.0)


def test_a_query_with_one_key_has_no_diversity_but_counts():
    weights = torch.eye(2).view(1, 2, 1, 2).repeat(1, 1, 2, 1)
    weights[:, :, 1] = torch.tensor([1.0, 0.0])
    visible = torch.tensor([[True, True], [True, False]])
    assert float(head_diversity(weights, visible)) == pytest.approx(0.5)


def test_null_rows_are_left_out_of_diversity_and_counted():
    weights = torch.zeros(1, 3, 3, 4)
    weights[0, 0, 0, 0] = weights[0, 1, 0, 1] = 3.0  # two living heads that differ
    weights[0, 2, 1, 0] = 1.0  # one living head: nothing to compare it with
    metrics = AttentionMetrics()
    metrics("decoder.0.cross", weights)
    result = metrics.results()["decoder.0.cross"]
    assert result.diversity == pytest.approx(math.log(2) / math.log(4))
    assert result.compared == 1
    assert result.null_share == pytest.approx([2 / 3] * 3)


def test_softmax_is_dense_and_hidden_keys_do_not_count():
    visible = torch.ones(5, 5).tril().bool()
    weights = torch.randn(2, 4, 5, 5).masked_fill(~visible, -torch.inf).softmax(-1)
    assert density(weights, visible).tolist() == [1.0] * 4
    assert sparsity_rate(weights, visible).tolist() == [0.0] * 4
    assert density(weights).tolist() == pytest.approx([0.6] * 4)


def test_weights_outside_the_mask_change_nothing():
    """Such as rows of padding, which a model computes all the same."""
    weights, visible = sparse_weights(0, (2, 3, 4, 5), 0.3), torch.rand(2, 1, 4, 5) < 0.6
    other = torch.where(visible, weights, torch.rand(2, 3, 4, 5))
    for figure in (density, sparsity_rate, null_share, head_diversity):
        torch.testing.assert_close(figure(weights, visible), figure(other, visible))


def test_nothing_to_count_is_zero():
    for weights in (torch.zeros(0, 2, 3, 4), torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 0)):
        assert density(weights).tolist() == [0.0, 0.0]
        assert float(head_diversity(weights)) == 0.0


def test_summary_averages_by_kind_of_attention():
    metrics = AttentionMetrics()
    metrics("encoder.0.self", torch.ones(1, 2, 1, 2))
    metrics("encoder.1.self", torch.eye(2).view(1, 2, 1, 2))
    metrics("decoder.0.cross", torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2))
    summary = metrics.summary()
    assert list(summary) == ["encoder", "cross", "all"]
    assert summary["encoder"] == pytest.approx(
        {"density": 0.75, "sparsity_rate": 0.25, "null_share": 0.0, "diversity": 0.5}
    )
    assert summary["all"]["density"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(metrics.to_dict())) == metrics.to_dict()


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="floating-point"):
        density(torch.ones(1, 2, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="boolean"):
        density(torch.ones(1, 2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="heads, queries, keys"):
        density(torch.ones(2, 2))
    with pytest.raises(ValueError, match="broadcast"):
        density(torch.ones(1, 2, 2), torch.ones(3, 2).bool())
    metrics = AttentionMetrics()
    metrics("encoder.0.self", torch.ones(1, 2, 1, 2))
    with pytest.raises(ValueError, match="2 heads so far, now 3"):
        metrics("encoder.0.self", torch.ones(1, 3, 1, 2))
