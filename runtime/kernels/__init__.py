"""Triton kernels for GPUs; importing a module of this package requires Triton."""
