"""Tiny models to decode with, and slow, plain ways to the same results."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tamis import functional
from tamis.models import Seq2Seq, Seq2SeqConfig

PAD, BOS, EOS = 0, 1, 2
IDS: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS}


def tiny(
    mechanism: Any = "entmax", vocab_size: int = 9, seed: int = 0, sharpness: float = 3.0, **options: Any
) -> Seq2Seq:
    """A random model, with outputs far enough from uniform that beams differ."""
    torch.manual_seed(seed)
    sizes = {"embed_dim": 16, "num_heads": 4, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    defaults = {"tie_embeddings": False, "max_length": 32, "pad_id": PAD}
    model = Seq2Seq(Seq2SeqConfig(vocab_size=vocab_size, **{**sizes, **chosen, **defaults, **options})).eval()
    with torch.no_grad():
        (model.embedding if model.output is None else model.output).weight.mul_(sharpness)
    return model


def sources(lengths: list[int], vocab_size: int = 9, seed: int = 0) -> Tensor:
    """Random sentences with their end, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths) + 1), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(3, vocab_size, (length,), generator=generator)
        row[length] = EOS
    return rows


def log_probs(logits: Tensor, alpha: float = 1.0) -> Tensor:
    return logits.log_softmax(-1) if alpha == 1.0 else functional.entmax(logits, alpha).log()


@torch.no_grad()
def rescored(model: Seq2Seq, source: Tensor, tokens: list[int], finished: bool, alpha: float = 1.0) -> float:
    """The score of a hypothesis of one sentence (Ls,), by the whole model at once and without a cache."""
    target = torch.tensor([[BOS, *tokens]])
    logs = log_probs(model(source[source != PAD][None], target), alpha)[0]
    labels = [*tokens, EOS] if finished else tokens
    return float(logs[range(len(labels)), labels].double().sum())


@torch.no_grad()
def plain_greedy(model: Seq2Seq, source: Tensor, steps: int, alpha: float = 1.0) -> tuple[list[int], bool]:
    """Tokens of one sentence (Ls,) and whether they ended."""
    tokens: list[int] = []
    for _ in range(steps):
        logs = log_probs(model(source[source != PAD][None], torch.tensor([[BOS, *tokens]])), alpha)[0, -1]
        best = int(logs.argmax())
        if best == EOS:
            return tokens, True
        tokens.append(best)
    return tokens, False


@torch.no_grad()
def every_ending(model: Seq2Seq, source: Tensor, steps: int, alpha: float = 1.0) -> dict[tuple[int, ...], float]:
    """All sequences of at most `steps` tokens, the end included, with their scores."""
    found = {}
    others = [token for token in range(model.config.vocab_size) if token != EOS]
    for length in range(steps):
        bodies = list(itertools.product(others, repeat=length))
        target = torch.tensor([[BOS, *body] for body in bodies])
        read = source[source != PAD].expand(len(bodies), -1)
        logs = log_probs(model(read, target), alpha)
        labels = torch.tensor([[*body, EOS] for body in bodies])
        scores = logs.gather(2, labels.unsqueeze(2)).squeeze(2).double().sum(1)
        found.update(zip(bodies, scores.tolist(), strict=True))
    return found
