"""How well a language model predicts text at lengths that it was not trained at, and what it remembers there.

    full       the text is cut into windows of n tokens, and each token predicted from those before it in its window
    sliding    windows of n tokens overlap, and only what is new in each counts: no token has a short context

Every length scores the same tokens: pieces of documents as long as the greatest length are cut into shorter windows.
Texts are read with the cache, a part at a time, so that memory does not grow with the logits.

    passkey    a number stands at some depth of a text of n tokens; at its end the model has to find it likelier than
               nine others
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tamis.data.batching import IGNORED
from tamis.data.documents import DocumentCorpus
from tamis.data.packing import Places, Row
from tamis.data.passkey import PasskeyText
from tamis.data.tasks import stream
from tamis.data.vocabulary import Vocabulary
from tamis.decoding.reading import AT_A_TIME, read
from tamis.evaluation.likelihood import Likelihood, LikelihoodMeter
from tamis.functional import entmax
from tamis.models.causal_lm import CausalLM
from tamis.nn.modes import evaluating
from tamis.settings import LARGEST_SEED, Config, at_least, booleans, shares

MOST_CANDIDATES = 10_000
"""Each is put through the model, after every text."""
FIRST_BUCKET = 64
"""Places of the first bucket; each ends where the one before did, times two."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(Config):
    """Where and how carefully to look."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Of contexts.  Each divides the greatest."""
    stride: float = 0.5
    """How far a sliding window moves, as a share of its length; 0 leaves sliding windows out."""
    tokens: int = 1 << 18
    """About so many are scored at each length, from pieces spread evenly over the text."""
    across_documents: bool = False
    """Take all documents for one, where none is long enough by itself."""
    passkey_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Where the number stands, from 0 (the beginning) to 1 (the end)."""
    passkey_samples: int = 20
    """Texts at each length and depth; 0: none."""
    candidates: int = 10
    """Numbers to choose among."""
    batch_tokens: int = 1 << 15
    """Of one batch: the longer the texts, the fewer."""
    logit_tokens: int = AT_A_TIME
    """Tokens of a batch whose logits are held at once."""
    seed: int = 0
    """Of the numbers that are asked for."""

    def __post_init__(self) -> None:
        for name, kinds in (("lengths", (int,)), ("passkey_depths", (int, float))):
            given = getattr(self, name)
            if not isinstance(given, list | tuple) or not given or not all(type(x) in kinds for x in given):
                raise ValueError(f"{name} must be some numbers, got {given!r}")
            object.__setattr__(self, name, tuple(given))  # which TOML has not
        longest = max(self.lengths)
        if min(self.lengths) < 1 or any(longest % length for length in self.lengths):
            raise ValueError(
                f"lengths must be at least 1 and divide the greatest, so that all score the same tokens, "
                f"got {self.lengths}"
            )
        if not all(0.0 <= depth <= 1.0 for depth in self.passkey_depths):
            raise ValueError(f"passkey_depths must lie in [0, 1], got {self.passkey_depths}")
        shares(self, "stride")
        booleans(self, "across_documents")
        at_least(self, 1, "tokens", "batch_tokens", "logit_tokens")
        at_least(self, 2, "candidates", largest=MOST_CANDIDATES)
        at_least(self, 0, "passkey_samples")
        at_least(self, 0, "seed", largest=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Places of windows, from `start` to before `end`."""

    start: int
    end: int
    likelihood: Likelihood

    def to_dict(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, **self.likelihood.to_dict()}


