"""From what a user has, a folder or a model, to a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tamis.decoding.generator import TextGenerator
from tamis.decoding.translator import Translator
from tamis.models.causal_lm import CausalLM
from tamis.models.loading import model_folder
from tamis.models.pretrained import saved_class
from tamis.report.live.subjects import Continuation, Subject, Translation
from tamis.settings import choose_device

VOCABULARIES = ("vocabulary.model", "source.model")


def subject_of(what: Any, name: str, tokenizer: Any = None) -> Subject:
    """Wrap a `Translator`, a `TextGenerator`, a `CausalLM` (tokens are typed as numbers) or a transformers model."""
    if isinstance(what, Subject):
        return what
    if isinstance(what, Translator):
        return Translation(name, what)
    if isinstance(what, TextGenerator | CausalLM):
        return Continuation(name, what)
    if any(kind.__module__.startswith("transformers.") for kind in type(what).__mro__):
        from tamis.report.live.hugging_face import HuggingFace

        return HuggingFace(name, what, tokenizer)
    raise TypeError(
        "there are pages for a Translator, a TextGenerator, a CausalLM, a model of transformers and folders of these, "
        f"got {type(what).__name__}; a model of another kind is shown on batches: show(model, [batch], run=...)"
    )


def load_subject(path: Path, name: str, device: str | torch.device | None = None) -> Subject:
    """A run folder or a model folder of ours: a translator, a language model, or the model of a task."""
    folder = model_folder(path)
    place = choose_device(device)
    if saved_class(folder) == "Seq2Seq":
        return Translation(name, Translator.load(path, place))
    if any((folder / vocabulary).is_file() for vocabulary in VOCABULARIES):
        return Continuation(name, TextGenerator.load(path, place))
    return Continuation(name, CausalLM.from_pretrained(folder).to(place).eval())


def load_hugging_face(path: Path, name: str, device: str | None = None) -> Subject:
    """A folder that transformers wrote."""
    from tamis.report.live.hugging_face import load

    return load(path, name, device)


def subjects_of(models: Any, tokenizer: Any = None) -> Sequence[Subject]:
    """Wrap one model, or several by name."""
    named = models if isinstance(models, Mapping) else {"model": models}
    return [subject_of(model, name, tokenizer) for name, model in named.items()]
