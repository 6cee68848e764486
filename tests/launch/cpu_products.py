"""How this CPU multiplies, and what decides it."""

import os

import torch

# Set to `avx2` and `AVX2`, the last two make a CPU multiply like one without AVX-512.
VARIABLES = ("MEGALOWBIT_CPU_GEMM", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def variables():
    """For a process whose environment is not this one, but whose results must have the same bits."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def has_fast_bf16():
    """Whether oneDNN multiplies in bf16 here: from AVX-512 on.

    Without it, torch's own loops take ten times as long as fp32, and the last digit of a sum depends on the
    layout of the operands.
    """
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
