"""Models of transformers as subjects: decoders, encoder-decoders and encoders, sparse or dense."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis import hf
from tamis.analysis.sites import NamedSite
from tamis.data.batching import IGNORED
from tamis.hf.pretrained import class_of
from tamis.report.live.codecs import Codec, Encoded, Numbers, Tokenizer
from tamis.report.live.subjects import LOGITS, Forced, Subject, forced, next_tokens, prompt_of
from tamis.settings import choose_device


def load(path: Path, name: str, device: str | None = None) -> HuggingFace:
    """A folder that `save_pretrained` wrote, sparse or dense; no hub is asked, and no code of the folder is run."""
    from transformers import AutoConfig, AutoTokenizer

    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds no model of transformers: there is no config.json")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path, **local)
    if isinstance(getattr(config, "tamis", None), dict):
        model = hf.from_pretrained(path, local_files_only=True)
    else:
        model = class_of(config).from_pretrained(path, **local)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model", "source.spm", "vocab.txt")
    known = any((path / file).is_file() for file in files)
    tokenizer = AutoTokenizer.from_pretrained(path, **local) if known else None
    return HuggingFace(name, model.to(choose_device(device)).eval(), tokenizer)


class HuggingFace(Subject):
    """A model of transformers; without a tokenizer, tokens are typed as numbers.

    A dense model stays as it is: a copy that shares its weights is looked at, whose softmax goes through our functions.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any = None) -> None:
        if not any(isinstance(module, NamedSite) for module in model.modules()):
            # Hooks of the copy would be in the original too, if they shared modules.
            shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
            model = hf.sparsify(copy.deepcopy(model, shared), "softmax").eval()
        self.writes = "nothing"
        if model.config.is_encoder_decoder:
            self.writes = "translation"
        elif model.can_generate():
            self.writes = "continuation"
        size = model.config.get_text_config().vocab_size
        source: Codec = Numbers(size) if tokenizer is None else Tokenizer(tokenizer)
        target: Codec = source if tokenizer is None else Tokenizer(tokenizer, target=self.writes == "translation")
        super().__init__(name, model, source, target)

    def write(self, text: str, most: int) -> str:
        if self.writes == "nothing":
            return ""
        read = self.source.encode(text)
        ids = torch.tensor([read.ids], device=self.device)
        found = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, num_beams=1
        )[0].tolist()
        if self.writes == "translation":
            return self.target.decode(found[1:])
        plain, whole = self.source.decode(read.ids), self.source.decode(found)
        if isinstance(self.source, Numbers):
            return " " + self.source.decode(found[len(read.ids) :])
        return whole[len(plain) :] if whole.startswith(plain) else self.source.decode(found[len(read.ids) :])

    def encode(self, text: str, answer: str) -> tuple[Encoded | None, Encoded]:
        if self.writes != "translation":
            return None, self.target.encode(text + answer)
        target = self.target.encode(answer)
        first = int(self.model.config.decoder_start_token_id)  # type: ignore[union-attr,arg-type]
        return self.source.encode(text), Encoded([first, *target.ids], [None, *target.spans], answer)

    def force(self, text: str, answer: str) -> Forced:
        source, target = self.encode(text, answer)
        if source is not None:
            end = self.model.config.eos_token_id  # type: ignore[union-attr]
            ends = end is not None and target.ids[-1] == end
            read = Encoded(target.ids[:-1], target.spans[:-1], target.text) if ends else target
            labels = [*target.ids[1:]] if ends else next_tokens(target.ids)
            ids, written = (torch.tensor([one.ids], device=self.device) for one in (source, read))
            logits = self.model(input_ids=ids, decoder_input_ids=written).logits
            return forced(source, read, 1, labels, [logits[0]])
        if self.writes == "nothing":
            self.model(input_ids=torch.tensor([target.ids], device=self.device))
            size = len(target.ids)
            return Forced(None, target, size, [IGNORED] * size, [1.0] * size, [0.0] * size, [-1] * size)
        return forced(None, target, prompt_of(target, text), next_tokens(target.ids), self._logits(target.ids))

    def _logits(self, ids: list[int]) -> Iterator[Tensor]:
        """In one call, or in parts where their logits would take much memory."""
        tokens = torch.tensor([ids], device=self.device)
        step = max(256, LOGITS // self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        if len(ids) <= step:
            yield self.model(input_ids=tokens, use_cache=False).logits[0]
            return
        cache = None
        for part in tokens.split(step, 1):
            found = self.model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            yield found.logits[0]
