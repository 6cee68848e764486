"""An endless, sharded, resumable iterator over packed samples.

The only state is one counter for the whole job: the number of samples consumed so far. Each micro-batch takes
the next world_size × micro_batch_size positions, and rank r takes the r-th contiguous slice of them.
`order.sample_index` maps positions to samples, one epoch after another without a gap. A run can therefore
continue on another number of ranks without repeating or skipping samples. Labels equal the inputs, because
Hugging Face models shift them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megalowbit.data.cache import run_on_each_node_first
from megalowbit.data.order import sample_index
from megalowbit.data.packing import PackedDataset, pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import open_corpus
from megalowbit.data.tokenize import Tokenizer, build_tokenizer
from megalowbit.data.validation import ValidationText, open_validation
from megalowbit.errors import UserError


class ShardedLoader(Iterator[dict[str, torch.Tensor]]):
    """Endless micro-batches of one data-parallel rank.

    Yields `{"input_ids", "labels"}`, both int64 (micro_batch_size, sequence_length), on the CPU.

    Args:
        dataset: the packed samples.
        micro_batch_size: samples per micro-batch on this rank.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        seed: determines the order of the samples.
        tokenizer: the tokenizer of the samples; saved together with the model.
        validation: the text for validation; None: there is none.

    Raises:
        UserError: the data set has fewer samples than one micro-batch over all ranks.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        tokenizer: Tokenizer,
        validation: ValidationText | None = None,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                "micro_batch_size must be ≥ 1 and rank below world_size: "
                f"{micro_batch_size}, {rank}, {world_size}"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.tokenizer = tokenizer
        self.validation = validation
        self.position = 0
        if dataset.num_samples < self.samples_per_batch:
            raise UserError(
                f"corpus {dataset.name} has {dataset.num_samples} sequences of {dataset.sequence_length} "
                f"tokens, fewer than one micro-batch of {micro_batch_size} on each of {world_size} ranks: "
                "use more text, or lower data.sequence_length or train_micro_batch_size_per_gpu"
            )

    @property
    def samples_per_batch(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.micro_batch_size * self.world_size

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one micro-batch over all ranks."""
        return self.samples_per_batch * self.dataset.sequence_length

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return self.dataset.num_samples

    @property
    def fingerprint(self) -> str:
        """Identifies corpus, tokenizer and sequence length."""
        return self.dataset.fingerprint

    def __iter__(self) -> ShardedLoader:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        first = self.position + self.rank * self.micro_batch_size
        epochs, positions = np.divmod(np.arange(first, first + self.micro_batch_size), self.num_samples)
        input_ids = self.dataset.batch(sample_index(self.seed, epochs, positions, self.num_samples))
        self.position += self.samples_per_batch
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def state_dict(self) -> dict[str, Any]:
        """The `position` (samples consumed by all ranks together), and what identifies data and order."""
        return {
            "position": self.position,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`, on any number of ranks.

        Raises:
            UserError: the state belongs to other data or another seed, or is incomplete.
        """
        current = self.state_dict()
        missing = current.keys() - state.keys()
        if missing:
            raise UserError(
                f"the data position in the checkpoint lacks {', '.join(sorted(missing))}: it is damaged"
            )
        for key in ("fingerprint", "num_samples", "seed"):
            if state[key] != current[key]:
                raise UserError(
                    f"the checkpoint was made with data {key} {state[key]}, this run has {current[key]} "
                    f"(corpus {self.dataset.name}): resume with the data settings of the checkpoint"
                )
        if not (isinstance(state["position"], int) and state["position"] >= 0):
            raise UserError(f"the data position in the checkpoint is {state['position']!r}: it is damaged")
        self.position = state["position"]


def build_loader(
    settings: DataSettings, *, micro_batch_size: int, rank: int, world_size: int
) -> ShardedLoader:
    """Open the corpus, tokenizer and tokenised samples, and create those that are not in the cache.

    Collective if there is a process group: one process of each node does the work, while the others wait and
    then read the cache. Work that takes longer than the group's timeout should be done once beforehand, by
    `count_samples` in a single process (`--prepare-data`). The arguments are those of `ShardedLoader`.

    Raises:
        UserError: corpus, tokenizer or cache cannot be used on some rank; all ranks raise it.
    """

    def work() -> ShardedLoader:
        dataset, tokenizer, validation = _open(settings)
        return ShardedLoader(
            dataset,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=settings.seed,
            tokenizer=tokenizer,
            validation=validation,
        )

    return run_on_each_node_first(work, _fingerprint_of_all)


def _fingerprint_of_all(loader: ShardedLoader) -> str:
    """Identifies the data for training and for validation."""
    return loader.fingerprint + ("" if loader.validation is None else loader.validation.fingerprint)


def count_samples(settings: DataSettings) -> int:
    """The number of samples in an epoch; tokenises all text that is not in the cache. Not collective.

    Raises:
        UserError: as `build_loader`.
    """
    dataset, _, _ = _open(settings)
    return dataset.num_samples


def _open(settings: DataSettings) -> tuple[PackedDataset, Tokenizer, ValidationText | None]:
    corpus = open_corpus(settings)
    tokenizer = build_tokenizer(settings, corpus)
    dataset = pack(
        corpus,
        tokenizer,
        settings.sequence_length,
        settings.cache_dir,
        workers=settings.workers,
        timeout=settings.build_timeout,
    )
    validation = open_validation(settings, tokenizer)
    if validation is not None and validation.source == dataset.fingerprint:  # under another name
        raise UserError(f"data.validation: {validation.name} is the text for training: name other text")
    return dataset, tokenizer, validation
