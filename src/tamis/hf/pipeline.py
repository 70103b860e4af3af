"""`pipeline("translation")`, which transformers had until version 5, for all models that it has the Auto classes for."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "translation"


class TranslationPipeline(Pipeline):
    """Sentences to ``{"translation_text": ...}``; further arguments are those of `generate`."""

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = True

    def _sanitize_parameters(
        self, truncation: bool | None = None, **generating: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {} if truncation is None else {"truncation": truncation}, generating, {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        # One sentence has one answer, in a list as it has always been.
        return found if not isinstance(args[0], str) else [found]

    def preprocess(self, sentence: str, truncation: bool = True) -> Any:
        if not isinstance(sentence, str):
            raise TypeError(f"a translation is made of a string, got {type(sentence).__name__}")
        assert self.tokenizer is not None
        return self.tokenizer(sentence, return_tensors="pt", truncation=truncation)

    def _forward(self, inputs: Any, **generating: Any) -> Any:
        generating.setdefault("generation_config", self.generation_config)
        inputs.pop("token_type_ids", None)
        return {"output_ids": self.model.generate(**inputs, **generating)}

    def postprocess(self, outputs: Any) -> dict[str, str]:
        assert self.tokenizer is not None
        return {"translation_text": self.tokenizer.decode(outputs["output_ids"][0], skip_special_tokens=True)}


def register_pipeline() -> None:
    """Add the task, unless this version of transformers has it."""
    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(TASK, TranslationPipeline, pt_model=AutoModelForSeq2SeqLM)
