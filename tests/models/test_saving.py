"""Saved models come back to the bit, and broken ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.cases import causal_lm, every_position, logits, seq2seq
from tamis.models import CausalLM, Seq2Seq

SAVED: dict[str, Callable[[], Any]] = {
    "lm": causal_lm,
    "lm-untied": lambda: causal_lm(tie_embeddings=False),
    "lm-learned": lambda: causal_lm(position="learned"),
    "lm-table": lambda: causal_lm({"name": "rela", "variant": "i", "bias": -0.5}),
    "seq2seq": seq2seq,
    "seq2seq-untied": lambda: seq2seq(tie_embeddings=False),
    "seq2seq-source": lambda: seq2seq(source_vocab_size=9),
    "seq2seq-source-untied": lambda: seq2seq("rela", source_vocab_size=9, tie_embeddings=False, position="learned"),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_models_come_back_to_the_bit(name: str, tmp_path: Path):
    model = SAVED[name]()
    model.save_pretrained(tmp_path / "new" / "folder")
    torch.manual_seed(99)
    again = type(model).from_pretrained(tmp_path / "new" / "folder")
    assert again.config == model.config
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(logits(again), logits(model))


def test_saving_twice_overwrites(tmp_path: Path):
    first, second = causal_lm(), causal_lm(seed=1)
    first.save_pretrained(tmp_path)
    second.save_pretrained(str(tmp_path))
    assert torch.equal(CausalLM.from_pretrained(str(tmp_path)).embedding.weight, second.embedding.weight)


@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax", "ssmax"])
def test_a_bf16_model_comes_back_to_the_bit(mechanism: str, tmp_path: Path):
    model = causal_lm(mechanism)
    learned = {key: x.clone() for key, x in model.named_parameters() if ".mechanism." in key}
    assert learned
    model.bfloat16().save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(ours[key].float(), theirs[key].float()) for key in ours)
    for key, x in learned.items():
        assert theirs[key].dtype == torch.float32
        assert torch.equal(theirs[key], x)
    assert torch.equal(logits(again.bfloat16()), logits(model))


def test_a_bf16_model_comes_back_as_one(tmp_path: Path):
    model = causal_lm("entmax").bfloat16()
    model.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    assert {k: x.dtype for k, x in again.named_parameters()} == {k: x.dtype for k, x in model.named_parameters()}


def test_another_class_is_refused(tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"CausalLM.*Seq2Seq"):
        Seq2Seq.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        CausalLM.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        CausalLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "null", "\x00\xff"])
def test_a_broken_config_is_named(content: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        CausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage"])
def test_broken_weights_are_named(damage: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"\xff" * 64}[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        CausalLM.from_pretrained(tmp_path)


def edit(folder: Path, **changes: Any) -> None:
    """Change the config on purpose, so that its checksum goes too."""
    (folder / "checksums.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "REMOVE"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "did you mean 'num_layers'"),
        ({"num_layers": 3}, "layers"),
        ({"embed_dim": 32}, "size mismatch|shape"),
        ({"mechanism": "asentmx"}, "did you mean 'asentmax'"),
        ({"vocab_size": "REMOVE"}, "vocab_size"),
        ({"vocab_size": "13"}, "vocab_size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises((ValueError, RuntimeError), match=message):
        CausalLM.from_pretrained(tmp_path)


@every_position
@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax", "ssmax"])
def test_the_state_is_the_parameters_and_nothing_else(mechanism: str, position: str):
    """No slopes, no masks of heads, no tensor under two names."""
    for model in (causal_lm(mechanism, position=position), seq2seq(mechanism, position=position)):
        assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}
