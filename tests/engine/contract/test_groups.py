"""DeepSpeed's process groups: the order of ranks, and the methods of an mpu that it calls."""

import inspect
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import groups

from megalowbit.distributed.mpu import GroupsOfRank, adapt_mpu, find_grid
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import start_process_group

# called only if the mpu is DeepSpeed's own grid, in expert or sequence parallel runs, or if hasattr finds it
NOT_OURS = {
    "get_pipe_parallel_world_size",
    "get_pipe_parallel_group",
    "get_slice_parallel_group",
    "get_slice_parallel_rank",
    "get_slice_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
}
# never reached in training
LEFT_OUT = ("inference", "model_implementations", "autotuning", "compression")


def methods_that_deepspeed_calls():
    root = Path(deepspeed.__file__).parent
    names = set()
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] not in LEFT_OUT:
            names |= set(re.findall(r"\bmpu\.(get_\w+)", path.read_text(encoding="utf-8")))
    return names


def test_an_adapted_mpu_has_every_method_that_deepspeed_calls():
    missing = methods_that_deepspeed_calls() - NOT_OURS - set(dir(GroupsOfRank))
    assert not missing, f"training with an mpu would end in an AttributeError: {sorted(missing)}"


def test_an_adapted_mpu_is_not_mistaken_for_one_of_sequence_parallelism():
    names = {name for name in dir(GroupsOfRank) if "sequence" in name}
    assert not names, "hasattr() decides in DeepSpeed: gradients would be reduced over other groups"


def coordinates(grid):
    return {"pipe": grid.stage, "data": grid.data_rank, "model": grid.tensor_rank}


@pytest.mark.parametrize(
    ("stages", "tensor", "data"), [(1, 1, 4), (2, 1, 2), (4, 1, 3), (1, 2, 3), (1, 4, 2)]
)
def test_deepspeed_orders_ranks_like_the_process_grid(stages, tensor, data):
    if tensor == 1:
        theirs = PipeDataParallelTopology(num_pp=stages, num_dp=data)
    else:
        theirs = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    for rank in range(stages * tensor * data):
        grid = ProcessGrid(rank, stages * tensor * data, tensor_size=tensor, pipeline_size=stages)
        found = theirs.get_coord(rank)._asdict()
        assert {axis: coordinates(grid)[axis] for axis in found} == found, "ranks would read others' data"


def test_groups_of_an_earlier_engine_stay_in_the_module_until_cleared():
    source = inspect.getsource(DeepSpeedEngine)
    assert "groups.mpu = self.mpu" in source, "no longer set: initialize need not forget it"
    groups.mpu = object()
    config = {"train_micro_batch_size_per_gpu": 1, "megalowbit": {"precision": "fp32"}}
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    initialize(model=torch.nn.Linear(2, 2), config={**config, **optimizer})
    assert groups.mpu is None, "a plain engine would ask the groups of one before it"


def test_a_pipeline_module_reports_its_stages_and_groups():
    start_process_group()
    module = PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    assert find_grid({}, stages=module.num_stages) == ProcessGrid(0, 1), "stages would not be known"
    assert adapt_mpu(module.mpu()).get_pipeline_model_parallel_world_size() == 1
