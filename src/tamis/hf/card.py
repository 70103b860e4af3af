"""The model card of a saved model with sparse attention."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tamis.analysis.learned import learned_alphas
from tamis.files import replacing
from tamis.hf.sites import parts_of
from tamis.settings import describe_spec

CARD = "README.md"


def write_card(model: PreTrainedModel, folder: Path) -> None:
    """Write README.md, with how to load the model and what its attention is; one that is there stays."""
    if not (folder / CARD).exists():
        with replacing(folder / CARD) as file:
            file.write(describe(model).encode())


def describe(model: PreTrainedModel) -> str:
    """The text of the card."""
    auto = _auto_class(type(model).__name__)
    sites = defaultdict(list)
    for _, part in parts_of(model):
        own = {key: value for key, value in part.spec.items() if key != "name"}
        sites[describe_spec(part.spec["name"] or "a mechanism of its own,", own)].append(part.site)
    lines = [f"- {spec}: {', '.join(names)}" for spec, names in sites.items()]
    alphas = learned_alphas(model)
    learned = [f"{min(heads):.3f} to {max(heads):.3f} in {site}" for site, heads in alphas.items()]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags: [tamis, sparse-attention]",
            "---",
            "",
            f"# {type(model).__name__} with sparse attention",
            "",
            "Its attention puts exact zeros on what does not matter. It needs `pip install 'tamis[hf]'`:",
            "",
            "```py",
            "import tamis.hf",
            f"from transformers import {auto}",
            "",
            f'model = {auto}.from_pretrained("path or name of this folder")',
            "```",
            "",
            "Without the first line, pass `trust_remote_code=True`, which runs the few lines of `tamis_model.py`.",
            "",
            "## Attention",
            "",
            *lines,
            *(["", f"Learned alphas (1 is softmax): {'; '.join(learned)}."] if learned else []),
            "",
        ]
    )


def _auto_class(name: str) -> str:
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "AutoModelForCausalLM"
    return "AutoModelForSeq2SeqLM" if name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values() else "AutoModel"
