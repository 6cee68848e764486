"""Activation checkpointing of chosen blocks, with the switch that transformers' models have.

A recomputed block keeps its input only; its backward runs its forward again. Low-bit layers then draw the
same random numbers and report nothing (`layers.matmul.use_counter`), so losses, gradients and counts are
bitwise those of a run that keeps everything.
"""

from __future__ import annotations

from typing import Any

from megalowbit.errors import UserError
from megalowbit.families.registry import family
from megalowbit.layers.settings import ActivationCheckpointingSettings


def recompute_blocks(model: Any, settings: ActivationCheckpointingSettings) -> None:
    """Turn activation checkpointing on in the chosen blocks, and off in the others, in place.

    Does nothing if the settings choose no block: the model keeps what the user has set.

    Raises:
        UserError: the model is not of a known family.
    """
    if not settings.every:
        return
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "activation_checkpointing_enable"):
        raise UserError(
            f"activation_checkpointing.every = {settings.every} needs a model of transformers, not "
            f"{type(model).__name__}: set it to 0 and use torch.utils.checkpoint in the model"
        )
    blocks = model.get_submodule(family(config.model_type).blocks)
    # reentrant checkpointing would need inputs that require gradients
    model.activation_checkpointing_enable({"use_reentrant": False})
    for index, block in enumerate(blocks.children()):
        block.gradient_checkpointing = settings.is_recomputed(index)
