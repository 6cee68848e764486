"""Fused optimizer kernels: C on CPUs, NVIDIA's apex on GPUs."""
