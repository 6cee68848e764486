"""Packs documents into one flat array of token ids on disk, read as fixed-length samples via a memory map.

Each document is followed by the end-of-document id and the next document. Sample i consists of the tokens
i·L … (i+1)·L-1: they cross document boundaries, and nothing is padded. Samples of `best_fit` are whole
documents of the same array, with padding. It is cached as an ordinary `.npy` file under a key of corpus and
tokenizer, and does not depend on L. `token_files.build` writes it. A corpus of token ids is read in place.

`DocumentRules` turns samples into batches. Where documents are separate, position ids restart at 0 with each
of them. Attention finds the documents of a row by that (`hf.model`), and stays in them.
A document that began in an earlier sample begins with position 0 here.

`BestFitDataset` cuts no document that fits into a sample (`order.best_fit`), and pads samples with further
end-of-document ids. These are no labels, and see nothing but themselves. Where padding begins is known from
the lengths of the documents: an empty document is an end-of-document id behind another one, too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalowbit.data.cache.built_files import WAIT_SECONDS, cached_file, facts_of
from megalowbit.data.cache.digests import key_of
from megalowbit.data.corpus import Corpus, TokenCorpus
from megalowbit.data.order.best_fit import BestFitPlan, best_fit_plan
from megalowbit.data.settings import DataSettings
from megalowbit.data.token_files.build import write_tokens
from megalowbit.data.tokenize import Tokenizer
from megalowbit.errors import UserError
from megalowbit.labels import IGNORED_LABEL

PACKING_FORMAT = 1  # increment when the layout changes, so that old files are not read
BEST_FIT_FORMAT = "best fit 1"
SCANNED_AT_ONCE = 2**16  # tokens


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """What batches make of the documents in their rows.

    Attributes:
        end: the end-of-document id, which belongs to the document that it ends; None if it is not known.
        are_separate: whether positions restart with each document, and attention stays in it.
        masks_first: whether the first token of a document is not predicted. Megatron's `eod_mask_loss`.
    """

    end: int | None = None
    are_separate: bool = False
    masks_first: bool = False

    @classmethod
    def of(cls, settings: DataSettings, tokenizer: Tokenizer) -> DocumentRules:
        """The rules of `settings`; whose validation has made sure that `end` is known if it is needed."""
        return cls(
            end=tokenizer.eos_token_id,
            are_separate=settings.separates_documents,
            masks_first=settings.eod_mask_loss,
        )

    def batch(
        self, input_ids: torch.Tensor, num_unpadded: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` and, of separate documents, `position_ids`; all (batch, tokens), int64.

        Labels equal the inputs, because Hugging Face models shift them.

        Args:
            input_ids: the samples.
            num_unpadded: (batch,), how many tokens of each sample are no padding; None: all.
        """
        labels = input_ids.clone()
        if self.end is not None and self.masks_first:
            labels[:, 1:].masked_fill_(input_ids[:, :-1].eq(self.end), IGNORED_LABEL)
        if num_unpadded is not None:
            labels.masked_fill_(torch.arange(labels.shape[1]) >= num_unpadded[:, None], IGNORED_LABEL)
        return {"input_ids": input_ids, "labels": labels} | self.positions(input_ids)

    def positions(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """`position_ids` (batch, tokens), int64, of separate documents; else nothing."""
        if not self.are_separate:
            return {}
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        starts = torch.zeros_like(input_ids)
        starts[:, 1:] = places[:, 1:] * (input_ids[:, :-1] == self.end)
        return {"position_ids": places - starts.cummax(1).values}


class Samples(ABC):
    """Samples of `sequence_length` tokens, by index.

    Attributes:
        name: the user's name of the corpus, for messages.
        sequence_length: tokens per sample.
        tokens: of the corpus.
        num_tokens: their number.
        num_samples: number of samples.
        tokens_fingerprint: identifies tokens and sequence length, however documents become samples.
        fingerprint: identifies tokens and samples.
        padding_share: how much of the samples is padding.
        check: called with tokens and the index of the first one; raises if they are not valid. None if all
            are known to be valid.
    """

    name: str
    sequence_length: int
    tokens: NDArray[Any]
    num_tokens: int
    num_samples: int
    tokens_fingerprint: str
    fingerprint: str
    padding_share: float = 0.0
    check: Callable[[NDArray[Any], int], None] | None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample `index` as int64 (sequence_length,)."""
        return self.batch(np.array([index]))[0]

    @abstractmethod
    def batch(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """Samples `indices` (n,) as int64 (n, sequence_length)."""

    def num_unpadded(self, indices: NDArray[np.int64]) -> torch.Tensor | None:  # noqa: ARG002
        """How many tokens of samples `indices` are no padding, which is last, (n,) int64; None: all."""
        return None

    @abstractmethod
    def pieces(self, index: int) -> list[tuple[int, int]]:
        """First token and length of each piece of the tokens in sample `index`, in its order."""

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Let the system read samples of a memory map from disk in the background, where it can."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        address, size = self.tokens.ctypes.data, self.tokens.itemsize
        for index in indices.tolist():
            for start, length in self.pieces(index):
                first = address + start * size
                page = first // mmap.PAGESIZE * mmap.PAGESIZE
                _madvise()(page, first + length * size - page, mmap.MADV_WILLNEED)


class PackedDataset(Samples):
    """Samples that are cut from the sequence of all documents.

    Args:
        tokens: one-dimensional array of ids; may be a memory map.
        sequence_length: tokens per sample; an incomplete sample at the end is not used.
        fingerprint: identifies the tokens.
        name: the user's name of the corpus, for messages.
        check: called with tokens and the index of the first one; raises if they are not valid. None if all
            are known to be valid.

    Raises:
        UserError: there are fewer tokens than in one sample.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        sequence_length: int,
        *,
        fingerprint: str,
        name: str = "corpus",
        check: Callable[[NDArray[Any], int], None] | None = None,
    ) -> None:
        self.name = name
        self.sequence_length = sequence_length
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.num_samples = self.num_tokens // sequence_length
        digest = hashlib.sha256(f"{fingerprint} by {sequence_length}".encode())
        self.tokens_fingerprint = self.fingerprint = digest.hexdigest()[:32]
        if not self.num_samples:
            raise UserError(
                f"corpus {name} has {self.num_tokens} tokens, fewer than one sequence of {sequence_length}: "
                "use more text or lower data.sequence_length"
            )
        used = tokens[: self.num_samples * sequence_length]
        self._samples = used.reshape(self.num_samples, sequence_length)
        self.check = check

    def pieces(self, index: int) -> list[tuple[int, int]]:
        return [(index * self.sequence_length, self.sequence_length)]

    def batch(self, indices: NDArray[np.int64]) -> torch.Tensor:
        samples = self._samples[indices]
        if self.check is not None:
            for index, sample in zip(indices.tolist(), samples, strict=True):
                self.check(sample, index * self.sequence_length)
        return torch.from_numpy(samples.astype(np.int64))


