"""What all mechanisms have in common: options, errors, names of what was learned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mechanisms.cases import (
    BATCH,
    EMBED,
    FACTORIES,
    HEAD_DIM,
    HEADS,
    KEYS,
    QUERIES,
    every_mechanism,
    inputs,
    make,
    some_mask,
)
from tamis.mechanisms import (
    AdaptiveScale,
    ASEntmaxAttention,
    ASSMaxAttention,
    EntmaxAttention,
    LearnedAlpha,
    Mechanism,
    ReLAttention,
    ScalableSoftmaxAttention,
    SoftpickAttention,
    build_mechanism,
)
from tamis.nn import Attention


@every_mechanism
def test_options_of_the_attention_functions_pass_through(name: str):
    """`options` are the keyword arguments of entmax_attention."""
    mechanism, data = make(name), inputs()
    plain = mechanism(**data, window=2, scale=0.3)
    assert not torch.allclose(plain, mechanism(**data))
    torch.testing.assert_close(mechanism(**data, window=2, scale=0.3, backend="reference"), plain)
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], window=2, scale=0.3, dropout_p=0.0)
    torch.testing.assert_close(weights @ data["value"], plain, atol=1e-5, rtol=1e-5)


@every_mechanism
def test_dropout_follows_the_generator(name: str):
    mechanism, data = make(name), inputs()
    first, again, other = (
        mechanism(**data, dropout_p=0.5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_mechanism
def test_statistics_count_the_zeros_of_the_weights(name: str):
    mechanism, data = make(name), inputs()
    statistics = mechanism.statistics(data["query"], data["key"], hidden=data["hidden"], attn_mask=some_mask())
    weights = mechanism.weights(data["query"], data["key"], hidden=data["hidden"], attn_mask=some_mask())
    visible = some_mask().expand_as(weights)
    zeros = ((weights == 0.0) & visible).sum((0, 2, 3)) / visible.sum((0, 2, 3))
    torch.testing.assert_close(statistics.zero_share.float(), zeros.float(), atol=1e-6, rtol=1e-6)
    rows = visible.any(-1)
    support = (weights != 0.0).sum((0, 2, 3)) / rows.sum((0, 2))
    torch.testing.assert_close(statistics.support_size, support.float(), atol=1e-6, rtol=1e-6)
    null = (rows & (weights == 0.0).all(-1)).sum((0, 2)) / rows.sum((0, 2))
    torch.testing.assert_close(statistics.null_share, null.float(), atol=1e-6, rtol=1e-6)
    assert not any(getattr(statistics, field.name).requires_grad for field in dataclasses.fields(statistics))


@every_mechanism
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"backend": "bogus"}, ValueError, "backend must be one of auto, reference, sdpa, triton"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
        ({"value": torch.zeros(BATCH, HEADS, KEYS - 1, HEAD_DIM)}, ValueError, "key and value must have as many"),
        ({"value": torch.zeros(BATCH, 1, KEYS, HEAD_DIM)}, ValueError, "key and value must have as many"),
        ({"value": torch.zeros(BATCH, HEADS, KEYS, HEAD_DIM).double()}, ValueError, "value must match query"),
        ({"key": torch.zeros(BATCH, HEADS, KEYS, 2)}, ValueError, "one head_dim"),
        ({"attn_mask": torch.ones(QUERIES, KEYS).long()}, TypeError, "attn_mask must be boolean"),
        ({"window": "2"}, TypeError, "window must be"),
        ({"bogus": 1}, TypeError, "bogus"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_alike(name: str, changes: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        make(name)(**{**inputs(), **changes})


@every_mechanism
def test_gqa(name: str):
    mechanism, data = make(name), inputs()
    data["key"], data["value"] = data["key"][:, :2], data["value"][:, :2]
    repeated = {**data, "key": data["key"].repeat_interleave(2, 1), "value": data["value"].repeat_interleave(2, 1)}
    out = mechanism(**data, enable_gqa=True)
    torch.testing.assert_close(out, mechanism(**repeated), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mechanism", "shown"),
    [
        (EntmaxAttention(2, LearnedAlpha(2, init=1.25)), "1.250..1.250"),
        (EntmaxAttention(2, 1.75), "alpha=1.75"),
        (EntmaxAttention(2, torch.tensor([1.25, 1.5])), "1.2500, 1.5000"),
        (ScalableSoftmaxAttention(2, init=0.75), "s=0.750..0.750"),
        (ReLAttention(8, 2, "i", "gelu"), "variant='i'"),
        (ReLAttention(8, 2, "i", "gelu"), "activation='gelu'"),
        (ReLAttention(8, 2, "g"), "gain=1.000..1.000, gate="),
        (ReLAttention(8, 2, "layernorm"), "gain=1.000..1.000, offset=0.000..0.000"),
        (ASEntmaxAttention(8, 2), "beta=0.693..0.693, gamma=0.000..0.000 at a zero input"),
        (ASEntmaxAttention(8, 2, per_head=True, init="small"), "beta=0.050..0.050, gamma=0.000..0.000)"),
        (ASEntmaxAttention(8, 2, 1.25, 0.5), "alpha=1.25"),
        (
            ASEntmaxAttention(8, 2, scaled_heads=torch.tensor([True, False]), unscaled_alpha=1.0),
            "alpha=1.5, unscaled_alpha=1",
        ),
        (ASEntmaxAttention(8, 2, 1.25, 0.5, init="small"), "delta=0.5, per_head=False, init='small'"),
        (SoftpickAttention(1e-3), "eps=0.001"),
    ],
)
def test_repr_shows_what_was_learned_or_chosen(mechanism: Mechanism, shown: str):
    assert shown in repr(mechanism)


def test_repr_follows_training():
    mechanism = ScalableSoftmaxAttention(3)
    with torch.no_grad():
        mechanism.s.copy_(torch.tensor([0.5, 1.0, 2.25]))
    assert "0.500..2.250" in repr(mechanism)


@pytest.mark.parametrize("per_head", [True, False])
def test_repr_of_scales_and_gates_follows_training(per_head: bool):
    mechanism = ASEntmaxAttention(8, 2, per_head=per_head)
    beta, gamma = torch.tensor([0.25, 3.0]), torch.tensor([-1.5, 0.5])
    with torch.no_grad():
        mechanism.scale.bias.copy_(torch.cat([beta.expm1().log(), (gamma / 2.0).atanh()]))
    assert "beta=0.250..3.000, gamma=-1.500..0.500" in repr(mechanism)
    rela = ReLAttention(2, 1)
    with torch.no_grad():
        rela.norm.gain.copy_(torch.tensor([-0.5, 2.0]))
        rela.norm.gate.copy_(torch.tensor([0.125, 0.25]))
    assert "gain=-0.500..2.000, gate=0.125..0.250" in repr(rela)


@every_mechanism
def test_repr_and_construction_on_the_meta_device(name: str):
    """Large models are built there before they are sharded."""
    with torch.device("meta"):
        mechanism = FACTORIES[name]()
    assert type(mechanism).__name__ in repr(mechanism)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: EntmaxAttention(4, "lern"), "learn"),
        (lambda: EntmaxAttention(4, 2.5), r"alpha must lie in \[1, 2\]"),
        (lambda: EntmaxAttention(4, 0.5), r"alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, 3.0), r"alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, unscaled_alpha=0.5), r"unscaled_alpha must lie in \[1, 2\]"),
        (lambda: ASEntmaxAttention(8, 4, unscaled_alpha=1.0), "use NAPE positions"),
        (lambda: ReLAttention(10, 4), "multiple of num_heads"),
        (lambda: EntmaxAttention(4, None), "alpha must be"),
        (lambda: EntmaxAttention(4, True), "alpha must be"),
        (lambda: EntmaxAttention(4, torch.tensor([1.0, 1.5, 2.0])), r"one per head, \(4,\).*got shape \(3,\)"),
        (lambda: EntmaxAttention(4, LearnedAlpha(1)), r"one per head, \(4,\).*got shape \(1,\)"),
        (lambda: EntmaxAttention(4, LearnedAlpha((3, 1, 1))), r"got shape \(3, 1, 1\)"),
        (lambda: EntmaxAttention(4, torch.full((4, 5), 1.5)), r"got shape \(4, 5\)"),
        (lambda: EntmaxAttention(4, torch.full((1, 1, 4, 1, 1), 1.5)), "got shape"),
        (lambda: EntmaxAttention(4, torch.tensor([1.0, 1.5, 2.0, 2.1])), r"alpha must lie in \[1, 2\].*1 to 2.1"),
        (lambda: EntmaxAttention(2, nn.Parameter(torch.tensor([0.9, 1.5]))), r"\[1, 2\].*0.9 to 1.5"),
        (lambda: EntmaxAttention(2, torch.tensor([math.nan, 1.5])), r"alpha must lie in \[1, 2\]"),
        (lambda: EntmaxAttention(2, LearnedAlpha(2, 0.5, 3.0)), r"alpha must lie in \[1, 2\].*0.5 to 3"),
        *(
            (lambda make=make, heads=heads: make(heads), rf"num_heads must be .* at least 1, got {heads}")
            for heads in (0, -2)
            for make in (
                EntmaxAttention,
                ScalableSoftmaxAttention,
                lambda heads: ReLAttention(8, heads),
                lambda heads: ASEntmaxAttention(8, heads),
                lambda heads: build_mechanism("softmax", 8, heads),
            )
        ),
        (lambda: ReLAttention(8, 4, "gated"), "variant must be one of"),
        (lambda: ReLAttention(8, 4, "layer_norm"), "did you mean 'layernorm'"),
        (lambda: ReLAttention(8, 4, "g", "rellu"), "did you mean 'relu'"),
        (lambda: ReLAttention(8, 4, "g", "squaredrelu"), "did you mean 'squared_relu'"),
        (lambda: ASEntmaxAttention(8, 4, init="smal"), "did you mean 'small'"),
        (lambda: ASEntmaxAttention(8, 4, init="tiny"), "init must be one of"),
        (lambda: ASEntmaxAttention(8, 4, scaled_heads=torch.ones(4)), "booleans"),
        (lambda: ASEntmaxAttention(8, 4, scaled_heads=torch.ones(3, dtype=torch.bool)), "scaled_heads"),
        (lambda: ScalableSoftmaxAttention(4, scaled_heads=torch.ones(5, dtype=torch.bool)), "scaled_heads"),
        (lambda: AdaptiveScale(None, 4), "embed_dim"),
    ],
)
def test_bad_arguments_are_refused_at_once(construct: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        construct()


@pytest.mark.parametrize(
    "alpha", [torch.tensor(1.5), torch.full((1, 1, 1), 1.5), torch.full((4, 1, 1), 1.5), torch.full((4,), 1.5)]
)
def test_alphas_of_every_shape_that_attention_takes(alpha: Tensor):
    data = inputs()
    expected = EntmaxAttention(HEADS, 1.5)(**data)
    torch.testing.assert_close(EntmaxAttention(HEADS, alpha)(**data), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (EntmaxAttention(1), "EntmaxAttention was built for num_heads=1, but the layer has 4"),
        (EntmaxAttention(8, 1.5), "EntmaxAttention was built for num_heads=8, but the layer has 4"),
        (ScalableSoftmaxAttention(2), "ScalableSoftmaxAttention was built for num_heads=2, but the layer has 4"),
        (ReLAttention(EMBED, 2), "ReLAttention was built for num_heads=2, but the layer has 4"),
        (ReLAttention(48, HEADS), r"embed_dim=48, but the heads of the layer have 4 \* 6 channels together"),
        (ASEntmaxAttention(EMBED, 2), "ASEntmaxAttention was built for num_heads=2, but the layer has 4"),
        (ASSMaxAttention(48, HEADS), "ASSMaxAttention was built for embed_dim=48, but the input of the layer has 24"),
    ],
)
def test_a_layer_refuses_a_mechanism_of_other_sizes(mechanism: Mechanism, message: str):
    with pytest.raises(ValueError, match=message):
        Attention(EMBED, HEADS, mechanism=mechanism)


def test_sizes_that_do_not_matter_are_not_compared():
    Attention(EMBED, HEADS, mechanism=ASEntmaxAttention(48, HEADS, per_head=True))
    Attention(EMBED, HEADS, mechanism=ReLAttention(12, HEADS), head_dim=3)
    assert build_mechanism("rela", EMBED, HEADS, head_dim=3).embed_dim == 12
    assert build_mechanism("asentmax", EMBED, HEADS, head_dim=3).scale.weight.shape[1] == EMBED
