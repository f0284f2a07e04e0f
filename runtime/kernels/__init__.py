"""Triton kernels for GPUs; importing a module of this package requires Triton.

For which kernels a run uses see `runtime.model.kernel_choice`.
"""
