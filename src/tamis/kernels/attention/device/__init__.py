"""The kernels of attention, in Triton's language."""
