"""Models that one can ask: they write an answer to a text, and are made to write a given one while they are watched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tamis.data.batching import IGNORED
from tamis.decoding.alignment import padded
from tamis.decoding.generator import TextGenerator
from tamis.decoding.reading import read
from tamis.decoding.translator import Translator
from tamis.functional import entmax
from tamis.models.causal_lm import CausalLM
from tamis.report.live.codecs import Codec, Encoded, Numbers, Subwords

LOGITS = 1 << 24
"""Logits that are held at once."""


@dataclass(frozen=True)
class Forced:
    """A text and an answer as a model reads them, and what it makes of the answer."""

    source: Encoded | None
    target: Encoded
    prompt: int
    """Tokens of the target that were given, and not written."""
    labels: list[int]
    """The token that each target token is asked for, IGNORED where none."""
    chances: list[float]
    """The probability of each label; 1 where there is none."""
    logs: list[float]
    """Its logarithm."""
    best: list[int]
    """The likeliest token instead; -1 where nothing is asked."""


class Subject:
    """A model to look into."""

    writes: str
    """"translation", "continuation", or "nothing"."""

    def __init__(self, name: str, model: nn.Module, source: Codec, target: Codec) -> None:
        self.name, self.model, self.source, self.target = name, model, source, target

    def write(self, text: str, most: int) -> str:
        """The model's own answer, of about `most` tokens at most."""
        raise NotImplementedError

    def force(self, text: str, answer: str) -> Forced:
        """Run the model once while it writes the answer; weights are captured around this."""
        raise NotImplementedError

    def check(self, *texts: Encoded | None, most: int) -> None:
        """Refuse what is too long before anything is computed."""
        for encoded in texts:
            if encoded is not None and len(encoded.ids) > most:
                raise ValueError(f"a text may have {most:,} tokens here, this one has {len(encoded.ids):,}")

    def encode(self, text: str, answer: str) -> tuple[Encoded | None, Encoded]:
        """What `force` will read."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Translation(Subject):
    """A translator of ours."""

    writes = "translation"

    def __init__(self, name: str, translator: Translator) -> None:
        source, target = translator.source_vocabulary, translator.target_vocabulary
        super().__init__(
            name,
            translator.model,
            Subwords(source, after=[source.eos_id]),
            Subwords(target, before=[target.bos_id]),
        )
        self.translator = translator

    def write(self, text: str, most: int) -> str:
        return self.translator([text], max_length=min(most, self.translator.decoding.max_length))[0]

    def encode(self, text: str, answer: str) -> tuple[Encoded, Encoded]:
        return self.source.encode(text), self.target.encode(answer)

    def force(self, text: str, answer: str) -> Forced:
        source, target = self.encode(text, answer)
        labels = [*target.ids[1:], self.translator.target_vocabulary.eos_id]
        pad = self.translator.model.config.pad_id
        logits = self.model(padded([source.ids], pad, self.device), padded([target.ids], pad, self.device))
        return forced(source, target, 1, labels, [logits[0]], self.translator.decoding.alpha)


class Continuation(Subject):
    """A language model of ours, with its vocabulary or with numbers for tokens."""

    writes = "continuation"

    def __init__(self, name: str, generator: TextGenerator | CausalLM) -> None:
        self.generator = generator if isinstance(generator, TextGenerator) else None
        model = generator if isinstance(generator, CausalLM) else generator.model
        if self.generator is None:
            codec: Codec = Numbers(model.config.vocab_size)
        else:
            codec = Subwords(self.generator.vocabulary, before=[self.generator.vocabulary.bos_id])
        super().__init__(name, model, codec, codec)

    def write(self, text: str, most: int) -> str:
        ids = self.source.encode(text).ids
        if self.generator is None:
            tokens = _greedy(self.model, torch.tensor([ids], device=self.device), most)
        else:
            found = self.generator.generate([text], method="greedy", max_length=most)[0][0]
            tokens = found.tokens
        return _appended(self.source, ids, tokens, text)

    def encode(self, text: str, answer: str) -> tuple[None, Encoded]:
        return None, self.target.encode(text + answer)

    def force(self, text: str, answer: str) -> Forced:
        _, target = self.encode(text, answer)
        ids = torch.tensor([target.ids], device=self.device)
        step = max(1, LOGITS // self.model.config.vocab_size)  # type: ignore[union-attr,operator]
        logits = (some[0] for _, some in read(self.model, ids, at_a_time=step))  # type: ignore[arg-type]
        alpha = 1.0 if self.generator is None else self.generator.decoding.alpha
        return forced(None, target, prompt_of(target, text), next_tokens(target.ids), logits, alpha)


def _greedy(model: Any, prompt: Tensor, number: int) -> list[int]:
    cache, logits = model.new_cache(), prompt.new_empty(0)
    for _, some in read(model, prompt, cache):
        logits = some[:, -1]
    tokens: list[int] = []
    for _ in range(number):
        tokens.append(int(logits.argmax(-1)))
        logits = model(prompt.new_tensor([[tokens[-1]]]), cache=cache)[:, -1]
    return tokens


def _appended(codec: Codec, before: Sequence[int], tokens: Sequence[int], text: str) -> str:
    """What some tokens add to a text, the space before them included."""
    plain, whole = codec.decode(before), codec.decode([*before, *tokens])
    if whole.startswith(plain):
        added = whole[len(plain) :]
        return added.lstrip() if text[-1:].isspace() else added
    return codec.decode(tokens)


def prompt_of(target: Encoded, text: str) -> int:
    """How many of the tokens stand for the text itself, those before it included."""
    after = (number for number, span in enumerate(target.spans) if span is not None and span[0] >= len(text.rstrip()))
    return next(after, len(target.ids))


def next_tokens(ids: Sequence[int]) -> list[int]:
    """The label of each token of a language model: the one after it."""
    return [*ids[1:], IGNORED]


def forced(
    source: Encoded | None,
    target: Encoded,
    prompt: int,
    labels: list[int],
    logits: Iterator[Tensor] | Sequence[Tensor],
    alpha: float = 1.0,
) -> Forced:
    chances: list[float] = []
    logs: list[float] = []
    best: list[int] = []
    for part in logits:  # (some, vocabulary)
        wanted = torch.tensor(labels[len(best) : len(best) + len(part)], device=part.device)
        rows = part.float()
        probabilities = rows.softmax(-1) if alpha == 1.0 else entmax(rows, alpha)
        asked = wanted != IGNORED
        own = probabilities.gather(-1, wanted.clamp(min=0)[:, None])[:, 0]
        log = rows.log_softmax(-1).gather(-1, wanted.clamp(min=0)[:, None])[:, 0] if alpha == 1.0 else own.log()
        chances += torch.where(asked, own, 1.0).tolist()
        logs += torch.where(asked, log, 0.0).tolist()
        best += torch.where(asked, probabilities.argmax(-1), -1).tolist()
    return Forced(source, target, prompt, labels, chances, logs, best)
