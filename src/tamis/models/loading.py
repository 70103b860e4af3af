"""A model from its folder, whatever kind it is of."""

from __future__ import annotations

from pathlib import Path

from tamis.files import standing
from tamis.models.causal_lm import CausalLM
from tamis.models.pretrained import PretrainedModel, saved_class
from tamis.models.seq2seq import Seq2Seq

KINDS: dict[str, type[PretrainedModel]] = {kind.__name__: kind for kind in (Seq2Seq, CausalLM)}


def load_model(folder: Path) -> PretrainedModel:
    """The model that `save_pretrained` wrote, of the kind that its config names."""
    if (kind := saved_class(folder)) not in KINDS:
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
