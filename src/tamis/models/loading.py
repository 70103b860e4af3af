"""A model from its folder, whatever kind it is of."""

from __future__ import annotations

import json
from pathlib import Path

from tamis.files import standing
from tamis.models.causal_lm import CausalLM
from tamis.models.pretrained import CONFIG, PretrainedModel
from tamis.models.seq2seq import Seq2Seq

KINDS: dict[str, type[PretrainedModel]] = {kind.__name__: kind for kind in (Seq2Seq, CausalLM)}


def load_model(folder: Path) -> PretrainedModel:
    """The model that `save_pretrained` wrote, of the kind that its config names."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}: is it a folder that save_pretrained wrote?")
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} does not say what kind of model it describes: {error!r}") from error
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{folder} must hold one of {', '.join(KINDS)}, got {kind!r:.100}")
    return KINDS[kind].from_pretrained(folder)


def model_folder(path: Path) -> Path:
    """That of a run, or the folder itself."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if (model := standing(path / "model")).is_dir():
        return model
    if (path / "config.toml").is_file():
        raise FileNotFoundError(f"{path} is a run without a model/: has it been trained to its end?")
    return path
