"""Mechanisms by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mechanisms.cases import EMBED, HEADS, KEYS, inputs, make
from tamis.mechanisms import (
    MECHANISMS,
    ASEntmaxAttention,
    ASSMaxAttention,
    EntmaxAttention,
    ReLAttention,
    ScalableSoftmaxAttention,
    SoftmaxAttention,
    SoftpickAttention,
    build_mechanism,
)


@pytest.mark.parametrize(
    ("spec", "kind", "attributes"),
    [
        ("softmax", SoftmaxAttention, {}),
        ("entmax", EntmaxAttention, {"num_heads": HEADS}),
        ("entmax15", EntmaxAttention, {"alpha": 1.5}),
        ("sparsemax", EntmaxAttention, {"alpha": 2.0}),
        ("rela", ReLAttention, {"embed_dim": EMBED, "activation": "relu"}),
        ("softpick", SoftpickAttention, {"eps": 1e-6}),
        ("asentmax", ASEntmaxAttention, {"alpha": 1.5}),
        ("assmax", ASSMaxAttention, {"alpha": 1.0}),
        ("ssmax", ScalableSoftmaxAttention, {"num_heads": HEADS}),
        ({"name": "softmax"}, SoftmaxAttention, {}),
        ({"name": "entmax", "alpha": 1.3}, EntmaxAttention, {"alpha": 1.3}),
        ({"name": "entmax", "alpha": 1}, EntmaxAttention, {"alpha": 1.0}),
        ({"name": "rela", "activation": "gelu", "bias": -1.0}, ReLAttention, {"activation": "gelu", "bias": -1.0}),
        ({"name": "softpick", "eps": 1e-4}, SoftpickAttention, {"eps": 1e-4}),
        ({"name": "asentmax", "alpha": 1.3}, ASEntmaxAttention, {"alpha": 1.3}),
    ],
)
def test_build_by_name_or_table(spec: Any, kind: type, attributes: dict[str, Any]):
    given = copy.deepcopy(spec)
    mechanism = build_mechanism(spec, EMBED, HEADS)
    assert type(mechanism) is kind
    assert {key: getattr(mechanism, key) for key in attributes} == attributes
    assert spec == given


def test_build_knows_every_name_tested_here():
    assert set(MECHANISMS) == {
        *("softmax", "entmax", "entmax15", "sparsemax", "rela", "softpick", "asentmax", "assmax", "ssmax")
    }


def test_build_returns_a_mechanism_as_it_is():
    mechanism = SoftmaxAttention()
    assert build_mechanism(mechanism, EMBED, HEADS) is mechanism


@pytest.mark.parametrize("name", ["asentmax", "assmax", "ssmax"])
def test_build_passes_the_scaled_heads(name: str):
    scaled = torch.tensor([False, True, True, False])
    assert torch.equal(build_mechanism(name, EMBED, HEADS, scaled).scaled_heads, scaled)
    own = {"name": name, "scaled_heads": ~scaled}
    assert torch.equal(build_mechanism(own, EMBED, HEADS, scaled).scaled_heads, ~scaled)
    assert build_mechanism(name, EMBED, HEADS).scaled_heads is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sofmax", "did you mean 'softmax'"),
        ("Entmax", "did you mean 'entmax'"),
        ("relu", "did you mean 'rela'"),
        ({"name": "asentmx"}, "did you mean 'asentmax'"),
        ({"alpha": 1.5}, "name"),
        ({"name": 3}, "name"),
        (None, "name"),
        (["entmax"], "name"),
        ({"name": "softmax", "alpha": 1.5}, "softmax.*alpha"),
        ({"name": "entmax", "alhpa": 1.5}, "alhpa"),
        ({"name": "entmax", "alpha": 7.0}, r"\[1, 2\]"),
        ({"name": "rela", "variant": "x"}, "variant"),
    ],
)
def test_build_refuses_with_the_reason(spec: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build_mechanism(spec, EMBED, HEADS)


def test_sdpa_is_what_softmax_agrees_with():
    data = inputs(queries=KEYS)
    expected = F.scaled_dot_product_attention(data["query"], data["key"], data["value"], is_causal=True)
    for name in ("softmax", "entmax-1"):
        torch.testing.assert_close(make(name)(**data, is_causal=True), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "setting"), [("rela", "divide_by_count"), ("asentmax", "per_head")])
def test_a_switch_is_true_or_false(name, setting):
    with pytest.raises((ValueError, TypeError), match=f"{setting} must be True or False, got 'false'"):
        build_mechanism({"name": name, setting: "false"}, 16, 2)
