"""What an attention mechanism is: how scores become weights, and what becomes of the output of its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tamis import functional
from tamis.attention.rules import Rule
from tamis.functional import SparseWeights, Statistics
from tamis.functional.sharding import Heads
from tamis.mechanisms.reach import attention_in_reach

_NOT_ABOUT_VISIBILITY = ("dropout_p", "generator", "backend", "scale", "alibi_slopes")


@dataclass(frozen=True)
class Inputs:
    """What a mechanism may look at."""

    query: Tensor
    key: Tensor
    hidden: Tensor | None
    """The input of the attention layer, (B, Lq, embed_dim), where a layer calls."""
    options: dict[str, Any]
    """The keyword arguments of :func:`tamis.attention`: masks, positions, window, slopes."""

    def visible_counts(self) -> Tensor:
        """Count how many keys each query sees, (B or 1, H or 1, Lq), under all the options."""
        about = {name: value for name, value in self.options.items() if name not in _NOT_ABOUT_VISIBILITY}
        return functional.visible_counts(self.query, self.key, **about)


@dataclass(frozen=True, kw_only=True)
class ScaleParts:
    """What the scale delta + beta log(n + 1)^gamma of queries that see n keys is made of, (B or 1, H, Lq or 1)."""

    delta: float
    heads: tuple[int, ...]
    """Those that are scaled."""
    beta: Tensor
    gamma: Tensor
    scale: Tensor


class Mechanism(nn.Module):
    """An attention mechanism.  A new one defines `rule`; all else has a default.

    A `num_heads` attribute, where there is one, is what `check_layer` compares with the layer's.
    """

    initial_spread: float = 0.2
    """Standard deviation of the scores that models start with.  Sparse rows that start wide keep so few keys that heads
    settle before they have learnt where to look; dense ones override it."""
    has_alphas: bool = False
    """Whether its rule is always entmax, or softmax, so that analyses may give its heads other alphas for a while."""
    at_rest: bool = True
    """Whether what schedules move is where it was built to be."""

    def rule(self, inputs: Inputs) -> Rule:
        """Return the rule by which scores become weights."""
        raise NotImplementedError(f"{type(self).__name__} must define rule()")

    def query_scale(self, inputs: Inputs) -> Tensor | None:
        """Return what the scores of each query are multiplied by, (B or 1, H or 1, Lq); None is 1."""
        return None

    def learned_alphas(self) -> Tensor | None:
        """Return the alphas that are learned, one for each head, for analyses; None if there are none."""
        return None

    def scale_parts(self, hidden: Tensor, counts: Tensor) -> ScaleParts | None:
        """Return what the scale is for these inputs and numbers of keys (B, H or 1, Lq); None if there is none."""
        return None

    def movable(self) -> dict[str, float]:
        """Say what a schedule may move in training, and where each is built to be, which is where it ends."""
        return {}

    def move(self, name: str, value: float) -> None:
        """Let what `movable` has under this name be `value`, until it is moved again.

        It lies in a buffer that stays the same tensor, so compiled steps and captured ones see it; no file has it.
        """
        ends = self.movable()[name]
        if (buffer := self.moved(name)) is None:
            self.register_buffer(f"moved_{name}", torch.tensor(value, dtype=torch.float32), persistent=False)
        else:
            buffer.fill_(value)
        self.at_rest = value == ends

    def moved(self, name: str) -> Tensor | None:
        """Return where it is, a tensor without dimensions; None if it was never moved."""
        return getattr(self, f"moved_{name}", None)

    def check_layer(self, embed_dim: int, num_heads: int, head_dim: int) -> None:
        """Raise unless this mechanism was built for a layer of these sizes: layers ask when they are built."""
        built = getattr(self, "num_heads", num_heads)
        if built != num_heads:
            raise ValueError(f"{type(self).__name__} was built for num_heads={built}, but the layer has {num_heads}")

    def split_heads(self, heads: Heads) -> None:
        """Become the mechanism of some of the heads, for tensor parallelism.

        One that holds tensors must say which of them belong to heads; what it leaves whole is taken to be of all heads.
        """
        if any(True for _ in (*self.parameters(), *self.buffers())):
            raise NotImplementedError(f"{type(self).__name__} must define split_heads() to be divided by heads")

    def merge(self, context: Tensor) -> Tensor:
        """Outputs of the heads (B, H, Lq, head_dim) to what is projected, (B, Lq, H * head_dim)."""
        return context.transpose(1, 2).flatten(2)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        hidden: Tensor | None = None,
        page_norms: Callable[[], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """(B, H, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv) to (B, H, Lq, Dv).

        `page_norms` gives norms of cached keys, with which it passes over what ALiBi puts out of reach:
        :mod:`tamis.mechanisms.reach`.
        """
        query, rule = self.resolve(query, key, hidden, options)
        if page_norms is not None and rule.margin() is not None:
            return attention_in_reach(query, key, value, rule=rule, page_norms=page_norms(), **options)
        return functional.attention(query, key, value, rule=rule, **options)

    def weights(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Tensor:
        """Return the dense weights (B, H, Lq, Lk)."""
        query, rule = self.resolve(query, key, hidden, options)
        return functional.attention_weights(query, key, rule=rule, **options)

    def sparse_weights(
        self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any
    ) -> SparseWeights:
        """Return the exact non-zeros of `weights`, in memory linear in their number."""
        query, rule = self.resolve(query, key, hidden, options)
        return functional.sparse_attention_weights(query, key, rule=rule, **options)

    def statistics(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Statistics:
        """Support size, zero share, entropy, null share and mean distance per head."""
        query, rule = self.resolve(query, key, hidden, options)
        return functional.attention_statistics(query, key, rule=rule, **options)

    def resolve(
        self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Rule]:
        """Scaled queries and the rule: with these the functions of `tamis` compute what the mechanism does."""
        inputs = Inputs(query, key, hidden, options)
        scale = self.query_scale(inputs)
        if scale is not None:
            query = (query * scale.unsqueeze(-1)).to(query.dtype)  # the scale is fp32 at least, and so is the product
        return query, self.rule(inputs)


def span(values: Tensor | None) -> str:
    """The smallest and largest of what was learned, for a repr; "?" where there are no values to read."""
    if values is None or values.device.type == "meta" or not values.numel():
        return "?"
    return f"{values.detach().min():.3f}..{values.detach().max():.3f}"
