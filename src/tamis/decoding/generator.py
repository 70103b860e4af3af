"""Text in, more text out: a language model with its vocabulary and its way of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tamis.data.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from tamis.decoding.folder import load_decoding, save_decoding
from tamis.decoding.quantized import check_quantize, quantized
from tamis.decoding.reading import read
from tamis.decoding.sampling import draw_tokens, random_numbers, token_probabilities
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.state import bytes_of
from tamis.files import seal
from tamis.models.causal_lm import CausalLM
from tamis.models.loading import model_folder
from tamis.nn.modes import evaluating
from tamis.settings import check_memory, choose_device


def check_method(config: DecodingConfig) -> DecodingConfig:
    """Raise unless a language model can write that way."""
    if config.method == "beam":
        raise ValueError('a language model draws or takes the likeliest token: method is "sample" or "greedy"')
    return config


class Continuation(NamedTuple):
    """What a model wrote after a prompt."""

    text: str
    """The prompt and what follows it."""
    score: float
    """Sum of the log-probabilities of what was drawn, after temperature, `top_k` and `top_p`."""
    tokens: list[int]
    """What follows the prompt, without eos."""
    finished: bool
    """Whether the document has ended, rather than reached the length limit."""


class TextGenerator:
    """Continues texts.

    Args:
        model: stays on the device it is on.
        decoding: the settings, each of which a call may override; `method` is "sample" or "greedy".
        quantize: "int8" or "bf16", as of a :class:`tamis.decoding.Translator`.
    """

    def __init__(
        self,
        model: CausalLM,
        vocabulary: Vocabulary,
        decoding: DecodingConfig | None = None,
        *,
        quantize: str | None = None,
    ) -> None:
        if len(vocabulary) > model.config.vocab_size:
            raise ValueError(
                f"the vocabulary has {len(vocabulary)} pieces, and the model embeds {model.config.vocab_size}"
            )
        if quantize is not None:
            check_quantize(quantize, model)
        self.model, self.vocabulary, self.quantize = model, vocabulary, quantize
        self.decoding = DecodingConfig(method="sample") if decoding is None else decoding

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device | None = None, **options: Any) -> Self:
        """Read a run folder (that holds model/) or a model folder; onto a GPU by default if there is one."""
        folder = model_folder(Path(path))
        place = choose_device(device)
        model = CausalLM.from_pretrained(folder)
        vocabulary, _ = load_vocabularies(folder)
        try:
            return cls(model.to(place).eval(), vocabulary, load_decoding(folder), **options)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write a model folder that `load` reads."""
        self.model.save_pretrained(folder)
        save_vocabularies(Path(folder), self.vocabulary, self.vocabulary)
        save_decoding(Path(folder), self.decoding)
        seal(Path(folder))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(self, prompts: Sequence[str], **overrides: Any) -> list[str]:
        """Each prompt with its first continuation.  `overrides` are settings of :class:`DecodingConfig`."""
        return [found[0].text for found in self.generate(prompts, **overrides)]

    def generate(self, prompts: Sequence[str], **overrides: Any) -> list[list[Continuation]]:
        """Return the `n_best` continuations of each prompt, of at most `max_length` tokens; no prompt begins a
        document.

        What is drawn is a function of the seed and the prompt, whatever other prompts there are.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of strings, got one string: put it in a list")
        config = self.settings(overrides)
        model = self.model if self.quantize is None else quantized(self.model, self.quantize)
        with evaluating(model):
            return [self._continued(model, prompt, config) for prompt in prompts]

    def settings(self, overrides: dict[str, Any]) -> DecodingConfig:
        """Return the settings of the model but for what is changed."""
        return check_method(DecodingConfig.from_dict({**self.decoding.to_dict(), **overrides}))

    def _continued(self, model: CausalLM, prompt: str, config: DecodingConfig) -> list[Continuation]:
        ids = [self.vocabulary.bos_id, *self.vocabulary.encode(prompt)]
        limit = config.max_length
        if (known := self.model.config.position_limit()) is not None:
            limit = min(limit, known - len(ids))
            if limit < 1:
                raise ValueError(f"the model has {known} positions, and the prompt fills {len(ids)}")
        needed = bytes_of(config.n_best, self.model.config.vocab_size, limit)
        what = f"{config.n_best:,} continuations of up to {limit:,} tokens"
        check_memory(needed, self.device, what, "n_best or max_length")
        drawn = self._draw(model, torch.tensor([ids], device=self.device), limit, config)
        found = []
        for tokens, score in zip(drawn.tokens.tolist(), drawn.scores.tolist(), strict=True):
            finished = self.vocabulary.eos_id in tokens
            kept = tokens[: tokens.index(self.vocabulary.eos_id)] if finished else tokens
            found.append(Continuation(self.vocabulary.decode([*ids, *kept]), score, kept, finished))
        return found

    def _draw(self, model: CausalLM, prompt: Tensor, limit: int, config: DecodingConfig) -> _Drawn:
        """Up to `limit` tokens after a prompt (1, L), `n_best` times."""
        cache = model.new_cache()
        logits = prompt.new_empty(0, dtype=torch.float32)
        for _, some in read(model, prompt, cache):
            logits = some[:, -1]
        cache.reorder(torch.zeros(config.n_best, dtype=torch.long, device=prompt.device))
        logits = logits.expand(config.n_best, -1)
        uniform = random_numbers(prompt, self.vocabulary.pad_id, [limit], config)[0]  # (limit, n_best)
        banned = self._banned(prompt.device)
        drawn = _Drawn(prompt.new_empty(config.n_best, 0), torch.zeros(config.n_best, device=prompt.device))
        ended = torch.zeros(config.n_best, dtype=torch.bool, device=prompt.device)
        for number in range(limit):
            early = number + 1 < config.min_length
            forbidden = torch.cat([banned, banned.new_tensor([self.vocabulary.eos_id])]) if early else banned
            probabilities = token_probabilities(logits, config, forbidden)
            if config.method == "greedy":
                best = probabilities.max(-1)
                tokens, logs = best.indices, best.values.log()
            else:
                tokens, logs = draw_tokens(probabilities, uniform[number])
            drawn.add(tokens, torch.where(ended, 0.0, logs))
            ended = ended | (tokens == self.vocabulary.eos_id)
            if ended.all() or number + 1 == limit:
                break
            logits = model(tokens[:, None], cache=cache)[:, -1]
        return drawn

    def _banned(self, device: torch.device) -> Tensor:
        """What is no part of a text, and rows of the output layer that no piece belongs to."""
        beyond = range(len(self.vocabulary), self.model.config.vocab_size)
        special = {self.vocabulary.pad_id, self.vocabulary.bos_id} - {self.vocabulary.eos_id}
        return torch.tensor([*sorted(special), *beyond], dtype=torch.long, device=device)


@dataclass
class _Drawn:
    tokens: Tensor
    """(n_best, so far)"""
    scores: Tensor
    """(n_best,)"""

    def add(self, tokens: Tensor, logs: Tensor) -> None:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        self.scores = self.scores + logs
        if not bool(self.scores.isfinite().all()):
            raise ValueError("there is no token to draw: the model's scores are NaN, or every token is forbidden")
