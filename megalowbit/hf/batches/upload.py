"""Copies batches to the device of a model, with what its attention needs to keep documents apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megalowbit.hf.batches.separate_documents import document_bounds, uses_flash_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def upload(
    batch: Mapping[str, torch.Tensor], device: torch.device, config: PretrainedConfig | None = None
) -> dict[str, Any]:
    """The batch on a device; the host does not wait for a copy to a GPU, which starts from pinned memory.

    Args:
        batch: on the CPU.
        device: of the result.
        config: of a model whose forward gets the batch: with flash attention, `document_bounds` are added to
            separate documents, and to a single row, in which transformers would look for documents. None: of
            a pipeline, whose stages find them in the positions.
    """
    given: dict[str, Any] = dict(batch)
    if config is not None and uses_flash_attention(config):
        positions = batch.get("position_ids")
        if positions is None and len(batch["input_ids"]) == 1:
            positions = torch.arange(batch["input_ids"].shape[1])[None]
        if positions is not None:
            given |= document_bounds(positions)
    is_pinned = copies_in_background(device)  # torch keeps pinned memory until the copies from it have ended
    return {
        name: (each.pin_memory() if is_pinned else each).to(device, non_blocking=is_pinned)
        if isinstance(each, torch.Tensor)
        else each
        for name, each in given.items()
    }


def copies_in_background(device: torch.device) -> bool:
    """Whether batches are copied to the device from pinned memory, while the host goes on."""
    return device.type == "cuda"
