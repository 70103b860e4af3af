"""`pipeline("translation")`, which transformers had until version 5."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "translation"
_Base: Any = Pipeline  # its methods are typed as taking anything by any name


class TranslationPipeline(_Base):  # type: ignore[misc]
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

    def __call__(self, sentences: str | list[str], **kwargs: Any) -> Any:
        """A list of answers, of one sentence too."""
        found = super().__call__(sentences, **kwargs)
        return [found] if isinstance(sentences, str) else found

    def preprocess(self, sentence: str, truncation: bool = True) -> Any:
        if not isinstance(sentence, str):
            raise TypeError(f"a translation is made of a string, got {type(sentence).__name__}")
        return self.tokenizer(sentence, return_tensors="pt", truncation=truncation)

    def _forward(self, inputs: Any, **generating: Any) -> Any:
        if not generating:
            generating["generation_config"] = self.generation_config
        return {"output_ids": self.model.generate(**inputs, **generating)}

    def postprocess(self, outputs: Any) -> dict[str, str]:
        return {"translation_text": self.tokenizer.decode(outputs["output_ids"][0], skip_special_tokens=True)}


def register_pipeline() -> None:
    """Add the task, unless this version of transformers has it."""
    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(TASK, TranslationPipeline, pt_model=AutoModelForSeq2SeqLM)
