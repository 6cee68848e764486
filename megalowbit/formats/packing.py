"""Codes to bytes and back: eight bits hold 1, 2 or 4 codes of 8, 4 or 2 bits; three bytes hold 4 codes of 6.

The first code stands in the lowest bits: two four-bit codes make (first | second << 4), the order of every
FP4 library and of the hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    Args:
        codes: uint8 (…, n), each below 2^bits; n·bits is a multiple of 8 (of 24 for 6 bits).
        bits: 2, 4, 6 or 8.

    Returns:
        uint8 (…, n·bits/8).
    """
    if bits == 8:
        return codes
    count = 4 if bits == 6 else 8 // bits
    parts = codes.to(torch.int32).unflatten(-1, (-1, count))
    shifts = torch.arange(count, device=codes.device, dtype=torch.int32) * bits
    words = (parts << shifts).sum(-1, dtype=torch.int32)
    if bits != 6:
        return words.to(torch.uint8)
    byte_shifts = torch.arange(3, device=codes.device, dtype=torch.int32) * 8
    return (words.unsqueeze(-1) >> byte_shifts & 0xFF).to(torch.uint8).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_codes`: uint8 codes, the last axis 8/bits times as long."""
    if bits == 8:
        return packed
    words, count = packed.to(torch.int32), 8 // bits
    if bits == 6:
        byte_shifts = torch.arange(3, device=packed.device, dtype=torch.int32) * 8
        words, count = (words.unflatten(-1, (-1, 3)) << byte_shifts).sum(-1, dtype=torch.int32), 4
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
