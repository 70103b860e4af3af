"""What `sparsify` installs in an attention module of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tamis.analysis.sites import NamedSite
from tamis.mechanisms import Mechanism


class AttentionPart(NamedSite):
    """From queries, keys and values to what the output projection reads."""

    input_hook: RemovableHandle
    """Hands the input of the layer to the attention function."""

    def __init__(self, mechanism: Mechanism, site: str, num_heads: int, head_dim: int, spec: dict[str, Any]) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.site, self.num_heads, self.head_dim = site, num_heads, head_dim
        self.spec = spec
        """How to build the mechanism again, as it is written to config.json."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None, **options: Any) -> Tensor:
        """(B, H, Lq, D) to (B, Lq, H * Dv)."""
        return self.mechanism.merge(self.mechanism(query, key, value, hidden=hidden, **options))

    def extra_repr(self) -> str:
        return f"site={self.site!r}"
