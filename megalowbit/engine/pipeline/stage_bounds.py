"""Computes which parts of a model each pipeline stage gets, without building a pipeline.

Calls DeepSpeed's functions with the same arguments as its `PipelineModule`; a test compares the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from megalowbit.engine.pipeline.parts import Block
from megalowbit.errors import UserError


def stage_bounds(parts: Sequence[nn.Module], num_stages: int, partition: str) -> list[int]:
    """Index of each stage's first part among `parts_of` a model, and the end of the last stage.

    For `partition`, see `pipeline_module`.
    """
    from megalowbit.engine.process_start import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime import utils

    if partition == "uniform":
        bounds = utils.partition_uniform(num_items=len(parts), num_parts=num_stages)
    else:
        weights = [
            int(isinstance(part, Block))
            if partition == "type:block"
            else sum(each.numel() for each in part.parameters() if each.requires_grad)
            for part in parts
        ]
        bounds = utils.partition_balanced(weights=weights, num_parts=num_stages)
    found = [int(bound) for bound in bounds]
    for stage, (start, stop) in enumerate(pairwise(found)):
        if start == stop:
            raise empty_stage(num_stages, stage, len(parts))
    return found


def empty_stage(num_stages: int, stage: int, num_parts: int) -> UserError:
    """The error for a stage without any part of the model."""
    return UserError(
        f"pipeline.stages = {num_stages} leaves stage {stage} without any of the model's "
        f"{num_parts} parts (embedding, blocks, head): lower it, or set pipeline.partition to "
        '"uniform"'
    )
