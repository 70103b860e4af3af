"""Decoding by the C++ kernels: what the model itself gives, step by step and in whole searches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.models import BOS, EOS, IDS, PAD, sources, tiny
from tamis.decoding import DecodingConfig, beam_search, sample
from tamis.decoding import start as starting
from tamis.decoding.native import NativeState
from tamis.decoding.prepared import obstacle, prepared
from tamis.decoding.quantized import quantized
from tamis.decoding.state import DecodingState, best_tokens
from tamis.models import CausalLM, CausalLMConfig
from tamis.native import product
from tamis.nn.modes import evaluating

pytestmark = pytest.mark.skipif(product.obstacle() is not None, reason=str(product.obstacle()))

MECHANISMS: list[Any] = [
    *("softmax", "entmax", "entmax15", "sparsemax", "rela"),
    {"name": "entmax", "alpha": 1.05},
    *({"name": "rela", "variant": variant} for variant in ("i", "rms", "layernorm", "none")),
    {"name": "rela", "bias": 0.1, "divide_by_count": True},
]
SHAPES: list[dict[str, Any]] = [
    *({"position": position} for position in ("learned", "alibi", "nape", "none")),
    *({"arrangement": arrangement} for arrangement in ("pre", "post", "both")),
    *({"activation": activation, "norm": "rmsnorm"} for activation in ("gelu", "swiglu", "geglu")),
    *({"output_bias": True, "tie_embeddings": tied, "activation": "silu"} for tied in (True, False)),
    {"num_kv_heads": 2},
    {"head_dim": 20, "num_kv_heads": 1, "bias": False},
    {"embed_dim": 40, "num_heads": 5, "ffn_dim": 77, "source_vocab_size": 12, "tie_embeddings": True},
]


def check_steps(model: Any, source: Tensor, steps: int = 14) -> None:
    """Random trees of hypotheses, of sentences some of which leave."""
    generator = torch.Generator().manual_seed(0)
    with evaluating(model):
        plain, native = DecodingState(model, source), NativeState(model, source, prepared(model))
        tokens = torch.full((source.shape[0], 1), BOS)
        for step in range(steps):
            torch.testing.assert_close(native.step(tokens), plain.step(tokens), atol=2e-5, rtol=1e-4)
            parents = torch.randint(
                0, tokens.shape[1], (tokens.shape[0], (1, 4, 3, 9, 2, 7)[step % 6]), generator=generator
            )
            tokens = torch.randint(3, model.config.vocab_size, parents.shape, generator=generator)
            staying = torch.tensor([2, 0]) if step == 8 else torch.arange(tokens.shape[0])
            for state in (plain, native):
                state.choose(parents)
                if step == 8:
                    state.keep(staying)
            tokens = tokens[staying]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_mechanisms_step_by_step(mechanism: Any):
    check_steps(tiny(mechanism), sources([4, 2, 6]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_step_by_step(shape: dict[str, Any]):
    check_steps(tiny("entmax15", **shape), sources([4, 2, 6]))


def test_padding_on_the_left_and_a_long_source():
    model, source = tiny("entmax"), sources([90, 2, 40])
    check_steps(model, torch.where(source[:1] == PAD, source, source).flip(1))
    check_steps(model, source, steps=40)


@pytest.mark.parametrize("mechanism", ["softmax", "entmax15", "rela"])
def test_a_source_of_padding_alone(mechanism: str):
    """Cross-attention to nothing is zero."""
    source = sources([4, 2, 6])
    source[1] = PAD
    check_steps(tiny(mechanism), source, steps=4)


def test_a_token_out_of_the_vocabulary_is_refused():
    model = tiny()
    with evaluating(model):
        state = NativeState(model, sources([4, 2]), prepared(model))
        for token in (-1, model.config.vocab_size):
            with pytest.raises(IndexError, match="out of the vocabulary"):
                state.step(torch.full((state.source_lengths.numel(), 1), token))


def test_places_are_used_again():
    """The cache grows with what beams have in their past, not with what was ever written."""
    model, source = tiny("entmax15"), sources([4, 2])
    with evaluating(model):
        state = NativeState(model, source, prepared(model))
        state.step(torch.full((2, 1), BOS))
        for _ in range(100):
            state.choose(torch.zeros(2, 8, dtype=torch.long))  # all continue the first
            state.step(torch.full((2, 8), 5))
    assert state._decoding.places() <= 128


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "entmax15", "rela"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beam": 1, "n_best": 1},
        {"beam": 7, "n_best": 7, "length_penalty": 0.0},
        {"alpha": 1.5},
        {"min_length": 6, "max_ratio": 1.0},
        {"method": "sample", "n_best": 5, "top_k": 6, "temperature": 1.3},
        {"method": "sample", "n_best": 3, "top_p": 0.8, "alpha": 1.3},
    ],
    ids=str,
)
def test_searches_find_the_same(mechanism: str, changes: dict[str, Any], monkeypatch: Any):
    model, source = tiny(mechanism), sources([4, 2, 6, 11])
    config = DecodingConfig(**{"beam": 4, "n_best": 4, "max_length": 14, **changes})
    search = sample if config.method == "sample" else beam_search
    found = search(model, source, config=config, banned_ids=[7], **IDS)
    monkeypatch.setattr(starting, "obstacle", lambda model: "not now")
    expected = search(model, source, config=config, banned_ids=[7], **IDS)
    assert [[h.tokens for h in own] for own in found] == [[h.tokens for h in own] for own in expected]
    near = 1e-5 if config.alpha == 1.0 else 2e-3  # logarithms of weights next to zero
    for own, others in zip(found, expected, strict=True):
        assert [h.score for h in own] == pytest.approx([h.score for h in others], abs=near)


def test_weights_that_change_are_packed_again():
    model, source = tiny("entmax"), sources([4, 2])

    def logits() -> Tensor:
        with evaluating(model):
            return NativeState(model, source, prepared(model)).step(torch.full((2, 1), BOS))

    first = logits()
    assert prepared(model) is prepared(model)
    with torch.no_grad():
        model.decoder[0].feed_forward.up.weight.mul_(2.0)
    second = logits()
    model.decoder[1].feed_forward.down.weight.data.mul_(2.0)  # which torch does not count
    third = logits()
    with evaluating(model):
        expected = DecodingState(model, source).step(torch.full((2, 1), BOS))
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)
    torch.testing.assert_close(third, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16(),
        lambda model: model.decoder[0].feed_forward.up.register_forward_hook(lambda *args: None),
        lambda model: setattr(model.decoder[0], "feed_forward", torch.nn.Identity()),
        lambda model: setattr(model, "decode", None),
        lambda model: setattr(model.decoder[0].feed_forward, "activation", "gelu_tanh"),
        lambda model: setattr(model.decoder[0].feed_forward, "down", type("Own", (torch.nn.Linear,), {})(24, 16)),
    ],
)
def test_what_the_kernels_do_not_know_stays_with_the_model(change: Any):
    model = tiny("entmax")
    assert obstacle(model) is None
    change(model)
    assert obstacle(model) is not None


@pytest.mark.parametrize("mechanism", ["asentmax", "ssmax", "softpick", {"name": "rela", "activation": "gelu"}])
def test_other_mechanisms_stay_with_the_model(mechanism: Any):
    assert "mechanism" in str(obstacle(tiny(mechanism)))


def test_autocast_is_left_to_torch():
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in str(obstacle(tiny()))


def test_the_best_tokens():
    logits = torch.randn(2, 3, 1000) * 3
    logits[0, 0, 5:] = -torch.inf  # fewer than asked for
    forbidden = torch.tensor([17, 3])
    top, tokens = best_tokens(logits.clone(), 1.0, 6, forbidden)
    logs = logits.log_softmax(-1).index_fill(-1, forbidden, -torch.inf)
    expected = logs.topk(6)
    torch.testing.assert_close(top, expected.values)
    real = expected.values > -torch.inf
    assert torch.equal(tokens[real], expected.indices[real])
    logits[1, 2, 500] = torch.nan
    top, _ = best_tokens(logits, 1.0, 6, forbidden)
    assert top[1, 2].isnan().all()
    assert not top[:, :2].isnan().any()


# ---------------------------------------------------------------------------------------------------------------
# Quantised


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "asentmax"])
@pytest.mark.parametrize("quantize", ["int8", "bf16"])
def test_quantised_models_are_near(mechanism: str, quantize: str):
    """By the kernels, or where those do not know a mechanism by packed linear layers: little is lost."""
    model, source = tiny(mechanism, embed_dim=64, ffn_dim=96, sharpness=1.0), sources([4, 2, 6])
    tokens = torch.full((3, 1), BOS)
    with evaluating(model):
        expected = DecodingState(model, source).step(tokens)
        found = starting.start(model, source, quantize).step(tokens)
    error = (found - expected).norm() / expected.norm()
    assert 1e-5 < error < (0.05 if quantize == "int8" else 0.02)


def test_quantised_searches_run_with_all_options():
    model, source = tiny("entmax"), sources([4, 2, 6])
    for changes in ({}, {"beam": 1}, {"alpha": 1.5}, {"method": "sample"}):
        config = DecodingConfig(max_length=8, **changes)
        found = (sample if config.method == "sample" else beam_search)(
            model, source, config=config, quantize="int8", **IDS
        )
        assert all(EOS not in own[0].tokens for own in found)


def test_quantised_language_models_are_near():
    config = CausalLMConfig(vocab_size=50, embed_dim=64, num_heads=4, ffn_dim=96, num_layers=2)
    model = CausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        expected, found = model(tokens), quantized(model, "int8")(tokens)
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.05
    assert quantized(model, "int8") is quantized(model, "int8")


def test_bad_quantisation_is_refused():
    with pytest.raises(ValueError, match="65536"):
        product.Packed(torch.zeros(1, 65537), precision="int8")
    model, source = tiny(), sources([4])
    with pytest.raises(ValueError, match="int8"):
        beam_search(model, source, quantize="int9", **IDS)
    with pytest.raises(ValueError, match="fp32"):
        beam_search(tiny().bfloat16(), source, quantize="int8", **IDS)
