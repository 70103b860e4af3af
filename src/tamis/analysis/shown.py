"""Sentences to look at: their tokens and the non-zero weights of every head, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tamis.functional import SparseWeights

PREFIX = "shown"


@dataclass(frozen=True, kw_only=True)
class ShownSentence:
    """One sentence without its padding."""

    target: Tensor
    """(Lt,): ids."""
    source: Tensor | None = None
    """(Ls,): ids."""
    weights: dict[str, SparseWeights] = field(default_factory=dict)
    """By site, of shape (1, H, Lq, Lk)."""

    def arrays(self) -> dict[str, Tensor]:
        """Return plain arrays: target, source, and for each site its crow, col, val and shape."""
        found = {"target": self.target.int()}
        if self.source is not None:
            found["source"] = self.source.int()
        for site, weights in self.weights.items():
            small = torch.int16 if weights.shape[3] <= 1 << 15 else torch.int32
            found[f"{site}/crow"], found[f"{site}/col"] = weights.crow.int(), weights.col.to(small)
            found[f"{site}/val"] = weights.val
            found[f"{site}/shape"] = torch.tensor(weights.shape, dtype=torch.int32)
        return found


def shown_arrays(sentences: Mapping[int, ShownSentence]) -> dict[str, Tensor]:
    """The arrays of all, under "shown/NUMBER/"."""
    return {
        f"{PREFIX}/{number}/{name}": array
        for number, sentence in sentences.items()
        for name, array in sentence.arrays().items()
    }


def shown_sentences(arrays: Mapping[str, Tensor]) -> dict[int, ShownSentence]:
    """Read sentences back from arrays that `shown_arrays` made; other arrays are passed over.

    Args:
        arrays: by name, as :func:`read_arrays` has them.

    Returns:
        sentences by number.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        prefix, _, rest = name.partition("/")
        if prefix == PREFIX:
            number, _, own = rest.partition("/")
            parts.setdefault(int(number), {})[own] = array
    return {number: _sentence(own) for number, own in parts.items()}


def _sentence(arrays: dict[str, Tensor]) -> ShownSentence:
    sites = [name.removesuffix("/crow") for name in arrays if name.endswith("/crow")]
    return ShownSentence(
        target=arrays["target"].long(),
        source=arrays["source"].long() if "source" in arrays else None,
        weights={site: _weights(arrays, site) for site in sites},
    )


def _weights(arrays: dict[str, Tensor], site: str) -> SparseWeights:
    crow, col, val, shape = (arrays[f"{site}/{part}"] for part in ("crow", "col", "val", "shape"))
    batch, heads, queries, keys = shape.tolist()
    return SparseWeights(crow.long(), col.long(), val, (batch, heads, queries, keys))
