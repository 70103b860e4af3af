"""Attention of a few queries to keys that lie in several places: on other processes, or in parts of a cache.

The threshold tau of a row of entmax, p = [(alpha - 1) s - tau]_+^(1 / (alpha - 1)), can only grow with more keys.  So

    1. every shard solves its own keys, and the largest of these thresholds bounds that of the row from below;
    2. only scores above it can have a weight: these are gathered, few where weights are sparse;
    3. the row is solved from them, alike everywhere, and what each shard's values add to the output is summed.

Where more than a budget of scores are above it, and for alpha = 1, the row is solved by Newton steps whose sums over
keys are summed over shards.  ReLU attention needs the last sum only; other rules gather all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tamis.attention.call import Call, Window, check_call
from tamis.attention.rules import BoundActivation, BoundEntmax, Entmax, Rule, bind
from tamis.parallel.exchange import Exchange
from tamis.parallel.mesh import exchange_of
from tamis.transforms.entmax import entmax_weights
from tamis.transforms.solver import Power, compute_dtype, smallest_log

_ENTMAX15 = Entmax(1.5)
_ROUNDING = 16
"""Units of the last place by which a threshold is taken lower, so that nothing at it is lost."""


class Places(TypedDict, total=False):
    """Where shards are, and where in their sequence: keyword arguments that the functions share."""

    mesh: DeviceMesh | Exchange | None
    dim: str
    query_positions: Tensor | None
    key_positions: Sequence[Tensor] | None
    key_lengths: Sequence[Tensor] | None
    window: Window | None


@torch.no_grad()
def sharded_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rule: Rule = _ENTMAX15,
    alibi_slopes: Tensor | None = None,
    budget: int = 1024,
    **places: Unpack[Places],
) -> Tensor:
    """Compute :func:`tamis.attention` to keys and values in shards; without a gradient.

    Args:
        query: (B, H, Lq, D), the same in every process.
        keys, values: the shards of this process, (B, Hk, n, D) and (B, Hk, n, Dv), of any lengths.
        budget: scores of a row that each process sends at most; where there would be more it sends sums.

    The keywords `places` say where shards are:

    - mesh: shards of all processes of its dimension `dim`, "context" by default, belong together, in the order of
      ranks; without it those of this process are all.
    - query_positions: (Lq,) or (B, Lq); by default the queries are the last of all tokens.
    - key_positions: of each shard here, (n,) or (B, n); by default shards lie end to end.
    - key_lengths: of each shard here, (B,); its keys from this index on are padding.  Give positions with it.
    - window: as in :func:`tamis.attention`.

    Returns:
        (B, H, Lq, Dv) in the dtype of `query`, in every process.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "alibi_slopes": alibi_slopes}
    shards = _shards(query, keys, values, options, **places)
    bound = bind(rule, shards.calls[0])
    if isinstance(bound, BoundActivation):
        out = _activated(shards, bound)
    elif not isinstance(bound, BoundEntmax):
        out = _from_all_scores(shards, bound)
    else:
        assert bound.e is not None
        out = _entmax(shards, bound.e, budget)
    return out.to(shards.calls[0].query.dtype)


@torch.no_grad()
def sharded_counts(
    query: Tensor,
    keys: Sequence[Tensor],
    is_causal: bool = False,
    enable_gqa: bool = False,
    **places: Unpack[Places],
) -> Tensor:
    """Count the keys of all shards that each query sees: the n of length-aware scales.

    Args:
        query, keys, and the rest: as in :func:`sharded_attention`.

    Returns:
        counts (B or 1, H or 1, Lq).
    """
    return _shards(query, keys, keys, {"is_causal": is_causal, "enable_gqa": enable_gqa}, **places).counts()


