"""Attention beyond one device, on torch.distributed: sequences and caches that lie in several processes."""

from tamis.parallel.context import ContextParallel
from tamis.parallel.shards import sharded_attention, sharded_counts

__all__ = ["ContextParallel", "sharded_attention", "sharded_counts"]
