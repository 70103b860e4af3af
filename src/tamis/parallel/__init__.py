"""Beyond one device, on torch.distributed: sequences, caches and weights that lie in several processes."""

from tamis.parallel.context import ContextParallel
from tamis.parallel.shards import sharded_attention, sharded_counts
from tamis.parallel.tensor import tensor_parallel

__all__ = ["ContextParallel", "sharded_attention", "sharded_counts", "tensor_parallel"]