@dataclass(frozen=True)
class _Shards:
    """A call for each shard of this process, and who has the others."""

    calls: list[Call]
    exchange: Exchange

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        return self.exchange.maximum(torch.stack(list(parts)).amax(0))

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return self.exchange.total(torch.stack(list(parts)).sum(0))

    def counts(self) -> Tensor:
        return self.total(torch.broadcast_tensors(*[call.counts() for call in self.calls]))

    def masked_scores(self, hidden: float) -> list[Tensor]:
        """(B, H, Lq, n) in the compute dtype, `hidden` where a key is not seen."""
        scored = [_scores(call) for call in self.calls]
        return [scores if keep is None else torch.where(keep, scores, hidden) for scores, keep in scored]


def _shards(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], options: dict[str, Any], **places: Unpack[Places]
) -> _Shards:
    """Checked; every process of the mesh calls it."""
    exchange = exchange_of(places.get("mesh"), places.get("dim", "context"))
    window, query_positions = places.get("window"), places.get("query_positions")
    key_positions, key_lengths = places.get("key_positions"), places.get("key_lengths")
    listed = {"keys": keys, "values": values, "key_positions": key_positions, "key_lengths": key_lengths}
    for name, given in listed.items():
        if given is not None and (isinstance(given, Tensor) or len(given) != len(keys) or not len(keys)):
            shown = "a tensor" if isinstance(given, Tensor) else f"{len(given)} for {len(keys)} shards of keys"
            raise ValueError(f"{name} must be a list of one tensor for each shard, at least one, got {shown}")
    compared = options["is_causal"] or window is not None or options.get("alibi_slopes") is not None
    if key_lengths is not None and compared and (key_positions is None or query_positions is None):
        raise ValueError("with key_lengths it is not known where shards begin: give key_positions and query_positions")
    own = sum(key.shape[2] for key in keys)
    lengths = exchange.gather(torch.tensor(own, device=query.device)).tolist()
    start = sum(lengths[: exchange.layout.rank])
    if query_positions is None:
        query_positions = torch.arange(sum(lengths) - query.shape[2], sum(lengths), device=query.device)
    calls = []
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        end_to_end = torch.arange(start, start + key.shape[2], device=query.device)
        call = check_call(
            query,
            key,
            value,
            query_positions=query_positions,
            key_positions=end_to_end if key_positions is None else key_positions[number],
            key_lengths=None if key_lengths is None else key_lengths[number],
            window=window,
            **options,
        )
        calls.append(call)
        start += key.shape[2]
    return _Shards(calls, exchange)


def _scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Biased scores (B, H, Lq, n) and which keys are seen; keys that heads share are read once."""
    dtype = compute_dtype(call.query.dtype)
    grouped = call.query.to(dtype).unflatten(1, (call.key.shape[1], -1)).flatten(2, 3)
    scores = (grouped @ call.key.to(dtype).mT).view(call.shape) * call.scale
    everything = slice(None)
    keep, bias = call.visibility.block(everything, everything, everything)
    return (scores if bias is None else scores + bias.to(dtype)), keep


def _times_values(weights: Tensor, call: Call) -> Tensor:
    """(B, H, Lq, n) and the values of a shard to (B, H, Lq, Dv)."""
    grouped = weights.unflatten(1, (call.value.shape[1], -1)).flatten(2, 3)
    return (grouped @ call.value.to(weights.dtype)).view(*weights.shape[:3], -1)


def _activated(shards: _Shards, rule: BoundActivation) -> Tensor:
    """Weights of their own scores alone."""
    if rule.scale is not None:
        rule = replace(rule, scale=1.0 / shards.counts().clamp(min=1).unsqueeze(-1).to(rule.scale.dtype))
    outputs = []
    for call in shards.calls:
        scores, keep = _scores(call)
        hidden = scores if keep is None else torch.where(keep, scores, rule.hidden)
        outputs.append(_times_values(rule.dense(hidden, keep), call))
    return shards.total(outputs)


def _from_all_scores(shards: _Shards, rule: Rule) -> Tensor:
    """For rules of which no more is known: every process has all scores of a row, and its own values."""
    scored = [_scores(call) for call in shards.calls]
    scores = torch.cat([scores for scores, _ in scored], -1)
    seen = [torch.ones_like(s, dtype=torch.bool) if keep is None else keep.expand(s.shape) for s, keep in scored]
    keep = torch.cat(seen, -1)
    scores, keep = _side_by_side(shards, scores, 0.0), _side_by_side(shards, keep.byte(), 0).bool()
    weights = rule.dense(torch.where(keep, scores, rule.hidden), keep)
    return _own_outputs(shards, weights, [s.shape[-1] for s, _ in scored])


def _own_outputs(shards: _Shards, weights: Tensor, widths: list[int]) -> Tensor:
    """The output, from the weights of all processes side by side, of which this one's shards have `widths`."""
    width = weights.shape[-1] // shards.exchange.size
    own = weights[..., shards.exchange.layout.rank * width :]
    parts = own[..., : sum(widths)].split(widths, -1)
    return shards.total([_times_values(part, call) for part, call in zip(parts, shards.calls, strict=True)])


