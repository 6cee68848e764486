"""Codes to bytes and back: two four-bit codes a byte, the first one in the low nibble.

Both directions are one table look-up for a pair of elements, the cheapest form on a CPU without a compiler:
the two key bytes, read as one 16-bit number, select the packed byte (64 KiB table); a packed byte selects
two fp32 numbers (2 KiB). Tables are built once for each format and device and are read only. Little-endian
machines only: every machine PyTorch ships for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.formats.element import ElementFormat
from megalowbit.formats.tables import cached_table

PIECE_BLOCKS = 1 << 14


@cached_table
def _packed_by_key_pair(codes: tuple[int, ...], device: torch.device) -> Tensor:
    code = torch.tensor(codes, dtype=torch.int32)
    pair = torch.arange(1 << 16)
    return (code[pair & 0xFF] | (code[pair >> 8] << 4)).to(device, torch.uint8)


@cached_table
def _values_by_byte(element: ElementFormat, device: torch.device) -> Tensor:
    values = torch.tensor(element.code_values(), dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1)  # (256, 2)
    return pairs.view(torch.int64).flatten().to(device)


def pack_keys(keys: Tensor, codes: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """Turn rounding keys into packed codes.

    Args:
        keys: int8, contiguous, an even number of them.
        codes: the code of each key byte, 256 of them (`nearest_key_codes`, `stochastic_key_codes`).
        out: uint8 of keys.numel()/2 elements to write to.

    Returns:
        uint8, 1-D, half as many.
    """
    table = _packed_by_key_pair(codes, keys.device)
    pairs = keys.view(-1).view(torch.uint16).to(torch.int32)
    return torch.index_select(table, 0, pairs, out=out) if out is not None else table.index_select(0, pairs)


def unpack_values(packed: Tensor, element: ElementFormat) -> Tensor:
    """The numbers packed codes stand for: fp32, 1-D, twice as many as there are bytes."""
    pairs = _values_by_byte(element, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    return pairs.view(torch.float32)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack four-bit codes (uint8, even last axis) two a byte along the last axis, low nibble first."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: uint8 codes, the last axis twice as long."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def in_pieces(num_blocks: int, device: torch.device, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk through tensors that belong together, as many blocks at a time as suit the device.

    On a CPU a piece fits a core's second-level cache (1 MiB of fp32), so that temporaries are reused
    instead of paged in: 3–5 times as fast on large tensors. Elsewhere there is one piece, and for fake
    tensors too: shapes are all they have.

    Args:
        num_blocks: blocks in all.
        device: where the work is done.
        tensors: each with a first axis that is a whole multiple of `num_blocks`.

    Yields:
        Views of the tensors, one for each of them.
    """
    if device.type != "cpu" or num_blocks <= PIECE_BLOCKS or isinstance(tensors[0], FakeTensor):
        yield tensors
        return
    splits = [each.split(each.shape[0] // num_blocks * PIECE_BLOCKS) for each in tensors]
    yield from zip(*splits, strict=True)
