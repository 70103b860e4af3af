"""Quantiles of adaptive scales against the values themselves, sorted."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from analysis.cases import causal_lm, seq2seq
from tamis.analysis import ScaleMetrics, capture
from tamis.mechanisms import ASEntmaxAttention
from tamis.nn import Attention


def layer(**options: object) -> Attention:
    mechanism = ASEntmaxAttention(16, 4, **options)
    if mechanism.scale.weight is not None:
        torch.nn.init.normal_(mechanism.scale.weight, std=0.5)
    torch.nn.init.normal_(mechanism.scale.bias, std=0.5)
    return Attention(16, 4, mechanism=mechanism).eval()


def test_quantiles_by_the_number_of_keys():
    """Causal rows see 1, 2, 3 ... keys: there the quantiles over sentences are those of a column."""
    attention, x = layer(delta=0.5), torch.randn(200, 4, 16)
    metrics = ScaleMetrics()
    with torch.no_grad(), capture(attention, lambda *_: None, inputs=metrics):
        for part in x.split(64):
            attention(part, is_causal=True)
    found = metrics.results()["attention"]
    assert (found.delta, found.heads, found.keys) == (0.5, (0, 1, 2, 3), (1, 2, 3, 4))
    scale = attention.mechanism.scale
    raw = x @ scale.weight.detach().T + scale.bias.detach()
    beta, gamma = F.softplus(raw[..., :4]), 2.0 * torch.tanh(raw[..., 4:])  # (200, 4 positions, 4 heads)
    log_n = torch.tensor([math.log(n + 1) for n in (1, 2, 3, 4)])[:, None]
    values = {"beta": beta, "gamma": gamma, "scale": 0.5 + beta * log_n**gamma}
    for name, value in values.items():
        # A bin is 3.5 % or 0.01 wide; between the order statistics on either side there is some room as well.
        bin_width = 0.011 if name == "gamma" else 0.036 * value.max().item()
        for head in range(4):
            for column in range(4):
                ordered = value[:, column, head].sort().values
                for share, number in zip(found.quantiles, found.by_keys[name][head][column], strict=True):
                    place = share * len(ordered)
                    low = float(ordered[max(0, math.ceil(place) - 1)])
                    high = float(ordered[min(len(ordered) - 1, int(place))])
                    assert low - bin_width <= number <= high + bin_width, (name, head, column, share)
            overall = torch.quantile(value[:, :, head].flatten(), torch.tensor(found.quantiles))
            assert found.overall[name][head] == pytest.approx(overall.tolist(), abs=2 * bin_width)


def test_one_scale_per_head_has_one_value():
    attention = layer(per_head=True)
    metrics = ScaleMetrics()
    with torch.no_grad(), capture(attention, lambda *_: None, inputs=metrics):
        attention(torch.randn(3, 5, 16))
    found = metrics.results()["attention"]
    assert found.keys == (5,)
    beta, gamma = (x.flatten().tolist() for x in attention.mechanism.scale.coefficients(None))
    for head in range(4):
        assert found.overall["beta"][head] == pytest.approx([beta[head]] * 5, rel=0.036)
        assert found.overall["gamma"][head] == pytest.approx([gamma[head]] * 5, abs=0.011)
        assert found.overall["scale"][head] == pytest.approx(
            [1 + beta[head] * math.log(6) ** gamma[head]] * 5, rel=0.036
        )


def test_padding_does_not_count():
    attention, x = layer(), torch.randn(2, 4, 16)
    found = []
    for padded in (x, torch.cat([x, torch.randn(2, 3, 16)], 1)):
        metrics = ScaleMetrics()
        mask = torch.arange(padded.shape[1]).expand(2, -1) < 4
        with torch.no_grad(), capture(attention, lambda *_: None, inputs=metrics):
            attention(padded, key_mask=mask)
        found.append(metrics.results()["attention"])
    assert found[0] == found[1]


def test_heads_with_a_position_bias_are_not_scaled():
    model = causal_lm("asentmax", position="nape")
    metrics = ScaleMetrics()
    with torch.no_grad(), capture(model, lambda *_: None, inputs=metrics):
        model(torch.tensor([[1, 2, 3]]))
    found = metrics.results()["layers.1.self"]
    scaled = model.layers[1].self_attention.mechanism.scaled_heads
    assert 0 < len(found.heads) < 4
    assert found.heads == tuple(scaled.nonzero().flatten().tolist())
    assert len(found.overall["scale"]) == len(found.heads)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_other_mechanisms_are_passed_over():
    model = seq2seq("entmax")
    metrics = ScaleMetrics()
    with torch.no_grad(), capture(model, lambda *_: None, inputs=metrics):
        model(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
    assert metrics.results() == {}
