"""Sparse attention in Hugging Face models.

    import tamis.hf
    model = AutoModelForCausalLM.from_pretrained(...)
    tamis.hf.sparsify(model)

See docs/huggingface.md.
"""

import functools
import importlib
from pathlib import Path
from typing import Any

try:
    import transformers
except ImportError as error:
    raise ImportError("tamis.hf needs transformers: pip install 'tamis[hf]'") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"tamis.hf needs transformers 5.17 or newer, got {transformers.__version__}")

from tamis.hf.callback import SparsityCallback
from tamis.hf.classes import class_named as _twin_named
from tamis.hf.classes import promise, register_twins
from tamis.hf.convert import densify, sparsify
from tamis.hf.interface import register
from tamis.hf.pipeline import TranslationPipeline, register_pipeline
from tamis.hf.pretrained import from_pretrained
from tamis.hf.running import run_model
from tamis.hf.sampling import EntmaxLogitsProcessor
from tamis.hf.sites import AttentionSite
from tamis.hf.spread import measure_spread, set_spread
from tamis.hf.training import added_parameters, parameter_groups, sparsity_pressure

__all__ = [
    "AttentionSite",
    "EntmaxLogitsProcessor",
    "SparsityCallback",
    "TranslationPipeline",
    "added_parameters",
    "class_named",
    "densify",
    "from_pretrained",
    "measure_spread",
    "parameter_groups",
    "register",
    "run_model",
    "set_spread",
    "sparsify",
    "sparsity_pressure",
    "to_transformers",
]

_OWN = {
    "tamis_seq2seq": ("TamisSeq2SeqConfig", "TamisForConditionalGeneration"),
    "tamis_causal_lm": ("TamisCausalLMConfig", "TamisForCausalLM"),
}
"""Our own models in the form of transformers, by their `model_type`."""


def class_named(name: str) -> Any:
    """Return a class that saved folders name: one of our own, or the sparse twin of one of transformers.

    Args:
        name: as config.json has it.

    Returns:
        the class.
    """
    if name == "VocabularyTokenizer" or any(name in names for names in _OWN.values()):
        return getattr(_models(), name)
    return _twin_named(name)


def to_transformers(path: str | Path) -> Any:
    """Turn a run or a model folder of ours into a model and a tokenizer of transformers.

    Save both with `save_pretrained`; the folder then loads with the Auto classes.

    Args:
        path: a run folder or a model folder.

    Returns:
        the model and the tokenizer.
    """
    return _models().to_transformers(path)


def _models() -> Any:
    """Late, because vocabularies need more than transformers brings."""
    try:
        return importlib.import_module("tamis.hf.models")
    except ModuleNotFoundError as error:
        raise ImportError(f"models of tamis need {error.name}: pip install 'tamis[hf,train]'") from error


register()
register_twins()
register_pipeline()
for _kind, (_config, _) in _OWN.items():
    promise(_kind, functools.partial(class_named, _config))
