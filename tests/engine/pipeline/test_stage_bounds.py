import inspect

import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import utils

from megalowbit.engine.pipeline.parts import Block
from megalowbit.engine.pipeline.stage_bounds import stage_bounds
from megalowbit.errors import UserError


def part(count):
    block = Block({"layer": torch.nn.Linear(count, 1, bias=False)})
    return block if count == 10 else torch.nn.Linear(count, 1, bias=False)


PARTS = [part(50), *[part(10)] * 4, part(52)]  # embedding, blocks, head


@pytest.mark.parametrize(
    ("partition", "bounds"),
    [("uniform", [0, 2, 4, 6]), ("parameters", [0, 1, 5, 6]), ("type:block", None)],
)
def test_parts_are_partitioned_as_by_deepspeed(partition, bounds):
    found = stage_bounds(PARTS, 3, partition)
    assert found == (bounds or utils.partition_balanced(weights=[0, 1, 1, 1, 1, 0], num_parts=3))


def test_deepspeed_still_calls_the_same_partitioning_functions():
    source = inspect.getsource(PipelineModule._partition_layers)
    for name in ("partition_uniform(num_items=", "partition_balanced(weights="):
        assert name in source, f"{name} has gone: a dry run sizes other stages than the run has"


def test_a_stage_without_parts_is_rejected():
    with pytest.raises(UserError, match=r"pipeline\.stages = 7 leaves stage 6"):
        stage_bounds(PARTS, 7, "uniform")
