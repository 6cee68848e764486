"""Labels of a training batch: those of Hugging Face models, which shift them by one position."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_LABEL = -100  # of a position that nothing predicts; torch's and Hugging Face's default


def count_labels(labels: Tensor) -> Tensor:
    """The number of predicted tokens in each row, (batch,) int64; a row's first token never is one.

    Args:
        labels: (batch, tokens).
    """
    return (labels[:, 1:] != IGNORED_LABEL).sum(1)
