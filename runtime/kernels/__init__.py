"""Kernels in Triton, which a GPU runs; who imports one has Triton."""
