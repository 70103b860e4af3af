"""Alphas now and over training."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from analysis.cases import causal_lm, seq2seq
from tamis.analysis import alpha_histograms, alpha_trajectories, learned_alphas
from tamis.mechanisms import MECHANISMS, EntmaxAttention


def test_learned_alphas_are_those_that_attention_uses():
    model = seq2seq("entmax")
    found = learned_alphas(model)
    assert list(found) == ["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"]
    raw = model.decoder[0].cross_attention.mechanism.alpha.raw
    assert found["decoder.0.cross"] == pytest.approx((1 + torch.sigmoid(raw)).tolist())


def test_a_parameter_is_learned_too_and_a_buffer_is_not():
    model = causal_lm("softmax")
    values = torch.tensor([1.1, 1.2, 1.3, 1.4])
    model.layers[0].self_attention.mechanism = EntmaxAttention(4, nn.Parameter(values))
    model.layers[1].self_attention.mechanism = EntmaxAttention(4, values)
    assert learned_alphas(model) == {"layers.0.self": pytest.approx(values.tolist())}


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "entmax"])
def test_other_mechanisms_learn_none(mechanism):
    assert learned_alphas(seq2seq(mechanism)) == {}


def test_trajectories_of_a_journal():
    def record(step: int, encoder: list[float], cross: list[float]) -> dict[str, object]:
        alphas = {"encoder.0.self_attention": encoder, "decoder.0.cross_attention": cross}
        return {"step": step, "loss": 3.0, "alphas": alphas}

    records = [
        record(10, [1.5, 1.4], [2.0]),
        {"step": 10, "valid_loss": 2.5},
        record(30, [1.7, 1.2], [1.9]),
        record(20, [0.0, 0.0], [0.0]),
        record(20, [1.6, 1.3], [1.95]),
    ]
    found = alpha_trajectories(records)
    assert found.steps == (10, 20, 30)
    assert found.sites == {
        "encoder.0.self": ((1.5, 1.4), (1.6, 1.3), (1.7, 1.2)),
        "decoder.0.cross": ((2.0,), (1.95,), (1.9,)),
    }
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_a_run_without_alphas_has_no_trajectories():
    found = alpha_trajectories([{"step": 1, "loss": 1.0, "alphas": {}}, {"step": 2, "valid_loss": 1.0}])
    assert found.steps == ()
    assert found.sites == {}


def test_a_site_that_comes_and_goes_is_refused():
    records = [{"step": 1, "alphas": {"a": [1.0], "b": [1.0]}}, {"step": 2, "alphas": {"a": [1.0]}}]
    with pytest.raises(ValueError, match="step 2 has no alphas of b"):
        alpha_trajectories(records)


def test_histograms_by_kind_of_attention():
    alphas = {
        "encoder.0.self": (1.0, 1.24),
        "encoder.1.self": (1.25, 2.0),
        "decoder.0.cross": (1.5,),
        "layers.0.self": (),
    }
    assert alpha_histograms(alphas, bins=4) == {
        "encoder": (2, 1, 0, 1),
        "cross": (0, 0, 1, 0),
        "decoder": (0, 0, 0, 0),
    }
    assert alpha_histograms({"layers.0.self": (0.5, 3.0)}, bins=2) == {"decoder": (1, 1)}
    with pytest.raises(ValueError, match=r"0 bins of \[1.0, 2.0\]"):
        alpha_histograms(alphas, bins=0)
