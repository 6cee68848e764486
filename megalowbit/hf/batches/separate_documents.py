"""Attention within each document of a row, which is found by the positions of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megalowbit.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def attention_within_documents(
    batch: Mapping[str, Any], config: PretrainedConfig | None
) -> AbstractContextManager[None]:
    """Context for forwards of batches like this one, without padding to attend to.

    Without `position_ids`, a row is one sequence. With them, a row has a document wherever they do not go on
    by one, and tokens attend to their own document only.

    transformers finds the same in the positions, but reads the device for that in each forward, so the host
    would wait for all earlier micro-batches. Flash attention needs no mask, but `document_bounds`.

    Args:
        batch: the arguments of the forward.
        config: of the model whose forward gets the batch. None: of a pipeline, whose stages find documents in
            the positions, or of an estimate, which has no flash attention.

    Raises:
        UserError: transformers has no function that finds documents by their positions.
        ValueError: flash attention would cross documents, because the batch lacks their bounds.
    """
    needs_mask = "position_ids" in batch and "cu_seq_lens_q" not in batch
    is_single = len(batch["input_ids"]) == 1  # transformers finds the documents in it
    if needs_mask and not is_single and config is not None and uses_flash_attention(config):
        raise ValueError(
            "flash attention needs the bounds of the documents in several rows: add those of "
            "document_bounds(position_ids) to the batch, as upload does"
        )
    return _finding(_documents if needs_mask else None)


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
    return _starts(position_ids).cumsum(1)


def _starts(position_ids: torch.Tensor) -> torch.Tensor:
    """1 where a document begins, else 0; (batch, tokens)."""
    starts = torch.ones_like(position_ids)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    return starts


def uses_flash_attention(config: PretrainedConfig) -> bool:
    """Whether the model's attention is one of flash attention's, which transformers tells by the name."""
    return "flash" in (config._attn_implementation or "")


def document_bounds(position_ids: torch.Tensor) -> dict[str, Any]:
    """Arguments of a forward with flash attention that keep the documents of all rows apart.

    They are transformers' `FlashAttentionKwargs`. Attention takes the tokens of all rows as one sequence, in
    which these are the documents, and its output has the rows again. transformers finds documents by their
    positions only in a batch of one row, and reads the device for that in each block.

    Args:
        position_ids: (batch, tokens). If they are on a GPU, the host waits for it.

    Returns:
        For queries and keys: where documents begin and the last one ends, int32 (documents + 1,); and the
        length of the longest document.
    """
    starts = _starts(position_ids).flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(starts, (0, 1), value=position_ids.numel()).int()
    longest = int(bounds.diff().max())
    return {f"cu_seq_lens_{of}": bounds for of in "qk"} | {f"max_length_{of}": longest for of in "qk"}
