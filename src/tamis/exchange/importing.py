"""`tamis import-hf`: a folder of transformers as a model folder of ours, the start of dense-to-sparse training.

Marian (OPUS-MT), GPT-2, and Llama, Mistral and Qwen2.  The folder is read as it is: nothing of transformers runs, and
no pickle is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tamis.data.vocabulary import SHARED, SOURCE, TARGET
from tamis.decoding.generator import TextGenerator
from tamis.decoding.translator import Translator
from tamis.exchange.architectures import READERS
from tamis.exchange.tokenizers import marian_vocabularies, tokenizers_vocabulary
from tamis.exchange.weights import Weights
from tamis.files import read_table, replace_folder, replacing
from tamis.models.causal_lm import CausalLM
from tamis.models.config import ModelConfig
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig

RECIPE = "recipe.toml"
SPARSE = '{ name = "entmax", start = 1.05 }'
OF_THE_DATA = ("vocab_size", "source_vocab_size", "pad_id")
Say = Callable[[str], None]


def import_folder(path: Path, output: Path, say: Say = print) -> Path:
    """Write a model folder of ours that computes what the model in `path` does, and a recipe to go on from it."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / RECIPE).is_file())):
        raise ValueError(f"{output} is there already, and is no imported model: name another --output")
    config = read_table(path / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise ValueError(f"model_type must be one of {', '.join(READERS)} to be imported, got {kind!r}")
    weights = Weights(path)
    made, state = READERS[kind](config, weights)
    weights.finish()
    model: Seq2Seq | CausalLM
    held: Translator | TextGenerator
    if isinstance(made, Seq2SeqConfig):
        source, target = marian_vocabularies(path, config)
        if source.fingerprint == target.fingerprint and torch.equal(
            state["source_embedding.weight"], state["embedding.weight"]
        ):
            made = replace(made, source_vocab_size=None)
            del state["source_embedding.weight"]
        model = Seq2Seq(made)
        model.load_state_dict(state)
        held = Translator(model.eval(), source, target)
    else:
        model = CausalLM(made)  # type: ignore[arg-type]
        model.load_state_dict(state)
        held = TextGenerator(model.eval(), tokenizers_vocabulary(path, config))
    replace_folder(output, lambda draft: _write(held, made, draft, output))
    say(f"{kind}, {model.num_parameters():,} parameters: {output}")
    say(f"to make it sparse, name your data in {output / RECIPE} and run `tamis train {output / RECIPE}`")
    return output


def _write(held: Translator | TextGenerator, config: ModelConfig, draft: Path, output: Path) -> None:
    held.save(draft)
    with replacing(draft / RECIPE) as file:
        file.write(_recipe(config, output).encode())


def _recipe(config: ModelConfig, output: Path) -> str:
    """What a recipe needs to begin with these weights."""
    mechanisms = ("encoder_mechanism", "decoder_mechanism", "cross_mechanism", "mechanism")
    defaults = {field.name: field.default for field in fields(config)}
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if value is not None and name not in (*OF_THE_DATA, *mechanisms) and value != defaults[name]
    }
    if isinstance(config, Seq2SeqConfig):
        data = ["[data]", 'train = ["train.en", "train.de"]', 'valid = ["valid.en", "valid.de"]']
        sides = ("model",) if config.source_vocab_size is None else ("source_model", "target_model")
        files = {"model": SHARED, "source_model": SOURCE, "target_model": TARGET}
        models = [f"{side} = {_toml(str(output / files[side]))}" for side in sides]
    else:
        length = min(512, config.position_limit() or 512)
        data = ["[text]", 'train = "train.txt"', 'valid = "valid.txt"', f"length = {length}"]
        models = [f"model = {_toml(str(output / SHARED))}"]
    lines = [
        f"name = {_toml(output.name)}",
        "",
        "# Where your text is.",
        *data,
        "",
        "[vocabulary]",
        *models,
        "",
        "[model]",
        '# Attention as it was is "softmax"; this begins next to it, and learns from there how sparse to be.',
        f"mechanism = {SPARSE}",
        *(f"{name} = {_toml(value)}" for name, value in settings.items()),
        "",
        "[training]",
        f"start = {_toml(str(output))}",
        "lr = 1e-4",
        "",
    ]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return repr(value) if isinstance(value, float) else json.dumps(value)
