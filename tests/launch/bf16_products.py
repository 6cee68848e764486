"""How this CPU multiplies in bf16."""

import torch


def are_fast():
    """Whether oneDNN multiplies in bf16 here: from AVX-512 on.

    Without it, torch's own loops take ten times as long as fp32, and the last digit of a sum depends on the
    layout of the operands.
    """
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