def _side_by_side(shards: _Shards, rows: Tensor, fill: float) -> Tensor:
    """Those (B, H, Lq, n) of all processes, each filled up to the widest, in the order of ranks."""
    width = int(shards.exchange.maximum(torch.tensor(rows.shape[-1], device=rows.device)).item())
    gathered = shards.exchange.gather(F.pad(rows, (0, width - rows.shape[-1]), value=fill))
    return gathered.movedim(0, -2).flatten(-2)


# ---------------------------------------------------------------------------------------------------------------
# Entmax


def _entmax(shards: _Shards, e: Power, budget: int) -> Tensor:
    scores = shards.masked_scores(-torch.inf)
    spoilt = shards.maximum([s.isnan().any(-1, keepdim=True).byte() for s in scores]).bool()
    scores = [s.masked_fill(spoilt, 0.0) for s in scores]
    candidates = None if isinstance(e, float) and e == 0.0 else _candidates(shards, scores, e, budget)
    out = _by_sums(shards, scores, e) if candidates is None else _by_candidates(shards, candidates, e)
    return out.masked_fill(spoilt, torch.nan)  # NaN stays in its row


@dataclass(frozen=True)
class _Candidates:
    """Scores of a shard that may have a weight, (B, H, Lq, width), and which keys they are; -inf where are fewer."""

    scores: Tensor
    keys: Tensor


def _candidates(shards: _Shards, scores: list[Tensor], e: Power, budget: int) -> list[_Candidates] | None:
    """Those of each shard; None if some process would have to send more than a budget of them."""
    threshold = shards.maximum([_threshold(s, e) for s in scores])
    above = [s > threshold for s in scores]
    widths = [int(one.sum(-1).amax().item()) if one.numel() else 0 for one in above]
    most = shards.exchange.maximum(torch.tensor(sum(widths), device=threshold.device))
    if int(most.item()) > budget:
        return None
    found = []
    for s, one, width in zip(scores, above, widths, strict=True):
        found.append(_Candidates(*s.masked_fill(~one, -torch.inf).topk(width, -1, sorted=False)))
    return found


def _threshold(scores: Tensor, e: Power) -> Tensor:
    """The score (B, H, Lq, 1) at and below which no key of the row has a weight, if these were all."""
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:3], 1), -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    width = entmax_weights(scores, e).amax(-1, keepdim=True) ** e / e  # from the largest score down to the threshold
    slack = _ROUNDING * torch.finfo(scores.dtype).eps * (largest.abs() + width)
    lowest = torch.where(largest == torch.inf, torch.finfo(scores.dtype).max, largest - width - slack)
    return torch.where(largest == -torch.inf, largest, lowest)


def _by_candidates(shards: _Shards, candidates: list[_Candidates], e: Power) -> Tensor:
    """Every process solves the same rows."""
    rows = _side_by_side(shards, torch.cat([one.scores for one in candidates], -1), -torch.inf)
    if rows.shape[-1] == 0:  # nobody sees anything
        first = shards.calls[0]
        return rows.new_zeros(*first.shape[:3], first.value.shape[3])
    weights = entmax_weights(rows, e)
    width = rows.shape[-1] // shards.exchange.size
    own = weights[..., shards.exchange.layout.rank * width :]
    parts = own[..., : sum(one.keys.shape[-1] for one in candidates)].split(
        [one.keys.shape[-1] for one in candidates], -1
    )
    outputs = [_chosen_values(*given) for given in zip(parts, candidates, shards.calls, strict=True)]
    return shards.total(outputs)


