"""Softpick: large and small scores, dropout."""

from __future__ import annotations

import pytest
import torch

from mechanisms.cases import BATCH, HEADS, KEYS, inputs, make


def test_softpick_of_large_scores_does_not_overflow():
    data = inputs(spread=1e4)
    weights = make("softpick").weights(data["query"], data["key"])
    assert torch.isfinite(weights).all()
    assert (weights.sum(-1) <= 1.0 + 1e-5).all()


def test_softpick_of_small_scores_keeps_its_digits():
    """e^x - 1 loses them, expm1 does not."""
    data = inputs(spread=1e-4)
    exact = make("softpick").weights(data["query"].double(), data["key"].double())
    weights = make("softpick").weights(data["query"], data["key"])
    torch.testing.assert_close(weights.double(), exact, atol=2e-6, rtol=2e-5)


def test_softpick_has_no_kernel_to_insist_on():
    with pytest.raises(RuntimeError, match="no kernel for Softpick"):
        make("softpick")(**inputs(), backend="triton")


def test_softpick_drops_whole_weights():
    data = inputs()
    mechanism = make("softpick")
    data["value"] = torch.eye(KEYS)[None, None].expand(BATCH, HEADS, KEYS, KEYS).contiguous()
    torch.manual_seed(0)
    dropped = mechanism(**data, dropout_p=0.5)
    weights = mechanism.weights(data["query"], data["key"])
    share = dropped / weights
    visible = weights > 0.0
    assert ((share[visible] < 1e-6) | ((share[visible] - 2.0).abs() < 1e-4)).all()
    assert 0.3 < (share[visible] < 1.0).float().mean() < 0.7
