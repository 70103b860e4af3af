"""What an attention mechanism is: how scores become weights, and what becomes of the output of its heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tamis import functional
from tamis.functional import Statistics
from tamis.mechanisms.reach import entmax_in_reach

_NOT_ABOUT_VISIBILITY = ("dropout_p", "generator", "backend", "scale", "alibi_slopes")


class Mechanism(nn.Module):
    """An attention mechanism.  A new one overrides `settings`, and `merge` if it treats the output specially.

    `options` are the keyword arguments of :func:`tamis.entmax_attention`: masks, positions, window, slopes.
    `hidden` is the input of the attention layer, (B, Lq, embed_dim), for mechanisms that look at it.
    A `num_heads` attribute, where there is one, is what `check_layer` compares with the layer's.
    """

    def settings(self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        """What to compute: {"alpha": ...} for entmax, {"activation": ...} for ReLU attention; and, if the scores are to
        be scaled per query, {"query_scale": (B, H, Lq)}."""
        raise NotImplementedError(f"{type(self).__name__} must define settings()")

    def visible_counts(self, query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
        """How many keys each query sees, (B or 1, H or 1, Lq), under all the options of a call."""
        about = {name: value for name, value in options.items() if name not in _NOT_ABOUT_VISIBILITY}
        return functional.visible_counts(query, key, **about)

    def check_layer(self, embed_dim: int, num_heads: int, head_dim: int) -> None:
        """Raise unless this mechanism was built for a layer of these sizes: layers ask when they are built."""
        built = getattr(self, "num_heads", num_heads)
        if built != num_heads:
            raise ValueError(f"{type(self).__name__} was built for num_heads={built}, but the layer has {num_heads}")

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
        page_norms: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """(B, H, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv) to (B, H, Lq, Dv).

        `page_norms` of cached keys let entmax pass over what ALiBi puts out of reach: :mod:`tamis.mechanisms.reach`.
        """
        query, settings = self._scaled(query, key, hidden, options)
        attention: Callable[..., Tensor] = functional.entmax_attention
        if "activation" in settings:
            attention = functional.relu_attention
        elif isinstance(settings["alpha"], float) and settings["alpha"] == 1.0:
            attention, settings = functional.softmax_attention, {}
        elif page_norms is not None and settings.keys() == {"alpha"} and _is_per_head(settings["alpha"]):
            attention = partial(entmax_in_reach, page_norms=page_norms)
        return attention(query, key, value, **settings, **options)

    def weights(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Tensor:
        """The dense weights (B, H, Lq, Lk)."""
        query, settings = self._scaled(query, key, hidden, options)
        return functional.attention_weights(query, key, **settings, **options)

    def statistics(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Statistics:
        """Support size, zero share, entropy, null share and mean distance per head."""
        query, settings = self._scaled(query, key, hidden, options)
        return functional.attention_statistics(query, key, **settings, **options)

    def _scaled(
        self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        settings = self.settings(query, key, hidden, options)
        scale = settings.pop("query_scale", None)
        if scale is not None:
            query = (query * scale.unsqueeze(-1)).to(query.dtype)  # the scale is fp32 at least, and so is the product
        return query, settings


def _is_per_head(alpha: float | Tensor) -> bool:
    """One number, or one for each head; not one for each sequence or query."""
    return not isinstance(alpha, Tensor) or alpha.ndim <= 1


def span(values: Tensor | None) -> str:
    """The smallest and largest of what was learned, for a repr; "?" where there are no values to read."""
    if values is None or values.device.type == "meta" or not values.numel():
        return "?"
    return f"{values.detach().min():.3f}..{values.detach().max():.3f}"
