"""How well a model does a task at lengths it was not trained at.

Answers are written greedily with the cache, as many tokens as the right one has, and compared with it token by token:

    exact match      share of sequences with every token right, EOS included
    token accuracy   share of tokens that are right, each after what the model wrote itself before it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.data.tasks import SequenceTask, stream
from tamis.evaluation.table import Table
from tamis.models.causal_lm import CausalLM
from tamis.nn.modes import evaluating
from tamis.settings import LARGEST_SEED, Config, at_least, numbers


@dataclass(frozen=True, kw_only=True)
class LengthsConfig(Config):
    """Where and how carefully to look."""

    multiples: tuple[float, ...] = (1, 2, 4, 8, 16)
    """Lengths of the test, as multiples of the longest length in training."""
    samples: int = 1000
    """Sequences at each length."""
    beyond: float = 16
    """A multiple from which on fewer sequences are drawn."""
    samples_beyond: int = 100
    """Sequences where the multiple is greater than `beyond`."""
    batch_tokens: int = 1 << 17
    """Tokens of one batch, answers included: the longer the sequences, the fewer of them."""
    seed: int = 0
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        if not isinstance(self.multiples, list | tuple) or not self.multiples:
            raise ValueError(f"multiples must be some numbers, got {self.multiples!r}")
        if not all(type(multiple) in (int, float) and 0 < multiple < 1e6 for multiple in self.multiples):
            raise ValueError(f"multiples must be numbers above 0 and below a million, got {self.multiples!r}")
        object.__setattr__(self, "multiples", tuple(self.multiples))  # which TOML has not
        at_least(self, 1, "samples", "samples_beyond", "batch_tokens")
        at_least(self, 0, "seed", largest=LARGEST_SEED)
        numbers(self, "beyond")

    def samples_at(self, multiple: float) -> int:
        return self.samples if multiple <= self.beyond else self.samples_beyond


@dataclass(frozen=True, kw_only=True)
class LengthScore:
    """What was found at one length."""

    multiple: float
    length: int
    samples: int
    exact_match: float
    token_accuracy: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """Return a row of the table that `HEADING` begins."""
        shares = f"{self.exact_match:>12.1%} {self.token_accuracy:>15.1%}"
        return f"{self.multiple:>8g}x {self.length:>8} {self.samples:>8} {shares} {self.seconds:>9.1f}"


HEADING = f"{'multiple':>9} {'length':>8} {'samples':>8} {'exact match':>12} {'token accuracy':>15} {'seconds':>9}"


def score_lengths(
    model: CausalLM,
    task: SequenceTask,
    trained: int,
    config: LengthsConfig | None = None,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda done: None,
) -> list[LengthScore]:
    """Score a model on test sequences at multiples of the length in training.

    Args:
        model: a decoder.
        task: what to do.
        trained: the longest length in training.
        config: multiples and numbers of sequences.
        say: told each score as soon as it is known.
        advance: told how many sequences are done.

    Returns:
        a score for each length.
    """
    config = LengthsConfig() if config is None else config
    say(HEADING)
    scores = []
    for multiple in config.multiples:
        scores.append(score_length(model, task, round(multiple * trained), multiple, config))
        say(scores[-1].describe())
        advance(len(scores))
    return scores


def score_length(
    model: CausalLM, task: SequenceTask, length: int, multiple: float, config: LengthsConfig
) -> LengthScore:
    """The score at one length; which sequences are drawn depends on nothing but the task, the length and the seed."""
    began = time.perf_counter()
    samples = config.samples_at(multiple)
    drawn = task.generate(samples, length, stream("test", config.seed, length), "test")
    device = next(model.parameters()).device
    right = []
    with evaluating(model):
        for tokens in drawn.tokens.split(max(1, config.batch_tokens // drawn.tokens.shape[1])):
            prompt, answer = tokens.to(device).tensor_split([drawn.prompt_length], 1)
            right.append((write(model, prompt, answer.shape[1]) == answer).cpu())
    found = torch.cat(right).double()  # (samples, answer)
    return LengthScore(
        multiple=multiple,
        length=length,
        samples=samples,
        exact_match=found.amin(1).mean().item(),
        token_accuracy=found.mean().item(),
        seconds=time.perf_counter() - began,
    )


def write(model: CausalLM, prompt: Tensor, number: int) -> Tensor:
    """The `number` likeliest next tokens (B, number), one after the other, after prompts (B, L)."""
    cache = model.new_cache()
    token = model(prompt, cache=cache)[:, -1:].argmax(-1)
    written = [token]
    for _ in range(number - 1):
        token = model(token, cache=cache).argmax(-1)
        written.append(token)
    return torch.cat(written, 1)


Scores = Mapping[str, Sequence[Sequence[LengthScore]]]
"""The scores of runs, those of one mechanism under its name."""


def lengths_table(scores: Scores, share: str = "exact_match") -> str:
    """Write scores by length as a table of Markdown: means, with the least and the greatest of several runs.

    Args:
        scores: runs of each system, by name.
        share: "exact_match" or "token_accuracy".

    Returns:
        the table.
    """
    title = f"{share.replace('_', ' ')}, %"
    return Table(title, {name: percents(runs, share) for name, runs in scores.items()}, unit="x").describe()


def percents(runs: Sequence[Sequence[LengthScore]], share: str) -> dict[float, list[float]]:
    """Return a share of all runs in percent, by ascending multiple."""
    found: dict[float, list[float]] = {}
    for score in sorted((score for run in runs for score in run), key=lambda score: score.multiple):
        found.setdefault(score.multiple, []).append(100 * getattr(score, share))
    return found
