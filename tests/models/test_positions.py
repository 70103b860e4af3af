"""Positions by specs: which settings they take, from configs and recipes of every kind, and what old files mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.cases import SMALL, causal_lm, logits, seq2seq
from tamis.experiments import GeneratedSequences, LanguageModel, Translation, read_recipe
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.nn import Attention
from tamis.positions import POSITIONS, ALiBi, LearnedPositions, RoPE, Sinusoidal, build_position

ROPE = {"name": "rope", "base": 500000, "scaling": 4}
HARMONIC = {"name": "alibi", "kind": "harmonic"}
RECIPES = Path(__file__).parents[2] / "recipes"

# As models of a version without tables wrote them.
OLD_LM = """{
  "model": "CausalLM", "vocab_size": 13, "embed_dim": 16, "num_heads": 4, "num_kv_heads": null, "head_dim": null,
  "ffn_dim": 24, "num_layers": 1, "mechanism": "asentmax", "position": "rope", "max_length": 1024,
  "rope_base": 500000.0, "activation": "geglu", "norm": "rmsnorm", "arrangement": "pre", "bias": false, "dropout": 0.0,
  "attention_dropout": 0.0, "tie_embeddings": true, "initial_spread": null
}"""
OLD_SEQ2SEQ = """{
  "model": "Seq2Seq", "vocab_size": 13, "source_vocab_size": null, "embed_dim": 16, "num_heads": 4,
  "num_kv_heads": null, "head_dim": null, "ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 1,
  "encoder_mechanism": "entmax", "decoder_mechanism": "entmax", "cross_mechanism": "entmax", "position": "learned",
  "max_length": 40, "rope_base": 10000.0, "activation": "relu", "norm": "layernorm", "arrangement": "pre",
  "bias": true, "dropout": 0.1, "attention_dropout": 0.1, "tie_embeddings": true, "initial_spread": null, "pad_id": 0
}"""


# ---------------------------------------------------------------------------------------------------------------
# Specs


def test_settings_reach_the_position():
    rope = build_position(ROPE, 32, 4)
    assert isinstance(rope, RoPE)
    assert (rope.head_dim, rope.base, rope.scaling) == (8, 500000, 4)
    assert build_position("rope", 32, 4, head_dim=6).head_dim == 6
    assert build_position(HARMONIC, 32, 3, head_dim=8).slopes().tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    assert build_position({"name": "learned", "max_length": 7}, 32, 4).weight.shape == (7, 32)
    assert build_position({"name": "sinusoidal", "base": 100.0}, 32, 4).base == 100.0
    assert build_position(rope, 1, 1) is rope


def test_a_model_attends_as_the_formula_of_its_spec_says():
    """Rotary: pairs as complex numbers, turned by pos / (scaling base^(2i / d))."""
    layer = causal_lm("softmax", position=ROPE).layers[0].self_attention.double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def turned(projection: torch.nn.Linear) -> torch.Tensor:
        y = projection(x).view(2, 9, 4, 4).transpose(1, 2)
        angles = torch.arange(9)[:, None] / (4 * 500000.0 ** torch.tensor([0.0, 0.5], dtype=torch.float64))
        z = torch.complex(y[..., :2], y[..., 2:]) * torch.exp(1j * angles)
        return torch.cat([z.real, z.imag], -1)

    scores = turned(layer.q_proj) @ turned(layer.k_proj).mT / 2.0
    expected = scores.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(layer.weights(x, is_causal=True), expected, atol=2e-6, rtol=0.0)  # angles are fp32


def test_harmonic_slopes_are_the_bias_of_a_model():
    layer = causal_lm("softmax", position=HARMONIC).layers[0].self_attention.double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = (project(x).view(2, 9, 4, 4).transpose(1, 2) for project in (layer.q_proj, layer.k_proj))
    distance = (torch.arange(9)[:, None] - torch.arange(9)).double()
    bias = -distance / torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None, None]
    scores = (query @ key.mT / 2.0 + bias).masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(layer.weights(x, is_causal=True), scores.softmax(-1), atol=1e-7, rtol=0.0)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_name_is_a_table_without_settings(name: str):
    torch.testing.assert_close(
        logits(causal_lm(position={"name": name})), logits(causal_lm(position=name)), atol=0, rtol=0
    )
    torch.testing.assert_close(logits(seq2seq(position={"name": name})), logits(seq2seq(position=name)), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "roope"}, "did you mean 'rope'"),
        ({"name": "rope", "bass": 2}, "position 'rope' must be one of base, scaling, got 'bass'; did you mean 'base'"),
        ({"name": "rope", "head_dim": 4}, "did you mean"),
        ({"name": "alibi", "kind": "harmonious"}, "did you mean 'harmonic'"),
        ({"name": "alibi", "kinds": "harmonic"}, "did you mean 'kind'"),
        ({"name": "nape", "base": 3}, "position 'nape' has no settings, got 'base'"),
        ({"name": "none", "base": 3}, "position 'none' has no settings, got 'base'"),
        ({"name": "rope", "base": "10000"}, "base must be a number above 0, got '10000'"),
        ({"name": "rope", "base": float("nan")}, "base must be a number above 0, got nan"),
        ({"name": "rope", "scaling": -1}, "scaling must be a number above 0, got -1"),
        ({"name": "rope", "scaling": True}, "scaling must be a number above 0, got True"),
        ({"name": "sinusoidal", "base": 0}, "base must be a number above 0, got 0"),
        ({"name": "learned", "max_length": 0}, "max_length must be an int of at least 1, got 0"),
        ({"base": 3}, "a position is given by its name or a table with one"),
        (7, "a position is given by its name or a table with one"),
    ],
)
def test_bad_specs(spec: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build_position(spec, 16, 4)
    with pytest.raises(ValueError, match=message):
        causal_lm(position=spec, max_length=1024)


def test_a_position_for_other_layers_does_not_fit():
    with pytest.raises(ValueError, match="built for num_heads=4, but the layer has 2"):
        Attention(16, 2, position=build_position("alibi", 16, 4))


# ---------------------------------------------------------------------------------------------------------------
# Settings beside the position, which a name alone is built with


@pytest.mark.parametrize("config", [CausalLMConfig, Seq2SeqConfig])
def test_fields_beside_a_name(config: Any):
    assert config(**SMALL, position="rope", rope_base=500.0).build_position().base == 500.0
    assert config(**SMALL, position="rope").build_position().base == 10000.0
    assert config(**SMALL, position=ROPE).build_position().base == 500000
    assert config(**SMALL, position={"name": "rope", "scaling": 2}, rope_base=500.0).build_position().base == 500.0
    assert config(**SMALL, position="learned").build_position().weight.shape == (32, 16)
    assert config(**SMALL, position="learned").position_limit() == 32
    sizes = {**SMALL, "max_length": 1024}
    assert config(**sizes, position={"name": "learned", "max_length": 7}).position_limit() == 7
    assert config(**SMALL, position=ROPE).position_limit() is None


def test_two_fields_that_say_different_things():
    with pytest.raises(ValueError, match=r"position says base = 500000, and rope_base = 5\.0: leave out rope_base"):
        causal_lm(position=ROPE, rope_base=5.0)
    with pytest.raises(ValueError, match="position says max_length = 7, and max_length = 32: leave out max_length"):
        causal_lm(position={"name": "learned", "max_length": 7})
    causal_lm(position=ROPE, rope_base=500000.0)


def test_descriptions():
    assert CausalLMConfig(**SMALL, position="rope", rope_base=5.0).describe_position() == "rope"
    assert CausalLMConfig(**SMALL, position=ROPE).describe_position() == "rope base=500000 scaling=4"


# ---------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("spec", [ROPE, HARMONIC, {"name": "learned", "max_length": 9}], ids=lambda s: s["name"])
@pytest.mark.parametrize("make", [causal_lm, seq2seq])
def test_a_model_comes_back_with_its_spec(make: Any, spec: dict[str, Any], tmp_path: Path):
    model = make(position=spec, max_length=1024)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(logits(loaded), logits(model))


def test_old_configs_load(tmp_path: Path):
    """The fields they have mean what they meant, and are all written again."""
    expected: dict[Any, tuple[str, type, dict[str, Any]]] = {
        CausalLM: (OLD_LM, RoPE, {"base": 500000.0, "scaling": 1.0, "head_dim": 4}),
        Seq2Seq: (OLD_SEQ2SEQ, LearnedPositions, {}),
    }
    for kind, (text, position, own) in expected.items():
        values = json.loads(text)
        values.pop("model")
        config = kind.config_class.from_dict(values)
        new = {"norm_eps": None, "output_bias": False}  # as if they were not there
        if kind is CausalLM:
            new["embedding_scale"] = 1.0
        assert config.to_dict() == {**values, **new}
        torch.manual_seed(0)
        model = kind(config).eval()
        model.save_pretrained(tmp_path / kind.__name__)
        (tmp_path / kind.__name__ / "checksums.json").unlink()  # folders had none either
        (tmp_path / kind.__name__ / "config.json").write_text(text)
        loaded = kind.from_pretrained(tmp_path / kind.__name__)
        assert torch.equal(logits(loaded), logits(model))
        built = loaded.position if kind is CausalLM else loaded.decoder_position
        assert type(built) is position
        assert {name: getattr(built, name) for name in own} == own
    assert loaded.decoder_position.weight.shape == (40, 16)


TRANSLATION = "name='x'\n[data]\ntrain='a.tsv'\nvalid='b.tsv'\n[model]\n"


def read_any(kind: str, path: Path, overrides: list[str]) -> Translation | LanguageModel | GeneratedSequences:
    if kind == "translation":
        (path / "recipe.toml").write_text(TRANSLATION)
        return read_recipe(path / "recipe.toml", overrides)
    if kind == "language":
        return read_recipe(RECIPES / "lm-demo.toml", overrides)
    return read_recipe(RECIPES / "tasks" / "sort.toml", overrides)


KINDS = ("translation", "language", "task")


def config_of(recipe: Any) -> Any:
    values = {key: value for key, value in recipe.model.items() if not key.endswith("mechanism")}
    return (Seq2SeqConfig if isinstance(recipe, Translation) else CausalLMConfig).from_dict({**values, "vocab_size": 9})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('{ name = "rope", base = 500000, scaling = 4 }', RoPE),
        ('{ name = "alibi", kind = "harmonic" }', ALiBi),
        ('"sinusoidal"', Sinusoidal),
    ],
)
def test_every_recipe_takes_them(kind: str, text: str, made: type, tmp_path: Path):
    recipe = read_any(kind, tmp_path, [f"model.position={text}"])
    position = config_of(recipe).build_position()
    assert isinstance(position, made)
    if made is RoPE:
        assert (position.base, position.scaling) == (500000, 4)
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "again.toml").model == recipe.model


@pytest.mark.parametrize("kind", KINDS)
def test_old_recipes_read(kind: str, tmp_path: Path):
    old = ["model.position=rope", "model.rope_base=500000.0", "model.max_length=2048"]
    assert config_of(read_any(kind, tmp_path, old)).build_position().base == 500000.0


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_name_what_is_wrong(kind: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"position: .* did you mean 'scaling'"):
        read_any(kind, tmp_path, ['model.position={ name = "rope", scale = 4 }'])
