"""Random token ids in place of a corpus, for benchmarks: nothing is read, downloaded or cached.

Not covered: text. The ids are uniform over the vocabulary, so losses mean nothing.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalowbit.data.loader import ShardedLoader
from megalowbit.data.packing import DocumentRules, PackedDataset
from megalowbit.data.settings import DataSettings
from megalowbit.data.tokenize import Tokenizer

NAME = "synthetic"


class SyntheticTokens(Tokenizer):
    """The ids 0 … vocab_size-1, which stand for no text."""

    def __init__(self, vocab_size: int) -> None:
        self.name = self.fingerprint = NAME
        self.vocab_size, self.eos_token_id = vocab_size, 0

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        """Raise: there is no text."""
        raise TypeError(f"synthetic token ids stand for no text, and cannot encode {len(texts)} texts")

    def count_bytes(self, ids: NDArray[Any], before: NDArray[Any]) -> int:
        """Raise: there is no text."""
        raise TypeError(f"synthetic token ids stand for no text: {len(ids)} after {len(before)}")

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Raise: there is nothing to save."""
        raise TypeError(f"synthetic token ids have no tokenizer to save in {folder}")


def synthetic_loader(
    settings: DataSettings, *, vocab_size: int, micro_batch_size: int, rank: int, world_size: int
) -> ShardedLoader:
    """A loader of random token ids: as many samples as one micro-batch over all ranks, in changing order.

    Args:
        settings: `sequence_length`, `seed` and what concerns documents, which the id 0 ends; nothing else.
        vocab_size: of the model.
        micro_batch_size: samples per micro-batch on this rank.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
    """
    length = settings.sequence_length
    generator = np.random.default_rng(settings.seed)
    tokens = generator.integers(0, vocab_size, micro_batch_size * world_size * length, dtype=np.uint32)
    tokenizer = SyntheticTokens(vocab_size)
    return ShardedLoader(
        PackedDataset(tokens, length, fingerprint=NAME, name=NAME),
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
        tokenizer=tokenizer,
        rules=DocumentRules.of(settings, tokenizer),
    )
