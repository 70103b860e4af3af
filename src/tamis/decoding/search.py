"""Beam search and greedy search.

Beam search develops k = `beam` hypotheses of each sentence at once.  At every step the best k continuations of those
that are alive are kept; one that ends keeps its place, so that the search goes on with one beam fewer, and is over
when all k have ended, when the length limit is reached, or when nothing alive can still matter:

    A hypothesis of score s (a sum of log-probabilities, never above 0) can only lose score.  With the penalty
    lp(n) = ((5 + n) / 6) ^ length_penalty its normalised score can therefore never exceed s / max(lp(t + 1), lp(T)),
    where t is its length and T the limit: lp is monotone in n, and dividing by more brings a negative number up.
    If for the best one alive that is no more than the n_best-th best that has ended, the result cannot change.

With k = 1 this is greedy search.  Scores are those of the model's whole distribution, also where `banned_ids` or
`min_length` forbid tokens.  Log-probabilities of -inf, as sparse output layers give, are never taken: a sentence with
fewer than k possible continuations has fewer beams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.decoding.settings import DecodingConfig
from tamis.decoding.start import start
from tamis.decoding.state import best_tokens, check_ids, check_room, check_source, length_limits
from tamis.models.seq2seq import Seq2Seq
from tamis.nn.modes import evaluating


class Hypothesis(NamedTuple):
    """One translation of a sentence."""

    tokens: list[int]
    """Without the begin and the end."""
    score: float
    """Sum of log-probabilities, that of the end included."""
    normalised: float
    """The score over the length penalty, by which hypotheses are ranked."""
    finished: bool
    """Whether it has ended, rather than reached the length limit."""


def penalty(length: int, length_penalty: float) -> float:
    """((5 + length) / 6) ** length_penalty"""
    return ((5.0 + length) / 6.0) ** length_penalty


def beam_search(
    model: Seq2Seq,
    source: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    config: DecodingConfig | None = None,
    banned_ids: Sequence[int] = (),
    quantize: str | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` best hypotheses of each sentence, the best first.

    Those that ended come before those that reached the length limit, which fill up where too few ended.  There may be
    fewer than `n_best` where a sparse output layer leaves no more.

    Args:
        source: (B, Ls), each sentence with its end token, padded on either side with the model's pad_id.
        bos_id, eos_id: what every target begins and ends with.
        banned_ids: tokens that are never written.
        quantize: "int8" or "bf16", on a CPU with the C++ kernels; see :class:`tamis.decoding.Translator`.
    """
    config = DecodingConfig() if config is None else config
    check_source(model, source)
    check_ids(model, bos_id=bos_id, eos_id=eos_id)
    with evaluating(model):
        search = _BeamSearch(model, source, bos_id, eos_id, config, banned_ids, quantize)
        while search.active:
            search.step()
        return search.results


def greedy(
    model: Seq2Seq,
    source: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    config: DecodingConfig | None = None,
    banned_ids: Sequence[int] = (),
    quantize: str | None = None,
) -> list[list[Hypothesis]]:
    """The most probable token at each step: one hypothesis of each sentence.  Arguments as in :func:`beam_search`."""
    config = DecodingConfig() if config is None else config
    settings = {**config.to_dict(), "method": "beam", "beam": 1, "n_best": 1}
    one = DecodingConfig.from_dict(settings)
    ids = {"bos_id": bos_id, "eos_id": eos_id}
    return beam_search(model, source, **ids, config=one, banned_ids=banned_ids, quantize=quantize)