class BestFitDataset(Samples):
    """Samples of whole documents, with padding.

    Args:
        packed: the same tokens.
        plan: which documents each sample has.
        end: the end-of-document id, which is also the padding.

    Raises:
        UserError: no document ends.
    """

    def __init__(self, packed: PackedDataset, plan: BestFitPlan, end: int) -> None:
        self.name, self.sequence_length, self.check = packed.name, packed.sequence_length, packed.check
        self.tokens, self.num_tokens = packed.tokens, packed.num_tokens
        self.num_samples = len(plan.bounds) - 1
        self.tokens_fingerprint, self.fingerprint = packed.tokens_fingerprint, best_fit_key(packed)
        self._plan, self._end = plan, end
        if not self.num_samples:
            raise UserError(
                f"corpus {self.name} has no end-of-document id {end}: make it with --append-eod, or set "
                'data.packing "wrapped"'
            )
        self.padding_share = 1 - self._num_used() / (self.num_samples * self.sequence_length)

    def _num_used(self) -> int:
        """Tokens up to the last end of a document: all that samples have, without reading all of the plan."""
        for stop in range(self.num_tokens, 0, -SCANNED_AT_ONCE):
            ends = np.flatnonzero(self.tokens[max(0, stop - SCANNED_AT_ONCE) : stop] == self._end)
            if len(ends):
                return max(0, stop - SCANNED_AT_ONCE) + int(ends[-1]) + 1
        return 0

    def batch(self, indices: NDArray[np.int64]) -> torch.Tensor:
        samples = np.full((len(indices), self.sequence_length), self._end, np.int64)
        for sample, index in zip(samples, indices.tolist(), strict=True):
            place = 0
            for start, length in self.pieces(index):
                ids = self.tokens[start : start + length]
                if self.check is not None:
                    self.check(ids, start)
                sample[place : place + length] = ids
                place += length
        return torch.from_numpy(samples)

    def num_unpadded(self, indices: NDArray[np.int64]) -> torch.Tensor:
        return torch.tensor([sum(length for _, length in self.pieces(index)) for index in indices.tolist()])

    def pieces(self, index: int) -> list[tuple[int, int]]:
        first, stop = self._plan.bounds[index : index + 2].tolist()
        starts, lengths = self._plan.starts[first:stop], self._plan.lengths[first:stop]
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def best_fit_key(packed: PackedDataset) -> str:
    """Identifies the plan of these tokens."""
    return key_of((BEST_FIT_FORMAT, packed.fingerprint))


