"""How heads spread as rows grow: what the theory says of sparse attention, measured on a trained model.

Long-Context Generalization with Sparse Attention, Vasylenko et al. 2025, https://arxiv.org/abs/2506.16640

    dispersion   H / log n of rows with n keys: with softmax and bounded scores it goes to 1, with entmax H is at most
                 the log of the support, the number of keys with a weight
    horizon      with an ALiBi slope m and the scores of a row between z_min and z_max, no weight of entmax lies at a
                 distance of R = (z_max - z_min + 1 / (alpha - 1)) / m or more

Looked at are the last rows of each text, which see the most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.analysis.heads import normalised_entropy_sums, support_sums
from tamis.analysis.rows import Rows, ratio
from tamis.analysis.sites import attention_sites
from tamis.decoding.reading import read
from tamis.files import write_signed
from tamis.functional import attention_scores
from tamis.mechanisms import Mechanism
from tamis.mechanisms.registry import read_mechanism
from tamis.models.causal_lm import CausalLM
from tamis.nn.modes import evaluating
from tamis.settings import LARGEST_SEED, Config, at_least, describe_spec

DISPERSION = "dispersion.json"


@dataclass(frozen=True, kw_only=True)
class DispersionConfig(Config):
    """Where to look."""

    lengths: tuple[int, ...] = ()
    """Lengths of texts, in tokens or in what a task counts; none: those of the recipe's evaluation."""
    samples: int = 8
    """Texts at each length."""
    queries: int = 32
    """The last rows of each text, a quarter of it at most: all of them see about as many keys."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, list | tuple) or not all(type(n) is int and n > 0 for n in self.lengths):
            raise ValueError(f"lengths must be whole numbers above 0, got {self.lengths!r}")
        object.__setattr__(self, "lengths", tuple(self.lengths))  # which TOML has not
        at_least(self, 1, "samples", "queries")
        at_least(self, 0, "seed", largest=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class SiteDispersion:
    """What was found in one attention layer; a value for each head."""

    entropy: tuple[float, ...]
    """The mean of H / log n."""
    support: tuple[float, ...]
    """The mean number of keys with a weight."""
    slopes: tuple[float, ...]
    """Slopes of ALiBi; 0 where there is no bias."""
    reach: tuple[int, ...]
    """The greatest distance of a key with a weight."""
    horizon: tuple[int | None, ...]
    """The greatest distance at which theory allows one; None where it allows any."""
    beyond: int
    """Rows of all heads with a weight beyond their own horizon: 0, if theory and code are right."""


@dataclass(frozen=True, kw_only=True)
class LengthDispersion:
    """What was found at one length."""

    length: int
    keys: int
    """Tokens of a text, which are the keys of its last row."""
    samples: int
    sites: dict[str, SiteDispersion]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """Return a row of the table that `HEADING` begins: means over heads, those with a bias apart."""
        cells = [
            f"{_mean(head['entropy'] for head in some):>16} {_mean(head['support'] for head in some):>9}"
            for some in (heads_with(self.to_dict(), biased=False), heads_with(self.to_dict(), biased=True))
        ]
        beyond = sum(site.beyond for site in self.sites.values())
        return f"{self.length:>8} {self.keys:>8} {' '.join(cells)} {beyond:>15}"


HEADING = (
    f"{'length':>8} {'keys':>8} {'entropy / log n':>16} {'support':>9} {'with a bias':>16} {'support':>9} "
    f"{'beyond horizon':>15}"
)


def measure_dispersion(model: CausalLM, texts: Iterable[Tensor], length: int, queries: int) -> LengthDispersion:
    """Measure how the heads of a model spread on texts of one length.

    Args:
        model: a decoder.
        texts: tokens (1, n), all as long.
        length: what n is called in the result.
        queries: how many of each text to look at.  Memory grows with n times this number.

    Returns:
        entropy, support and reach of each head.
    """
    began = time.perf_counter()
    parts: dict[str, list[_Part]] = {}
    samples = keys = 0
    with evaluating(model):
        for text in texts:
            cache = model.new_cache()
            before, last = text.tensor_split([text.shape[1] - max(1, min(queries, text.shape[1] // 4))], 1)
            for _ in read(model, before, cache):
                pass
            with ExitStack() as stack:
                for site, attention in attention_sites(model).items():
                    look = _looking(parts.setdefault(site, []))
                    handle = attention.mechanism.register_forward_pre_hook(look, with_kwargs=True)
                    stack.callback(handle.remove)
                model(last, cache=cache)
            samples, keys = samples + 1, text.shape[1]
    return LengthDispersion(
        length=length,
        keys=keys,
        samples=samples,
        sites={site: _joined(found) for site, found in parts.items()},
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Part:
    """What one text gives in one site: sums per head, and the reach and the horizon of each row (1, H, Lq)."""

    entropy: tuple[Tensor, Tensor]
    support: tuple[Tensor, Tensor]
    slopes: Tensor
    reach: Tensor
    horizon: Tensor


def _looking(parts: list[_Part]) -> Callable[..., None]:
    """A hook that looks at what a mechanism is given, which is what the model computes with."""

    def hook(mechanism: Mechanism, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        query, key = args[:2]
        hidden, slopes = kwargs["hidden"], kwargs.get("alibi_slopes")
        options = {name: value for name, value in kwargs.items() if name not in ("hidden", "dropout_p", "page_norms")}
        weights = mechanism.weights(query, key, hidden=hidden, **options)
        scaled, rule = mechanism.resolve(query, key, hidden, options)
        scores, visible = attention_scores(scaled, key, **{**options, "alibi_slopes": None})
        rows = Rows.of(weights, visible)
        slopes = torch.zeros(query.shape[1], device=query.device) if slopes is None else slopes
        places = torch.arange(weights.shape[3], device=query.device)
        distances = places[-weights.shape[2] :, None] - places  # (Lq, Lk)
        reach = torch.where(weights != 0.0, distances, 0).amax(-1)
        horizon = _horizon(scores.double(), visible, slopes.double(), rule.margin())
        parts.append(_Part(normalised_entropy_sums(rows), support_sums(rows), slopes, reach, horizon))

    return hook


def _horizon(scores: Tensor, visible: Tensor, slopes: Tensor, margin: float | Tensor | None) -> Tensor:
    """The last distance at which each row (B, H, Lq) can have a weight; inf where there is no bound."""
    width = scores.masked_fill(~visible, -math.inf).amax(-1) - scores.masked_fill(~visible, math.inf).amin(-1)
    slack = torch.as_tensor(math.inf if margin is None else margin, dtype=scores.dtype, device=scores.device).reshape(
        -1, 1
    )
    return ((width + slack) / slopes[:, None]).ceil() - 1.0


def _joined(parts: Sequence[_Part]) -> SiteDispersion:
    def mean(name: str) -> tuple[float, ...]:
        totals, counts = zip(*(getattr(part, name) for part in parts), strict=True)
        return tuple(ratio((torch.stack(totals).sum(0), torch.stack(counts).sum(0))).tolist())

    reach, horizon = (torch.cat([getattr(part, name) for part in parts]) for name in ("reach", "horizon"))
    return SiteDispersion(
        entropy=mean("entropy"),
        support=mean("support"),
        slopes=tuple(parts[0].slopes.tolist()),
        reach=tuple(reach.amax((0, 2)).tolist()),
        horizon=tuple(None if math.isinf(x) else int(x) for x in horizon.amax((0, 2)).tolist()),
        beyond=int((reach > horizon).sum()),
    )


def heads_with(found: Mapping[str, Any], biased: bool) -> list[dict[str, Any]]:
    """The heads of all layers with or without a bias, from what `LengthDispersion.to_dict` gives."""
    names = ("entropy", "support", "slopes", "reach", "horizon")
    every = [
        dict(zip(names, head, strict=True))
        for site in found["sites"].values()
        for head in zip(*(site[name] for name in names), strict=True)
    ]
    return [head for head in every if (head["slopes"] != 0.0) is biased]


def _mean(values: Iterable[float]) -> str:
    found = list(values)
    return f"{sum(found) / len(found):.3g}" if found else "-"


def write_dispersion(
    folder: Path,
    name: str,
    kind: str,
    model: CausalLM,
    lengths: Sequence[int],
    texts: Callable[[int], Tensor],
    config: DispersionConfig,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """How heads spread on the texts (samples, n) of each length; dispersion.json is written as it goes.

    `kind` says what the texts are: only runs on the same are drawn together.
    """
    device = next(model.parameters()).device
    result: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "mechanism": describe_spec(*read_mechanism(model.config.mechanism)),
        "position": model.config.describe_position(),
        "dispersion": config.to_dict(),
        "device": str(device),
        "lengths": [],
    }
    say(HEADING)
    for length in lengths:
        found = measure_dispersion(model, texts(length).to(device).split(1), length, config.queries)
        say(found.describe())
        result["lengths"].append(found.to_dict())
        write_signed(folder / DISPERSION, result, indent=1)
    return result
