"""Text for validation, in batches that do not depend on the number of ranks, and the loss on it.

The tokens are those of the documents in their order, with an end-of-document id after each. Every token after
the first is predicted exactly once, from at most `sequence_length` tokens before it:

    sequence i predicts the tokens i·L+1 … (i+1)·L from the tokens i·L … (i+1)·L−1
    the last one ends with the last token; it begins earlier if it would be shorter, and then ignores the
    predictions that the sequence before it has made

With a limit, sequences are spread evenly over the text, with the same number of tokens left out around each,
because the first tokens may all be of one document. Which tokens are predicted depends on the numbers of
tokens alone, and no others are read.

Sequences are numbered, and batch k always has the sequences k·size … (k+1)·size−1. Ranks share batches, not
sequences: what depends on a batch, such as the scale of a tensor in FP4, is the same for any number of ranks.
All batches have the same shape. The last one is filled with repetitions of its own sequences, whose
predictions are ignored: they change neither a maximum nor the count.

Documents are as separate as in training. If first tokens of documents are no labels there, they are not
predicted here either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalowbit.data.cache.digests import key_of
from megalowbit.data.corpus import Corpus
from megalowbit.data.packing import DocumentRules, pack
from megalowbit.data.settings import DataSettings
from megalowbit.data.sources import (
    check_held_out,
    is_on_hub,
    open_validation_corpus,
    sources_of,
    validation_settings,
)
from megalowbit.data.tokenize import Tokenizer
from megalowbit.errors import UserError
from megalowbit.labels import IGNORED_LABEL

Batch = Mapping[str, torch.Tensor]

TOKENS_AT_ONCE = 2**16  # looked at


class ValidationText:
    """Sequences and their targets, by the number of the batch.

    Args:
        tokens: one-dimensional array of ids; may be a memory map.
        sequence_length: tokens in a sequence.
        fingerprint: identifies the tokens.
        name: the user's name of the text.
        limit: predict only so many tokens, in sequences that are spread evenly over the text; None: all.
        check: as for `PackedDataset`; `count_bytes` calls it.
        rules: what batches make of documents; None: nothing.

    Attributes:
        tokens_fingerprint: identifies the tokens.
        num_left_out: number of tokens after the first that are not predicted.
        num_predicted: number of tokens that are predicted, first tokens of documents included.
        fingerprint: identifies the sequences.

    Raises:
        UserError: there are fewer tokens than in one sequence.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        sequence_length: int,
        *,
        fingerprint: str,
        name: str,
        limit: int | None = None,
        check: Callable[[NDArray[Any], int], None] | None = None,
        rules: DocumentRules | None = None,
    ) -> None:
        if len(tokens) < sequence_length:
            raise UserError(
                f"{name} has {len(tokens)} tokens, fewer than one sequence of {sequence_length}: use more "
                "text"
            )
        self.name, self.sequence_length = name, sequence_length
        self.tokens_fingerprint, self._tokens, self._check = fingerprint, tokens, check
        self.num_predicted = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        self.num_left_out = len(tokens) - 1 - self.num_predicted
        self._rules = rules or DocumentRules()
        if not self._has_labels():
            raise UserError(
                f"{name}: all tokens to predict are first tokens of documents, which data.eod_mask_loss "
                "leaves out: use text with longer documents"
            )
        parts: tuple[Any, ...] = (fingerprint, sequence_length, self.num_predicted)
        if self.num_left_out:  # earlier versions predicted the first tokens, whose loss is another one
            parts += ("spread evenly",)
        if self._rules.are_separate or self._rules.masks_first:
            parts += (self._rules.end, self._rules.are_separate, self._rules.masks_first)
        self.fingerprint = key_of(parts)

    def limited(self, limit: int | None) -> ValidationText:
        """The same text, of which only `limit` tokens are predicted, evenly spread; None: all."""
        return ValidationText(
            self._tokens,
            self.sequence_length,
            fingerprint=self.tokens_fingerprint,
            name=self.name,
            limit=limit,
            check=self._check,
            rules=self._rules,
        )

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return math.ceil(self.num_predicted / self.sequence_length)

    def num_batches(self, size: int) -> int:
        """Number of batches of `size` sequences."""
        return math.ceil(self.num_sequences / size)

    def batch(self, number: int, size: int) -> Batch:
        """Batch `number`: `input_ids` and `labels`, both int64 (size, sequence_length), on the CPU.

        If documents are separate, also `position_ids` of that shape. The label of a position is the next
        token, so it must not be shifted again; or `IGNORED_LABEL`.
        """
        first = number * size
        count = min(size, self.num_sequences - first)
        rows = [self._sequence(first + place) for place in range(count)]
        unused = np.full(self.sequence_length, IGNORED_LABEL)
        rows += [(rows[place % count][0], unused) for place in range(count, size)]
        ids, targets = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
        if self._rules.masks_first:
            targets[ids == self._rules.end] = IGNORED_LABEL
        return {"input_ids": ids, "labels": targets, **self._rules.positions(ids)}

    def _sequence(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids and targets of a sequence."""
        length = self.sequence_length
        first, last = self._bounds(number)
        start = max(0, last - length)
        targets = np.full(length, IGNORED_LABEL)
        targets[first - start : last - start] = self._tokens[first + 1 : last + 1]
        return self._tokens[start : start + length].astype(np.int64), targets

    def _bounds(self, number: int) -> tuple[int, int]:
        """Sequence `number` predicts the tokens first + 1 … last."""
        before = number * self.sequence_length  # tokens that the sequences before it predict
        size = min(self.sequence_length, self.num_predicted - before)
        left_out = self.num_left_out * (2 * number + 1) // (2 * self.num_sequences)  # before it
        return before + left_out, before + left_out + size

    def _blocks(self) -> list[tuple[int, int]]:
        """The bounds of all sequences; of all together if no token is left out."""
        if not self.num_left_out:
            return [(0, self.num_predicted)]
        return [self._bounds(number) for number in range(self.num_sequences)]

    def _predicted(self, shift: int = 0) -> NDArray[Any]:
        """The predicted tokens; or those that are `shift` places after them."""
        found = [self._tokens[first + 1 + shift : last + 1 + shift] for first, last in self._blocks()]
        return np.asarray(found[0]) if len(found) == 1 else np.concatenate(found)

    def _has_labels(self) -> bool:
        """Whether any prediction counts; reads no further than to the first one."""
        if not self._rules.masks_first:
            return self.num_predicted > 0
        return any(
            bool((self._tokens[start : min(start + TOKENS_AT_ONCE, last)] != self._rules.end).any())
            for first, last in self._blocks()
            for start in range(first, last, TOKENS_AT_ONCE)
        )

    def count_tokens(self) -> int:
        """Number of tokens whose predictions count."""
        if not self._rules.masks_first:
            return self.num_predicted
        return int((self._predicted(-1) != self._rules.end).sum())

    def count_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of the text of the tokens whose predictions count; checks every token that is read.

        Raises:
            UserError: a token id is outside the vocabulary.
        """
        if self._check is not None:
            for first, last in self._blocks():
                start = min(first, max(0, last - self.sequence_length))
                self._check(self._tokens[start : max(start + self.sequence_length, last + 1)], start)
        before, ids = self._predicted(-1), self._predicted()
        if self._rules.masks_first:
            is_counted = before != self._rules.end
            before, ids = before[is_counted], ids[is_counted]
        return tokenizer.count_bytes(ids, before)


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The loss on a text.

    Attributes:
        nats: sum of the losses of all predicted tokens.
        num_tokens: number of predicted tokens.
        num_bytes: bytes of their text.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss of the whole text in bits, per byte of it; None: the tokens stand for no text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def open_validation(
    settings: DataSettings,
    tokenizer: Tokenizer,
    trained_on: Iterable[Corpus] = (),
    *,
    is_training: bool = True,
) -> ValidationText | None:
    """The text for validation, tokenised or from the cache; None: the settings name none. Not collective.

    Args:
        settings: which text.
        tokenizer: of the model.
        trained_on: corpora that must not have files of the text.
        is_training: refuse text that the settings also name for training.

    Raises:
        UserError: it cannot be read, is shorter than one sequence, or is the text for training.
    """
    if settings.validation is None:
        return None
    with _naming_the_section(settings):
        corpus = open_validation_corpus(settings, is_training=is_training)
        check_held_out(corpus, trained_on, settings.cache_dir)
        found = pack(
            corpus,
            tokenizer,
            settings.sequence_length,
            settings.cache_dir,
            workers=settings.workers,
            timeout=settings.build_timeout,
            needs_ends=settings.needs_ends,
        )
    return ValidationText(
        found.tokens,
        settings.sequence_length,
        fingerprint=found.fingerprint,
        name=corpus.name,
        check=found.check and _naming_the_section(settings)(found.check),
        rules=DocumentRules.of(settings, tokenizer),
    )


def describe_validation(settings: DataSettings) -> str | None:
    """The name of the text, which is opened but not read, nor downloaded; None: the settings name none.

    Raises:
        UserError: it does not exist, or is the text for training.
    """
    if settings.validation is None:
        return None
    with _naming_the_section(settings):
        other = validation_settings(settings)
        for each in sources_of(other).values():
            if is_on_hub(each):
                return f"data set {each.corpus}, {each.split} (not downloaded)"
        return open_validation_corpus(settings).name


@contextmanager
def _naming_the_section(settings: DataSettings) -> Iterator[None]:
    """Let errors begin with `data.validation`, unless it is a share of the text for training."""
    try:
        yield
    except UserError as error:
        if settings.validation is not None and settings.validation.share is not None:
            raise
        raise UserError(f"data.validation: {str(error).removeprefix('data.validation: ')}") from error
