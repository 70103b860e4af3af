"""The kernels of row transforms, in Triton's language."""
