"""Fused GPU kernels under the contract of `tamis.attention.dense`.  Only this package imports triton, and late."""
