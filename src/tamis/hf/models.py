"""`Seq2Seq` and `CausalLM` as models of transformers: `generate`, the Trainer, pipelines and the Auto classes work.

model, tokenizer = tamis.hf.to_transformers("runs/multi30k")
model.save_pretrained(folder), tokenizer.save_pretrained(folder)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from tamis.data.vocabulary import Vocabulary, load_vocabularies
from tamis.hf.remote import SavesModule
from tamis.hf.strict import LoadsWhole
from tamis.hf.tokenizer import VocabularyTokenizer
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.models.config import ModelConfig
from tamis.models.loading import load_model, model_folder
from tamis.nn.cache import ModelCache

IGNORED = -100
"""The label of what is not to be learned."""
MAX_NEW_TOKENS = 256
"""That `generate` writes if it is not told otherwise."""


class TamisConfig(SavesModule, PreTrainedConfig):  # type: ignore[misc]
    """The config of one of our models, under the names that transformers looks for."""

    model: dict[str, Any] | None = None
    """The settings of the model itself."""

    @classmethod
    def of(cls: Any, config: ModelConfig, vocabulary: Vocabulary) -> Any:
        """That of a model whose output is written with a vocabulary."""
        limit = config.position_limit()
        settings: dict[str, Any] = {} if limit is None else {"max_position_embeddings": limit}
        return cls(
            model=config.to_dict(),
            vocab_size=config.vocab_size,
            hidden_size=config.embed_dim,
            num_attention_heads=config.num_heads,
            num_hidden_layers=getattr(config, "decoder_layers", getattr(config, "num_layers", 0)),
            tie_word_embeddings=False,  # tied ones are one tensor already
            pad_token_id=vocabulary.pad_id,
            bos_token_id=vocabulary.bos_id,
            eos_token_id=vocabulary.eos_id,
            **settings,
        )


class TamisSeq2SeqConfig(TamisConfig):
    model_type = "tamis_seq2seq"

    def auto_classes(self) -> dict[str, str]:
        model = "TamisForConditionalGeneration"
        return {"AutoConfig": type(self).__name__, "AutoModel": model, "AutoModelForSeq2SeqLM": model}

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: Vocabulary) -> Any:
        made = super().of(config, vocabulary)
        made.is_encoder_decoder, made.decoder_start_token_id = True, vocabulary.bos_id
        return made


class TamisCausalLMConfig(TamisConfig):
    model_type = "tamis_causal_lm"

    def auto_classes(self) -> dict[str, str]:
        model = "TamisForCausalLM"
        return {"AutoConfig": type(self).__name__, "AutoModel": model, "AutoModelForCausalLM": model}


class TamisCache(Cache):
    """Our own cache, as `generate` handles it."""

    def __init__(self, held: ModelCache) -> None:
        super().__init__(layers=[])
        self.held = held

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.held.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        layers = self.held.layers
        kept = layers[0].self_attention.contents() if layers else None
        if kept is not None:
            rows = torch.arange(kept[0].shape[0], device=kept[0].device)
            self.held.reorder(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        self.held.shorten(self.held.length - abs(tokens_to_remove))

    def __len__(self) -> int:
        return len(self.held.layers)


class TamisPreTrainedModel(LoadsWhole, PreTrainedModel):  # type: ignore[misc]
    """What both have in common."""

    base_model_prefix = "model"
    _no_split_modules = ["TransformerLayer"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = {"mechanism"}  # noqa: RUF012
    _supports_sdpa = True  # nobody else's attention is used: the setting is without effect
    model: Any

    def __init__(self, config: TamisConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        if not isinstance(config.model, dict):
            raise ValueError(f"config.json must hold the settings of the model under 'model', got {config.model!r}")
        with torch.device("cpu"):  # never "meta": tables that no file holds would be lost
            self.model = self._build(config.model) if model is None else model
        self._tables = {
            (path, name): module.get_buffer(name).clone()
            for path, module in self.named_modules()
            for name in module._non_persistent_buffers_set
            if getattr(module, name) is not None
        }
        self.post_init()

    def _build(self, settings: dict[str, Any]) -> nn.Module:
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        """Our models start as they want; but transformers empties the tables of a model that it loads."""
        path = next(path for path, known in self.named_modules() if known is module)
        for (place, name), table in self._tables.items():
            if place == path:
                module.get_buffer(name).copy_(table)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = TamisCache(self.model.new_cache())


class TamisForCausalLM(TamisPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model; labels are shifted here, as everywhere in transformers."""

    config: TamisCausalLMConfig
    model: CausalLM

    def _build(self, settings: dict[str, Any]) -> nn.Module:
        return CausalLM(CausalLMConfig.from_dict(settings))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TamisCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        past = _cache(self, past_key_values, use_cache and labels is None)
        mask = _new_part(attention_mask, input_ids)
        logits: Any = self.model(input_ids, mask, cache=None if past is None else past.held)
        loss = None if labels is None else _loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)


