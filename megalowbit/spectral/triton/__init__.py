"""Triton kernels for low-rank factors on GPUs."""