class _BeamSearch:
    """The search of a batch: B sentences that are not over yet, with W beams each, the best first."""

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
        self.active = source.shape[0] > 0
        if not self.active:
            return
        self.state = start(model, source, quantize)
        self.banned = torch.tensor(sorted(set(banned_ids)), dtype=torch.long, device=source.device)
        self.with_eos = torch.cat([self.banned, self.banned.new_tensor([eos_id])])
        self.limits = length_limits(self.state, config)
        check_room(self.state, self.limits, config.beam, "beam")
        longest = [penalty(limit, config.length_penalty) for limit in self.limits.tolist()]
        self.longest = torch.tensor(longest, device=source.device)
        batch, slots, device = source.shape[0], config.beam + 1, source.device
        self.sentences = torch.arange(batch, device=device)
        self.over = torch.zeros(batch, dtype=torch.bool, device=device)
        self.length = 0
        """Tokens written so far."""
        self.scores = torch.zeros(batch, 1, device=device)
        """(B, W); -inf for a beam that does not exist."""
        self.written = torch.full((batch, 1, 1), bos_id, device=device)
        """(B, W, 1 + length), the begin first."""
        # What has ended, in the order of ending.  The last slot takes what has not, so that all are written alike.
        self.ended = torch.zeros(batch, dtype=torch.long, device=device)
        self.ended_scores = torch.full((batch, slots), -math.inf, device=device)
        self.ended_normalised = self.ended_scores.clone()
        self.ended_lengths = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.ended_tokens = torch.zeros(batch, slots, int(self.limits.max()), dtype=torch.long, device=device)

    def step(self) -> None:
        """One more token of every hypothesis that is alive."""
        scores, parents, tokens, spoilt = self._candidates()
        stuck = scores[:, 0] == -math.inf
        ends = (tokens == self.eos_id) & (scores > -math.inf)
        self.length += 1
        self._record(ends, scores, parents)
        scores, order = torch.where(ends, -math.inf, scores).sort(dim=-1, descending=True, stable=True)
        done = self._done(scores[:, 0]) & ~self.over
        self.over = self.over | done
        alive = ((scores > -math.inf) & ~self.over[:, None]).sum(-1).amax()
        # The one look at the results: a GPU is waited for here.
        counts = torch.stack([done.sum(), self.over.sum(), alive, (spoilt & done).sum()])
        num_done, num_over, width, num_spoilt = counts.tolist()
        if num_spoilt:
            raise ValueError("the model's scores are not numbers (NaN): it cannot decode")
        order = torch.where(scores > -math.inf, order, order[:, :1])  # no beam, no tokens of its own in the cache
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        written = torch.cat([_rows(self.written, parents), tokens.unsqueeze(2)], 2)
        if num_done:
            self._collect(done.nonzero().flatten(), stuck, (self.scores, self.written), (scores, written))
        width = max(1, width)
        self.scores = torch.where(self.over[:, None], -math.inf, scores)[:, :width]
        self.written = written[:, :width]
        self.active = num_over < self.over.shape[0]
        if self.active:
            self.state.choose(parents[:, :width])
            if num_over * _LEAVE >= self.over.shape[0]:
                self._leave((~self.over).nonzero().flatten())

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best continuations of each sentence, the best first: (B, beam) scores, -inf where there are fewer than
        places left, the beams they continue and their last tokens; and whether scores were NaN, (B,)."""
        forbidden = self.with_eos if self.length + 1 < self.config.min_length else self.banned
        logits = self.state.step(self.written[:, :, -1])
        top, tokens = best_tokens(logits, self.config.alpha, self.config.beam, forbidden)  # (B, W, n)
        sums = (self.scores.unsqueeze(2) + top).flatten(1)
        scores, index = torch.where(sums.isnan(), -math.inf, sums).topk(min(self.config.beam, sums.shape[1]))
        places = (self.config.beam - self.ended).unsqueeze(1)
        scores = torch.where(torch.arange(scores.shape[1], device=scores.device) < places, scores, -math.inf)
        return scores, index // tokens.shape[2], tokens.flatten(1).gather(1, index), sums.isnan().any(1)

    def _record(self, ends: Tensor, scores: Tensor, parents: Tensor) -> None:
        """Write down the candidates that end."""
        slots = torch.where(ends, self.ended.unsqueeze(1) + ends.cumsum(1) - 1, self.config.beam)
        self.ended = self.ended + ends.sum(1)
        self.ended_scores.scatter_(1, slots, scores)
        self.ended_normalised.scatter_(1, slots, scores / penalty(self.length, self.config.length_penalty))
        self.ended_lengths.scatter_(1, slots, torch.full_like(slots, self.length - 1))
        tokens = _rows(self.written, parents)[:, :, 1:]
        self.ended_tokens[:, :, : self.length - 1].scatter_(1, slots.unsqueeze(2).expand_as(tokens), tokens)

    def _done(self, best: Tensor) -> Tensor:
        """Whether the result of a sentence is settled, given the score of the best hypothesis alive, (B,)."""
        kept = self.ended_normalised[:, :-1].topk(self.config.n_best).values[:, -1]
        bound = best / self.longest.clamp(min=penalty(self.length + 1, self.config.length_penalty))
        return (bound <= kept) | (self.length >= self.limits)

    def _collect(self, done: Tensor, stuck: Tensor, before: _Beams, after: _Beams) -> None:
        """The results of sentences that are over.  Where nothing could follow, what was alive before is returned."""
        columns = (self.ended_normalised, self.ended_scores, self.ended_lengths, self.ended_tokens)
        ended = [column[done, :-1].tolist() for column in columns]
        alive = [(scores[done].tolist(), written[done, :, 1:].tolist()) for scores, written in (before, after)]
        for i, (sentence, is_stuck) in enumerate(zip(self.sentences[done].tolist(), stuck[done].tolist(), strict=True)):
            rows = zip(*(column[i] for column in ended), strict=True)
            found = [
                Hypothesis(tokens[:n], score, value, True) for value, score, n, tokens in rows if score > -math.inf
            ]
            found.sort(key=lambda hypothesis: -hypothesis.normalised)
            scores, tokens = alive[0 if is_stuck else 1]
            divisor = penalty(self.length - is_stuck, self.config.length_penalty)
            rest = zip(tokens[i], scores[i], strict=True)
            found += [Hypothesis(own, score, score / divisor, False) for own, score in rest if score > -math.inf]
            self.results[sentence] = found[: self.config.n_best]

    def _leave(self, staying: Tensor) -> None:
        """Go on with these sentences only."""
        self.state.keep(staying)
        for name in ("sentences", "over", "limits", "longest", "scores", "written"):
            setattr(self, name, getattr(self, name).index_select(0, staying))
        for name in ("ended", "ended_scores", "ended_normalised", "ended_lengths", "ended_tokens"):
            setattr(self, name, getattr(self, name).index_select(0, staying))


_Beams = tuple[Tensor, Tensor]
"""Scores (B, W) and what is written (B, W, 1 + length)."""

_LEAVE = 8
"""Sentences that are over leave the batch when they are this part of it: leaving costs a copy of the caches."""


def _rows(written: Tensor, parents: Tensor) -> Tensor:
    """(B, W, L) and (B, V) to (B, V, L)"""
    return written.gather(1, parents.unsqueeze(2).expand(-1, -1, written.shape[2]))
