"""Attention beyond one device, on torch.distributed: sequences whose tokens lie in several processes."""

from tamis.parallel.context import ContextParallel

__all__ = ["ContextParallel"]
