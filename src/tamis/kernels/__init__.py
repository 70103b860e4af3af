"""Fused GPU kernels under the contract of `tamis.attention.reference`.  Only this package imports triton, and late."""
