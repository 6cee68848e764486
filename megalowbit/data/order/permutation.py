"""The order of samples: a keyed permutation of 0 … n-1 that is computed rather than stored.

A Feistel network over the smallest power of two ≥ n maps position p of epoch e to a sample. Results ≥ n are
mapped again until they are below n (cycle walking, Black & Rogaway 2002); this keeps the mapping a
permutation and takes less than two rounds on average. It needs O(1) memory for any n, so a run can resume at
any position without replaying. The numbers depend on integer arithmetic only and are part of the checkpoint
format: changing them would change the data that a resumed run reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInt64 = NDArray[np.uint64]

# Each round changes one half. 4 suffice for large n (Luby-Rackoff); small n has few bits per half and needs
# more.
NUM_ROUNDS = 12
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the increment of splitmix64
WORD = 2**64


def sample_index(seed: int, epoch: ArrayLike, position: ArrayLike, num_samples: int) -> NDArray[np.int64]:
    """The sample at `position` of `epoch`; for a fixed seed and epoch, a permutation of 0 … num_samples-1.

    Args:
        seed: 0 … 2⁶⁴-1.
        epoch: integers ≥ 0, broadcast against `position`.
        position: integers in 0 … num_samples-1.
        num_samples: 1 … 2⁶².

    Returns:
        int64 indices, of the shape of `epoch` and `position` broadcast together.

    Raises:
        ValueError: `num_samples` or a position is out of range.
    """
    if not 1 <= num_samples <= 2**62:
        raise ValueError(f"num_samples must be 1 … 2**62, not {num_samples}")
    epochs, positions = np.broadcast_arrays(np.asarray(epoch, np.int64), np.asarray(position, np.int64))
    shape = positions.shape
    if positions.size and (positions.min() < 0 or positions.max() >= num_samples):
        raise ValueError(f"position must be 0 … {num_samples - 1}, not {positions.min()} … {positions.max()}")
    keys = _mix(epochs.reshape(-1).astype(np.uint64) ^ np.uint64(_mix_word(seed)))
    values = positions.reshape(-1).astype(np.uint64)
    num_bits = (num_samples - 1).bit_length()
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], keys[outside], num_bits)
        outside = values >= num_samples
    return values.astype(np.int64).reshape(shape)


def _feistel(values: UInt64, keys: UInt64, num_bits: int) -> UInt64:
    """A permutation of 0 … 2**num_bits - 1; the halves may differ in width, and one may be empty."""
    low_bits = np.uint64(num_bits - num_bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for round_number in range(NUM_ROUNDS):
        round_keys = keys + np.uint64(round_number * GOLDEN_GAMMA % WORD)
        if round_number % 2:
            high = high ^ (_mix(low ^ round_keys) & high_mask)
        else:
            low = low ^ (_mix(high ^ round_keys) & low_mask)
    return (high << low_bits) | low


def _mix(words: UInt64) -> UInt64:
    """One splitmix64 step (Steele, Lea & Flood 2014) for each word: add the increment, then finalise."""
    words = words + np.uint64(GOLDEN_GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_word(word: int) -> int:
    # A one-element array, because numpy warns when scalar products wrap around; here they should.
    return int(_mix(np.array([word % WORD], dtype=np.uint64))[0])