class TamisForConditionalGeneration(TamisPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """An encoder-decoder for translation."""

    config: TamisSeq2SeqConfig
    model: Seq2Seq

    def _build(self, settings: dict[str, Any]) -> nn.Module:
        return Seq2Seq(Seq2SeqConfig.from_dict(settings))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding if self.model.source_embedding is None else self.model.source_embedding

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return _Encoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to write the labels: they come one place later, after the start."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: TamisCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise ValueError("a translation model needs decoder_input_ids or labels")
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("a translation model needs input_ids or encoder_outputs")
            encoder_outputs = _Encoder(self.model)(input_ids, attention_mask)
        memory = encoder_outputs[0]
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids != self.model.config.pad_id
        past: Any = _cache(self, past_key_values, use_cache and labels is None)
        logits: Any = self.model.decode(
            decoder_input_ids,
            memory,
            None if attention_mask is None else attention_mask.bool(),
            None if past is None else past.held,
            _new_part(decoder_attention_mask, decoder_input_ids),
        )
        loss = None if labels is None else _loss(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=past, encoder_last_hidden_state=memory)


class _Encoder(nn.Module):
    """The first half of a model, as `generate` calls it; it is no part of what holds it."""

    main_input_name = "input_ids"

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self._held = (model,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        mask = None if attention_mask is None else attention_mask.bool()
        encoded: Any = self._held[0].encode(input_ids, mask)
        return BaseModelOutput(last_hidden_state=encoded)


def _cache(model: TamisPreTrainedModel, past: TamisCache | None, wanted: bool | None) -> TamisCache | None:
    if past is not None and not isinstance(past, TamisCache):
        raise TypeError(f"past_key_values must be what this model returned, a TamisCache, got {type(past).__name__}")
    return TamisCache(model.model.new_cache()) if past is None and wanted else past


def _new_part(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return the part of a mask that concerns these tokens; the cache remembers the rest."""
    return None if mask is None else mask[:, -tokens.shape[1] :].bool()


def _loss(logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Any:
    """The mean over the labels, or their sum over the count of a batch that comes in parts."""
    reduction = "mean" if count is None else "sum"
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().to(logits.device), ignore_index=IGNORED, reduction=reduction
    )
    return total if count is None else total / count


def to_transformers(path: str | Path) -> tuple[TamisPreTrainedModel, VocabularyTokenizer]:
    """The model and the tokenizer of a run or of a model folder of ours."""
    folder = model_folder(Path(path))
    source, target = load_vocabularies(folder)
    model: Any = load_model(folder)
    if isinstance(model, Seq2Seq):
        tokenizer = VocabularyTokenizer.of(source, target, append_eos=True)
        made: TamisPreTrainedModel = TamisForConditionalGeneration(TamisSeq2SeqConfig.of(model.config, target), model)
    else:
        tokenizer = VocabularyTokenizer.of(target, target, prepend_bos=True)
        made = TamisForCausalLM(TamisCausalLMConfig.of(model.config, target), model)
    made.generation_config = _generation(made.config, target)
    return made.eval(), tokenizer


def _generation(config: Any, vocabulary: Vocabulary) -> GenerationConfig:
    """Nothing is written that is no part of a text."""
    never = {config.pad_token_id, config.bos_token_id, *range(len(vocabulary), config.vocab_size)}
    start = {"decoder_start_token_id": config.decoder_start_token_id} if config.is_encoder_decoder else {}
    return GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        suppress_tokens=sorted(never - {config.eos_token_id}) or None,
        max_new_tokens=MAX_NEW_TOKENS,
        **start,
    )


def register() -> None:
    """Make these classes known to the Auto classes."""
    kinds: tuple[tuple[type[TamisConfig], type[TamisPreTrainedModel], Any], ...] = (
        (TamisSeq2SeqConfig, TamisForConditionalGeneration, AutoModelForSeq2SeqLM),
        (TamisCausalLMConfig, TamisForCausalLM, AutoModelForCausalLM),
    )
    for config, model, auto in kinds:
        model.config_class = config
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoTokenizer.register(config, tokenizer_class=VocabularyTokenizer, exist_ok=True)
        for known in (AutoModel, auto):
            known.register(config, model, exist_ok=True)


register()
