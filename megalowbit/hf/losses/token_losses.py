"""Sums of the losses of single tokens, to evaluate a model on a text.

A model's own loss is a mean over the positions of a batch, of which each predicts the label after it. Here
each position has its own target, and the result is a sum: sums over batches of any size add up exactly to
that over a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalowbit.families.vocabulary import unpadded_size
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.hf.losses.chunked_cross_entropy import is_chunked, noted_losses
from megalowbit.labels import IGNORED_LABEL


def sum_of_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the positions of −log softmax(logits)[target].

    Args:
        logits: (batch, tokens, vocabulary); each loss is computed in fp32.
        targets: (batch, tokens), int64; −100 is ignored.

    Returns:
        0-dim, float64.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.double().sum()


def sum_of_model_losses(run: Callable[..., Any], model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The sum of a batch's losses; a model that trains without the matrix of all logits needs none here.

    Args:
        run: the model, or an engine around it.
        model: a causal language model of transformers, in evaluation mode.
        batch: `input_ids` (batch, tokens); `labels` of that shape, the target of each position; perhaps
            `position_ids`, see `attention_within_documents`, and `document_bounds`.

    Returns:
        0-dim, float64.
    """
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    targets = batch["labels"]
    with attention_within_documents(batch, model.config):
        if not is_chunked(model):
            logits = run(**inputs, use_cache=False).logits
            return sum_of_token_losses(logits[..., : unpadded_size(model.config)], targets)
        options = {"shift_labels": targets, "num_items_in_batch": 1, "use_cache": False}
        total: Tensor = run(**inputs, labels=targets, needs_logits=False, **options).loss
    return total.double()


@torch.no_grad()
def sums_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of each row of a training batch, whose positions predict the label after them.

    Rows are computed one after another, because each needs an fp32 copy of its logits.

    Args:
        logits: (batch, tokens, vocabulary).
        labels: (batch, tokens), int64; −100 is ignored.

    Returns:
        (batch,), float64.
    """
    rows = zip(logits.split(1), labels.split(1), strict=True)
    return torch.stack([sum_of_token_losses(each[:, :-1], row[:, 1:]) for each, row in rows])


@contextmanager
def losses_of_rows(model: Any, labels: Tensor) -> Iterator[Callable[[Any], Tensor]]:
    """Context of one forward of a model in training; its loss and gradients are not changed.

    Args:
        model: a causal language model of transformers.
        labels: (batch, tokens), those of the forward.

    Yields:
        A function from the model's output to the sum of the losses of each row, (batch,) float64.
    """
    if not is_chunked(model):
        yield lambda output: sums_of_rows(output.logits.detach(), labels)
        return
    with noted_losses(model) as found:
        yield lambda _: found[-1].double().view(labels.shape).sum(1)
