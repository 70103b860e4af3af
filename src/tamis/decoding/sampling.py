"""Sampling: from softmax, or from entmax, which cannot draw what it gives no probability.

Sparse Text Generation, Martins, Marinho and Martins 2020, https://arxiv.org/abs/2004.02644

Each sentence has random numbers of its own, a function of the seed and of its tokens alone: what is drawn for it does
not depend on the batch it is in, on its place there, or on padding; and the same sentence given twice gets the same
draws.  (Rounding may differ with the batch, and a draw exactly at a boundary with it.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tamis import functional
from tamis.decoding.search import Hypothesis, penalty
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.start import start
from tamis.decoding.state import check_ids, check_room, check_source, length_limits
from tamis.models.seq2seq import Seq2Seq
from tamis.nn.modes import evaluating


def sample(
    model: Seq2Seq,
    source: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    config: DecodingConfig | None = None,
    banned_ids: Sequence[int] = (),
    quantize: str | None = None,
) -> list[list[Hypothesis]]:
    """`n_best` draws for each sentence, independent of each other and in the order they were drawn.

    Scores are log-probabilities of what was drawn from: after temperature, `top_k`, `top_p`, `min_length` and
    `banned_ids`.  Arguments as in :func:`tamis.decoding.beam_search`.
    """
    config = DecodingConfig(method="sample") if config is None else config
    check_source(model, source)
    check_ids(model, bos_id=bos_id, eos_id=eos_id)
    with evaluating(model):
        sampling = _Sampling(model, source, bos_id, eos_id, config, banned_ids, quantize)
        while sampling.sentences.numel():
            sampling.step()
        return sampling.results


class _Sampling:
    """The draws of a batch: B sentences that are not over yet, with `n_best` hypotheses each."""

    def __init__(
        self,
        model: Seq2Seq,
        source: Tensor,
        bos_id: int,
        eos_id: int,
        config: DecodingConfig,
        banned_ids: Sequence[int],
        quantize: str | None,
    ) -> None:
        self.config, self.eos_id = config, eos_id
        self.results: list[list[Hypothesis]] = [[] for _ in range(source.shape[0])]
        self.banned = torch.tensor(list(banned_ids), dtype=torch.long, device=source.device)
        self.sentences = torch.arange(source.shape[0], device=source.device)
        if not self.results:
            return
        self.state = start(model, source, quantize)
        self.limits = length_limits(self.state, config)
        check_room(self.state, self.limits, config.n_best, "n_best")
        self.random = random_numbers(source, model.config.pad_id, self.limits.tolist(), config)
        self.written = torch.full((source.shape[0], config.n_best, 1), bos_id, device=source.device)
        self.scores = torch.zeros(source.shape[0], config.n_best, device=source.device)
        self.lengths = torch.zeros_like(self.written[:, :, 0])
        """As they are scored: with the end."""
        self.ended = torch.zeros_like(self.lengths, dtype=torch.bool)

    def step(self) -> None:
        """One more token of every hypothesis that has not ended."""
        length = self.written.shape[2]
        forbidden = self.banned
        if length < self.config.min_length:
            forbidden = torch.cat([self.banned, self.banned.new_tensor([self.eos_id])])
        probabilities = token_probabilities(self.state.step(self.written[:, :, -1]), self.config, forbidden)
        tokens, logs = draw_tokens(probabilities, self.random[:, length - 1])
        self.scores = self.scores + torch.where(self.ended, 0.0, logs)
        self.lengths = self.lengths + ~self.ended
        self.ended = self.ended | (tokens == self.eos_id)
        self.written = torch.cat([self.written, tokens.unsqueeze(2)], 2)
        over = self.ended.all(1) | (length >= self.limits)
        num_over, num_spoilt = torch.stack([over.sum(), self.scores.isfinite().logical_not().sum()]).tolist()
        if num_spoilt:
            raise ValueError("there is no token to draw: the model's scores are NaN, or every token is forbidden")
        if num_over:
            self._collect(over.nonzero().flatten())
            self._leave((~over).nonzero().flatten())

    def _collect(self, over: Tensor) -> None:
        columns = (self.written[:, :, 1:], self.scores, self.lengths, self.ended)
        rows = zip(self.sentences[over].tolist(), *(column[over].tolist() for column in columns), strict=True)
        for sentence, *hypotheses in rows:
            for tokens, score, length, ended in zip(*hypotheses, strict=True):
                normalised = score / penalty(length, self.config.length_penalty)
                self.results[sentence].append(Hypothesis(tokens[: length - ended], score, normalised, ended))

    def _leave(self, staying: Tensor) -> None:
        self.state.keep(staying)
        for name in ("sentences", "limits", "random", "written", "scores", "lengths", "ended"):
            setattr(self, name, getattr(self, name).index_select(0, staying))


def random_numbers(source: Tensor, pad_id: int, limits: Sequence[int], config: DecodingConfig) -> Tensor:
    """Uniform in [0, 1), (B, longest, n_best): for each sentence a function of the seed and its tokens."""
    numbers = torch.zeros(source.shape[0], max(limits), config.n_best, dtype=torch.float64)
    for row, tokens, limit in zip(numbers, source.tolist(), limits, strict=True):
        name = f"{config.seed}:{[token for token in tokens if token != pad_id]}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        row[:limit] = torch.rand(limit, config.n_best, generator=generator, dtype=torch.float64)
    return numbers.to(source.device)


def token_probabilities(logits: Tensor, config: DecodingConfig, forbidden: Tensor) -> Tensor:
    """What sampling draws from, (..., vocabulary) in fp32: rows sum to one, unless every token is forbidden."""
    scores = logits.float().index_fill(-1, forbidden, -math.inf) / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        top = scores.topk(config.top_k)
        scores = torch.full_like(scores, -math.inf).scatter_(-1, top.indices, top.values)
    probabilities = scores.softmax(-1) if config.alpha == 1.0 else functional.entmax(scores, config.alpha)
    if config.top_p is not None and config.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # what more probable tokens hold
        probabilities = probabilities.masked_fill((before >= config.top_p).gather(-1, order.argsort(-1)), 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True)


def draw_tokens(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, both (...), for numbers (...) in [0, 1): never one of probability zero."""
    sums = probabilities.double().cumsum(-1)
    total = sums[..., -1:]
    # The first token whose sum exceeds the number: it has a probability, since the sum before does not exceed it.
    number = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(sums, number, right=True).clamp_(max=sums.shape[-1] - 1)
    return tokens.squeeze(-1), probabilities.gather(-1, tokens).log().squeeze(-1)