def best_fit(
    packed: PackedDataset, tokenizer: Tokenizer, cache_dir: Path, *, timeout: float = WAIT_SECONDS
) -> BestFitDataset:
    """Plan whole documents in samples, or load the plan from the cache; the arguments are those of `pack`."""
    end = tokenizer.eos_token_id
    assert end is not None, "the settings have been checked"
    path = cached_file(
        cache_dir / "tokens" / f"{best_fit_key(packed)}.npy",
        lambda draft: best_fit_plan(packed.tokens, end, packed.sequence_length).save(draft),
        timeout=timeout,
    )
    return BestFitDataset(packed, BestFitPlan.load(path), end)


def pack(
    corpus: Corpus,
    tokenizer: Tokenizer,
    sequence_length: int,
    cache_dir: Path,
    *,
    workers: int | None = 1,
    timeout: float = WAIT_SECONDS,
    needs_ends: bool = False,
) -> PackedDataset:
    """Tokenise `corpus`, or load the tokens from the cache; a corpus of tokens is read in place.

    Args:
        corpus: its documents.
        tokenizer: tokenises them, and ends each document.
        sequence_length: tokens per sample.
        cache_dir: folder of the cache.
        workers: processes that tokenise, see `write_tokens`.
        timeout: seconds to wait for another process that tokenises the same corpus.
        needs_ends: reject a corpus of tokens whose documents do not end with the end-of-document id.

    Raises:
        UserError: the corpus cannot be read or is shorter than one sequence; the cache cannot be written.
    """
    if isinstance(corpus, TokenCorpus):
        return _in_place(corpus, tokenizer, sequence_length, needs_ends=needs_ends)
    key = key_of((PACKING_FORMAT, corpus.fingerprint, tokenizer.fingerprint))
    path = cached_file(
        cache_dir / "tokens" / f"{key}.npy",
        lambda draft: write_tokens(corpus, tokenizer, draft, workers=workers),
        timeout=timeout,
    )
    num_bad = facts_of(path).get("bad_records", 0)  # the file may be from a run that allowed more of them
    if num_bad > corpus.bad_records.limit:
        raise UserError(
            f"corpus {corpus.name} has {num_bad} bad records, and data.max_bad_records is "
            f"{corpus.bad_records.limit}: fix the records, or raise it"
        )
    tokens = np.load(path, mmap_mode="r")
    return PackedDataset(tokens, sequence_length, fingerprint=key, name=corpus.name)


def _in_place(
    corpus: TokenCorpus, tokenizer: Tokenizer, sequence_length: int, *, needs_ends: bool
) -> PackedDataset:
    corpus.check_tokens(tokenizer.vocab_size, tokenizer.eos_token_id, needs_ends=needs_ends)
    return PackedDataset(
        corpus.tokens,
        sequence_length,
        fingerprint=f"{corpus.fingerprint} {tokenizer.fingerprint}",
        name=corpus.name,
        check=lambda ids, start: corpus.refuse_outside(ids, start, tokenizer.vocab_size),
    )
