"""What attention heads do: recording their weights, and figures about them."""

from tamis.analysis.capture import Captured, Consumer, capture
from tamis.analysis.metrics import (
    AttentionMetrics,
    SiteMetrics,
    density,
    head_diversity,
    null_share,
    sparsity_rate,
)

__all__ = [
    "AttentionMetrics",
    "Captured",
    "Consumer",
    "SiteMetrics",
    "capture",
    "density",
    "head_diversity",
    "null_share",
    "sparsity_rate",
]