def _chosen_values(weights: Tensor, candidates: _Candidates, call: Call) -> Tensor:
    """Weights times values, (B, H, Lq, Dv), reading only values that are candidates where that is less."""
    batch, heads, queries, width = weights.shape
    if call.groups * queries * width >= call.value.shape[2]:
        scattered = weights.new_zeros(*weights.shape[:3], call.value.shape[2])
        return _times_values(scattered.scatter_(-1, candidates.keys, weights), call)
    places = candidates.keys.view(batch, call.value.shape[1], -1, 1)
    chosen = call.value.gather(2, places.expand(-1, -1, -1, call.value.shape[3])).to(weights.dtype)
    return (weights.unsqueeze(-2) @ chosen.view(batch, heads, queries, width, chosen.shape[-1])).squeeze(-2)


def _by_sums(shards: _Shards, scores: list[Tensor], e: Power) -> Tensor:
    """Newton steps in theta = -ln p_max, whose sums over keys are summed over shards, in fp64.

    p / p_max = exp(log1p(w) / e), w = e d exp(e theta), d = s - max s: the form of the solver near alpha = 1, which has
    softmax as its limit and is exact for all alpha in this precision.
    """
    largest = shards.maximum([_largest(s) for s in scores])
    e = e.double().clamp(min=1e-20) if isinstance(e, Tensor) else max(e, 1e-20)
    distances = [_below(s, largest) for s in scores]
    theta = torch.zeros_like(largest, dtype=torch.float64)
    least = torch.full_like(theta, torch.inf)
    tolerance = 8 * torch.finfo(torch.float64).eps
    while True:
        ratios = [_ratios(d, e, theta) for d in distances]
        sums = shards.total(
            [torch.cat([r.sum(-1, keepdim=True), (r / w).sum(-1, keepdim=True)], -1) for r, w in ratios]
        )
        total, slope = sums[..., :1].clamp(min=1.0), sums[..., 1:].clamp(min=1.0)  # the largest score counts 1
        log_mass = total.log() - theta
        error = log_mass.expm1().abs()
        if not bool(((error > tolerance) & (error < least)).any()):
            break
        least = torch.minimum(least, error)
        theta = theta - ((log_mass * -e).expm1() * (total / slope)).log1p() / e
    outputs = [
        _times_values((r / total).to(s.dtype), call)
        for (r, _), s, call in zip(ratios, scores, shards.calls, strict=True)
    ]
    return shards.total(outputs)


def _largest(scores: Tensor) -> Tensor:
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:3], 1), -torch.inf)
    return scores.amax(-1, keepdim=True)


def _below(scores: Tensor, largest: Tensor) -> Tensor:
    """s - max s in fp64; a row that holds +inf shares its weight between them, one without a score stays -inf."""
    finite = torch.where(largest.isfinite(), largest, 0.0)
    distances = scores.double() - finite.double()
    return torch.where(largest == torch.inf, torch.where(scores == torch.inf, 0.0, -torch.inf), distances)


def _ratios(distances: Tensor, e: Power, theta: Tensor) -> tuple[Tensor, Tensor]:
    """p / p_max and 1 + w; both as good as 0 and 1 where there is no weight."""
    w = distances * ((theta * e).exp() * e)
    low = smallest_log(torch.float64) * e
    low = low.expm1() if isinstance(low, Tensor) else torch.tensor(low, dtype=torch.float64).expm1().to(w.device)
    inside = w > low.clamp(min=4 * torch.finfo(torch.float64).eps - 1.0)
    w = torch.where(inside, w, 0.0)
    return torch.where(inside, (w.log1p() / e).exp(), 0.0), w + 1.0
