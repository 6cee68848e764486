"""Attention within each document of a row, which transformers finds by the positions of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megalowbit.errors import UserError


def rows_of(batch: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context for forwards of batches like this one, without padding to attend to.

    Without `position_ids`, a row is one sequence. With them, a row has a document wherever they do not go on
    by one, and tokens attend to their own document only.

    transformers finds the same in the positions, but reads the device for that in each forward, so the host
    would wait for all earlier micro-batches.

    Raises:
        UserError: transformers has no function that finds documents by their positions.
    """
    return _finding(_documents if "position_ids" in batch else None)


@contextmanager
def _finding(find: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
    """Let transformers find the documents of rows by `find`; None: each row is one."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    original = getattr(masking_utils, name, None)
    if original is None:  # another version of transformers
        if find is not None:
            raise UserError(
                'data.packing: this version of transformers does not keep documents apart: set "wrapped", or '
                "use a version allowed by setup.py"
            )
        yield
        return
    setattr(masking_utils, name, find or (lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(masking_utils, name, original)


def _documents(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row, (batch, tokens)."""
    starts = torch.zeros_like(position_ids)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    return starts.cumsum(1)
