"""Packs documents into one flat array of token ids on disk, read as fixed-length samples via a memory map.

Each document is followed by the end-of-document id and the next document. Sample i consists of the tokens
i·L … (i+1)·L-1, so samples cross document boundaries and nothing is padded. The array is cached as an
ordinary `.npy` file under a key of corpus and tokenizer; it does not depend on L. It is written as a stream:
neither the text nor the tokens have to fit into memory.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from megalowbit.data.cache import cached_file
from megalowbit.data.corpus import Corpus
from megalowbit.data.tokenize import Tokenizer
from megalowbit.errors import UserError

logger = logging.getLogger(__name__)

PACKING_FORMAT = 1  # increment when the layout changes, so that old files are not read
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 2**20
HEADER_BYTES = 128


class PackedDataset:
    """Samples of `sequence_length` tokens, by index.

    Args:
        tokens: one-dimensional array of ids; may be a memory map.
        sequence_length: tokens per sample; an incomplete sample at the end is not used.
        fingerprint: identifies the tokens.
        name: the user's name of the corpus, for messages.

    Raises:
        UserError: there are fewer tokens than in one sample.
    """

    def __init__(
        self, tokens: NDArray[Any], sequence_length: int, *, fingerprint: str, name: str = "corpus"
    ) -> None:
        self.name = name
        self.sequence_length = sequence_length
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.num_samples = self.num_tokens // sequence_length
        self.fingerprint = hashlib.sha256(f"{fingerprint} by {sequence_length}".encode()).hexdigest()[:32]
        if not self.num_samples:
            raise UserError(
                f"corpus {name} has {self.num_tokens} tokens, fewer than one sequence of {sequence_length}: "
                "use more text or lower data.sequence_length"
            )
        used = tokens[: self.num_samples * sequence_length]
        self._samples = used.reshape(self.num_samples, sequence_length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample `index` as int64 (sequence_length,)."""
        return torch.from_numpy(self._samples[index].astype(np.int64))

    def batch(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """Samples `indices` (n,) as int64 (n, sequence_length)."""
        return torch.from_numpy(self._samples[indices].astype(np.int64))


def pack(corpus: Corpus, tokenizer: Tokenizer, sequence_length: int, cache_dir: Path) -> PackedDataset:
    """Tokenise `corpus`, or load the tokens from the cache.

    Raises:
        UserError: the corpus cannot be read or is shorter than one sequence; the cache cannot be written.
    """
    parts = (PACKING_FORMAT, corpus.fingerprint, tokenizer.fingerprint)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    path = cached_file(cache_dir / "tokens" / f"{key}.npy", lambda draft: _write(corpus, tokenizer, draft))
    tokens = np.load(path, mmap_mode="r")
    return PackedDataset(tokens, sequence_length, fingerprint=key, name=corpus.name)


def _write(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> None:
    logger.info("tokenising %s (%s)", corpus.name, tokenizer.name)
    start = time.monotonic()
    num_tokens = num_documents = 0
    with path.open("wb") as file:
        file.write(_header(tokenizer.dtype, 0))  # written again below, when the number of tokens is known
        for texts in _batches(corpus.documents()):
            num_documents += len(texts)
            num_tokens += _write_batch(file, tokenizer, texts)
        file.seek(0)
        file.write(_header(tokenizer.dtype, num_tokens))
    if not num_documents:
        raise UserError(f"corpus {corpus.name} contains no text: name another")
    seconds = time.monotonic() - start
    logger.info("%s: %d documents, %d tokens, %.1f s", corpus.name, num_documents, num_tokens, seconds)


def _write_batch(file: BinaryIO, tokenizer: Tokenizer, texts: list[str]) -> int:
    end = np.array([tokenizer.eos_token_id], dtype=tokenizer.dtype)
    count = 0
    for ids in tokenizer.encode_batch(texts):
        for piece in (ids, end):
            file.write(piece.data)  # the buffer itself: no second copy of a long document
            count += len(piece)
    return count


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Groups of documents, large enough to tokenise in parallel and small enough for memory."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """A `.npy` header of fixed length, which can be overwritten once the shape is known."""
    text = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(text, facts)
    header = text.getvalue()
    assert len(header) == HEADER_BYTES, "numpy pads headers so that a shape may grow in place"
    return header
