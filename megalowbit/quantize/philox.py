"""Philox4x32-10: random bits as a function of a key and a counter, the same on every device.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One call gives 128 bits,
a byte for each element of a group of 16. Groups are numbered row by row through the padded matrix. Rounding
compares with 24 bits: those of the element's byte and of the two bytes before it (`random_fractions`). This
is the readable implementation in int64 tensors; kernels produce the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalowbit import cuda_graphs

WORD, LONG = 2**32 - 1, 2**64 - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


class RandomKey(NamedTuple):
    """Selects the random numbers of a tensor.

    Attributes:
        key: 64 bits, a hash of seed, layer, role, use and rank.
        step: 64 bits, the micro-batch.
    """

    key: int
    step: int = 0


class StoredKey(NamedTuple):
    """A `RandomKey` in a device's memory, which Triton kernels read; other backends do not take it.

    Attributes:
        memory: int64 (2,), contiguous: step and key, both as `signed` numbers.
    """

    memory: Tensor


NO_KEY = RandomKey(0)  # for rounding to nearest, which draws nothing


def signed(number: int) -> int:
    """The int64 that has the same 64 bits."""
    return (number & LONG) - (((number & LONG) >> 63) << 64)


def philox4x32(counter: tuple[Tensor, ...], key: int) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of one shape, each number below 2³².
        key: 64 bits.

    Returns:
        Four int64 tensors, each number below 2³².
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32 & WORD
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 × 32-bit product; in halves, because it does not fit into an int64."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    high = high + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)


def random_words(num_groups: int, random_key: RandomKey, device: torch.device) -> Tensor:
    """Random 32-bit words of groups 0 … num_groups - 1: int64 (num_groups, 4).

    Raises:
        UserError: a CUDA graph is being captured, whose replays would repeat the words.
    """
    cuda_graphs.refuse(
        device,
        "random numbers that no Triton kernel draws",
        "run this layer outside of the graph, or with a quantizer that has a kernel (docs/formats.md)",
    )
    group = torch.arange(num_groups, dtype=torch.int64, device=device)
    step = random_key.step
    steps = (torch.full_like(group, part) for part in (step & WORD, step >> 32 & WORD))
    return torch.stack(philox4x32((group & WORD, group >> 32, *steps), random_key.key), dim=1)


def random_bytes(num_groups: int, random_key: RandomKey, device: torch.device) -> Tensor:
    """Random bytes of groups 0 … num_groups - 1: uint8 (num_groups, 16)."""
    words = random_words(num_groups, random_key, device).unsqueeze(-1)
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=device)
    return (words >> shifts & 0xFF).to(torch.uint8).flatten(1)


def random_fractions(num_groups: int, random_key: RandomKey, device: torch.device) -> Tensor:
    """24 random bits for each element of groups 0 … num_groups - 1: int32 (num_groups, 16).

    Byte i is the highest of element i, the middle one of element i + 1 and the lowest of element i + 2, from
    the end of a group to its beginning. Each number is uniform; those of neighbours are nearly independent,
    see `formats.codes`.
    """
    highest = random_bytes(num_groups, random_key, device).to(torch.int32)
    return highest << 16 | highest.roll(1, dims=1) << 8 | highest.roll(2, dims=1)