@dataclass(frozen=True, kw_only=True)
class LengthPerplexity:
    """What was found at one length."""

    length: int
    mode: str
    """"full" or "sliding"."""
    likelihood: Likelihood
    buckets: list[Bucket]
    """By the place in the window; of sliding windows there is one."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "mode": self.mode,
            **self.likelihood.to_dict(),
            "buckets": [bucket.to_dict() for bucket in self.buckets],
            "seconds": self.seconds,
        }

    def describe(self) -> str:
        last = self.buckets[-1]
        places = f"{last.likelihood.perplexity:.2f} at places from {last.start}"
        return (
            f"{self.length:>7} tokens, {self.mode:7}  perplexity {self.likelihood.perplexity:8.2f}"
            f"{f'  ({places})' if self.mode == 'full' else ''}  {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class PasskeyScore:
    """How often the number was found, at one length and depth."""

    length: int
    depth: float
    samples: int
    accuracy: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def spans(corpus: DocumentCorpus, vocabulary: Vocabulary, config: LanguageConfig) -> list[Row]:
    """Pieces of text as long as the greatest length, spread evenly over what there is."""
    longest = max(config.lengths)
    whole: list[tuple[Places, int]] = []
    if config.across_documents:
        places = Places(corpus, vocabulary)
        whole = [(places, start) for start in range(0, len(places) - longest + 1, longest)]
    else:
        for number, length in enumerate((corpus.lengths + 1).tolist()):
            alone = Places(corpus, vocabulary, np.array([number]))
            whole += [(alone, start) for start in range(0, length - longest + 1, longest)]
    if not whole:
        there = len(Places(corpus, vocabulary)) if config.across_documents else int(corpus.lengths.max()) + 1
        unit = "the whole text has" if config.across_documents else "the longest document has"
        help_ = "" if config.across_documents else ", or set evaluation.across_documents = true"
        raise ValueError(
            f"a length of {longest} cannot be tested: {unit} {there} tokens; lower evaluation.lengths{help_}"
        )
    count = max(1, min(len(whole), config.tokens // longest))
    chosen = [whole[len(whole) * number // count] for number in range(count)]
    return [places.row(start, longest) for places, start in chosen]


def score_perplexity(
    model: CausalLM, pieces: Sequence[Row], length: int, mode: str, config: LanguageConfig, alpha: float = 1.0
) -> LengthPerplexity:
    """Of pieces of text cut into windows of `length` tokens; `alpha` is that of the output layer."""
    began = time.perf_counter()
    edges = _edges(length) if mode == "full" else [0, length]
    meters = [LikelihoodMeter(alpha) for _ in edges[1:]]
    with evaluating(model):
        for inputs, labels in _batches(_windows(pieces, length, mode, config.stride), length, config.batch_tokens):
            _add(model, inputs, labels, edges, meters, config.logit_tokens)
    whole = LikelihoodMeter(alpha)
    for meter in meters:
        whole.add(meter)
    return LengthPerplexity(
        length=length,
        mode=mode,
        likelihood=whole.result(),
        buckets=[
            Bucket(start=start, end=end, likelihood=meter.result())
            for start, end, meter in zip(edges, edges[1:], meters, strict=False)
        ],
        seconds=time.perf_counter() - began,
    )


def _edges(length: int) -> list[int]:
    """0, 64, 128, 256, ... and the length."""
    edges, end = [0], FIRST_BUCKET
    while end < length:
        edges.append(end)
        end *= 2
    return [*edges, length]


Window = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _windows(pieces: Sequence[Row], length: int, mode: str, stride: float) -> Iterator[Window]:
    """Inputs and labels of windows; what does not count has no label."""
    for piece in pieces:
        longest = len(piece.inputs)
        step = length if mode == "full" else max(1, round(stride * length))
        done = 0
        while done < longest:
            end = length if done == 0 else min(done + step, longest)
            window = slice(end - length, end)
            labels = piece.labels[window].copy()
            labels[: done - window.start] = IGNORED
            yield piece.inputs[window], labels
            done = end


def _batches(windows: Iterator[Window], length: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(B, length) each."""
    held: list[Window] = []
    for window in windows:
        held.append(window)
        if (len(held) + 1) * length > tokens:
            yield _stacked(held)
            held = []
    if held:
        yield _stacked(held)


def _stacked(windows: list[Window]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*windows, strict=True)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(labels))


def _add(
    model: CausalLM, inputs: Tensor, labels: Tensor, edges: list[int], meters: list[LikelihoodMeter], at_a_time: int
) -> None:
    """Put a batch of windows through the model, and its tokens into the meters of their places."""
    device = next(model.parameters()).device
    inputs, labels = inputs.to(device), labels.to(device)
    for places, logits in read(model, inputs, at_a_time=at_a_time):
        for start, end, meter in zip(edges, edges[1:], meters, strict=False):
            low, high = max(start, places.start), min(end, places.stop)
            if low < high:
                meter.update(logits[:, low - places.start : high - places.start], labels[:, low:high], IGNORED)


def score_passkeys(
    model: CausalLM, passkeys: PasskeyText, length: int, depth: float, config: LanguageConfig, alpha: float = 1.0
) -> PasskeyScore:
    """How often the number at `depth` of a text of `length` tokens is likelier than the other candidates.

    The texts depend on nothing but the length, the depth and the seed.
    """
    device = next(model.parameters()).device
    right = 0
    most = max(1, config.batch_tokens // length)
    with evaluating(model):
        for first in range(0, config.passkey_samples, most):
            prompts, answers = [], []
            for number in range(first, min(first + most, config.passkey_samples)):
                generator = stream("passkey test", config.seed, length, round(depth * 1000), number)
                keys = passkeys.draw(generator, "test", config.candidates)
                prompts.append(passkeys.prompt(length - passkeys.longest_answer, keys[0], depth))
                answers.append([passkeys.answer(key) for key in keys])
            size = max(map(len, prompts))
            assert all(len(prompt) == size for prompt in prompts)
            scores = _answer_scores(model, torch.tensor(prompts, device=device), answers, alpha, config.logit_tokens)
            # Not by argmax: where a sparse output layer gives none of them any probability, none is chosen.
            right += int((scores[:, :1] > scores[:, 1:]).all(1).sum())
    return PasskeyScore(
        length=length, depth=depth, samples=config.passkey_samples, accuracy=right / config.passkey_samples
    )


def _answer_scores(
    model: CausalLM, prompts: Tensor, answers: Sequence[Sequence[Sequence[int]]], alpha: float, at_a_time: int
) -> Tensor:
    """Log-probabilities (B, candidates) of answers after prompts (B, L), which are read once."""
    cache = model.new_cache()
    after = prompts.new_empty(0, dtype=torch.float32)
    for _, logits in read(model, prompts, cache, at_a_time):
        after = logits[:, -1:]
    scores = []
    for candidates in zip(*answers, strict=True):  # one of each row
        size = max(map(len, candidates))
        tokens = torch.tensor([[*ids, *[0] * (size - len(ids))] for ids in candidates], device=prompts.device)
        real = torch.tensor([[place < len(ids) for place in range(size)] for ids in candidates], device=prompts.device)
        logits = after
        if size > 1:
            logits = torch.cat([after, model(tokens[:, :-1], cache=cache)], 1)
            cache.shorten(prompts.shape[1])
        logs = logits.float().log_softmax(-1) if alpha == 1.0 else entmax(logits.float(), alpha).log()
        found = logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        scores.append(torch.where(real, found, 0.0).sum(1))
    return torch.stack(scores, 1)
