"""Tensor parallelism in one process; tests/distributed tests sharded models."""

import pytest
import torch

from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "megalowbit": {"precision": "fp32"},
}


@pytest.mark.parametrize("block", [{}, {"autotp_size": 1}, {"autotp_size": 0}])
def test_a_single_rank_is_not_sharded(block):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    engine = initialize(model=model, config={**BASE, "tensor_parallel": block})[0]
    assert type(engine.module[0]) is torch.nn.Linear


def test_more_tensor_parallel_ranks_than_the_world_size_are_rejected():
    with pytest.raises(UserError, match=r"autotp_size = 2 does not divide the 1 process"):
        initialize(model=torch.nn.Linear(2, 1), config={**BASE, "tensor_parallel": {"autotp_size": 2}})


@pytest.mark.parametrize(
    ("key", "value"), [("partition_config", {"layer_specs": []}), ("preset_model", "llama")]
)
def test_tensor_parallel_plans_of_deepspeed_are_rejected(key, value):
    with pytest.raises(UserError, match=f"tensor_parallel.{key}"):
        initialize(
            model=torch.nn.Linear(2, 1), config={**BASE, "tensor_parallel": {"autotp_size": 1, key: value}}
        )
