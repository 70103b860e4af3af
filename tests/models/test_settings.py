"""Bad settings are refused at once; how models start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.cases import causal_lm, seq2seq
from tamis.mechanisms import LearnedAlpha
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig


@pytest.mark.parametrize("kind", [CausalLM, Seq2Seq])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 10.0}, "vocab_size"),
        ({"embed_dim": -8}, "embed_dim"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 6}, "multiple of num_heads"),
        ({"embed_dim": 18}, "multiple of num_heads"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"max_length": 0}, "max_length"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -2}, "head_dim"),
        ({"head_dim": 5, "position": "rope"}, "even"),
        ({"position": "sinusodial"}, "did you mean 'sinusoidal'"),
        ({"position": None}, "position"),
        ({"norm": "layernrom"}, "did you mean 'layernorm'"),
        ({"arrangement": "prenorm"}, "did you mean 'pre'"),
        ({"activation": "gleu"}, "did you mean 'ge?lu'|did you mean 'geglu'"),
        ({"activation": {"": 1}}, "activation must be a string, got {'': 1}"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_dropout": 1.5}, "dropout"),
        ({"attention_dropout": -0.1}, "dropout"),
        ({"position": "nape", "num_heads": 1}, "NAPE"),
        ({"mechanism": "sparsmax"}, "did you mean 'sparsemax'"),
        ({"mechanism": None}, r"mechanism: a mechanism is given by its name .*got None"),
        ({"mechanism": {"alpha": 1.5}}, r"mechanism: a mechanism is given by its name"),
        ({"mechanism": {"name": "entmax", "alpha": 3.0}}, "alpha"),
        ({"mechanism": {"name": "rela", "activation": "rellu"}}, "relu"),
    ],
)
def test_bad_settings_are_refused_before_the_first_batch(kind: type, changes: dict[str, Any], message: str):
    make = causal_lm if kind is CausalLM else seq2seq
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_layers": -1}, "encoder_layers"),
        ({"decoder_layers": 1.5}, "decoder_layers"),
        ({"source_vocab_size": 0}, "source_vocab_size"),
        ({"pad_id": -1}, "pad_id"),
    ],
)
def test_bad_settings_of_seq2seq(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        seq2seq(**changes)


@pytest.mark.parametrize("config", [CausalLMConfig(vocab_size=5), Seq2SeqConfig(vocab_size=5, source_vocab_size=3)])
def test_configs_are_plain_values(config: Any):
    values = json.loads(json.dumps(config.to_dict()))
    assert type(config).from_dict(values) == config
    with pytest.raises(AttributeError):
        config.vocab_size = 6
    with pytest.raises(ValueError, match="did you mean 'embed_dim'"):
        type(config).from_dict({"vocab_size": 5, "embed_dims": 8})
    with pytest.raises(TypeError):
        type(config)(5)


@pytest.mark.parametrize("make", [causal_lm, seq2seq])
def test_a_seed_decides_the_start(make: Callable[..., nn.Module]):
    first, again, other = make(seed=3).state_dict(), make(seed=3).state_dict(), make(seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_starts_have_the_scale_of_the_papers():
    model = seq2seq(embed_dim=64, vocab_size=500, ffn_dim=256, tie_embeddings=False)
    assert model.embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    up = model.encoder[0].feed_forward.up
    assert up.weight.abs().max() <= (6.0 / (64 + 256)) ** 0.5
    assert up.weight.abs().max() > 0.98 * (6.0 / (64 + 256)) ** 0.5
    assert (up.bias == 0.0).all()
    raw = torch.cat([m.raw.flatten() for m in model.modules() if isinstance(m, LearnedAlpha)])
    assert raw.std() > 0.3  # N(0, 1), not zeroed


@pytest.mark.parametrize("spread", [1.0, 0.2, 3.0])
def test_the_spread_of_scores_at_the_start_is_that_of_the_config(spread: float):
    model = causal_lm(embed_dim=256, num_heads=4, head_dim=64, ffn_dim=8, num_layers=1, initial_spread=spread)
    attention = model.layers[0].self_attention
    x = torch.randn(2, 300, 256)
    query, key = (
        projection(x).view(2, 300, 4, 64).transpose(1, 2) for projection in (attention.q_proj, attention.k_proj)
    )
    assert (query @ key.mT / 8.0).std().item() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("spread", [0.0, -1.0, float("nan"), "1"])
def test_a_spread_that_is_none_is_refused(spread: Any):
    with pytest.raises(ValueError, match="initial_spread"):
        causal_lm(initial_spread=spread)


def test_the_spread_changes_queries_and_keys_alone():
    usual, narrow = causal_lm(initial_spread=1.0).state_dict(), causal_lm(initial_spread=0.25).state_dict()
    for name, tensor in usual.items():
        factor = 0.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        torch.testing.assert_close(narrow[name], factor * tensor)


def test_embeddings_are_as_large_as_the_config_says():
    config = CausalLMConfig(
        vocab_size=11, embed_dim=16, num_heads=2, num_layers=0, norm="layernorm", arrangement="post"
    )
    model = CausalLM(config)
    scaled = CausalLM(replace(config, embedding_scale=4.0))
    scaled.load_state_dict(model.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(scaled(tokens), 4.0 * model(tokens))
    with pytest.raises(ValueError, match=r"embedding_scale must be .* above 0"):
        replace(config, embedding_scale=0.0)


@pytest.mark.parametrize("kind", [CausalLM, Seq2Seq])
@pytest.mark.parametrize("layers", [4097, 10**5, 10**9, 10**400])
def test_so_many_layers_are_refused(kind: type, layers: int):
    build, names = (causal_lm, ["num_layers"]) if kind is CausalLM else (seq2seq, ["encoder_layers", "decoder_layers"])
    for name in names:
        with pytest.raises(ValueError, match=f"{name} must be an int of at most 4096"):
            build(**{name: layers})


SIZES = {"vocab_size": 2**31 - 1, "embed_dim": 2**30, "ffn_dim": 2**31 - 1, "head_dim": 2**30, "num_kv_heads": 2**30}


@pytest.mark.parametrize("build", [causal_lm, seq2seq])
@pytest.mark.parametrize("name", SIZES)
def test_a_model_beyond_the_memory_is_refused(build: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch):
    """Before anything is allocated: the system lends more than it has, and then ends the process."""
    monkeypatch.setattr("tamis.settings.free_bytes", lambda device: 10**9)
    with pytest.raises(
        ValueError, match=r"a model of about [0-9,]+ weights would take .* of memory, and 1.0 GB are free"
    ):
        build(**{name: SIZES[name], "position": "none"})


def test_learned_positions_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tamis.settings.free_bytes", lambda device: 10**9)
    with pytest.raises(ValueError, match="are free: lower the sizes under"):
        causal_lm(position="learned", max_length=10**8)


@pytest.mark.parametrize("build", [causal_lm, seq2seq])
@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": False, "activation": "swiglu", "num_kv_heads": 1}])
def test_weights_are_counted_without_them(build: Callable[..., Any], settings: dict[str, Any]):
    settings = {
        "vocab_size": 1000,
        "embed_dim": 64,
        "num_heads": 4,
        "ffn_dim": 256,
        "position": "learned",
        "bias": False,
        **settings,
    }
    model = build(**settings)
    assert model.config.num_weights() == pytest.approx(model.num_parameters(), rel=0.02)
