"""An mpu in a group of one; groups of several ranks are in tests/distributed/test_grid.py."""

import types

import pytest
import torch.distributed as dist

from megalowbit.distributed.mpu import GroupsOfRank, adapt_mpu, find_grid
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError


@pytest.fixture
def group():
    start_process_group()
    return dist.new_group([0])


def test_none_stays_none():
    assert adapt_mpu(None) is None


@pytest.mark.parametrize(
    "names",
    [
        ["get_data_parallel_group", "get_model_parallel_group"],  # units older than pipelines
        ["get_data_parallel_group", "get_tensor_model_parallel_group"],
        ["get_data_parallel_group", "get_slice_parallel_group", "get_pipe_parallel_group"],
    ],
)
def test_missing_mpu_functions_are_derived_from_the_existing_groups(group, names):
    mpu = adapt_mpu(types.SimpleNamespace(**{name: lambda: group for name in names}))
    assert isinstance(mpu, GroupsOfRank)
    assert mpu.get_model_parallel_group() is mpu.get_tensor_model_parallel_group() is group
    assert (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()) == (0, 1)
    assert mpu.get_data_parallel_group_ranks() == [0]
    assert (mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()) == (0, 1)
    assert mpu.get_tensor_model_parallel_src_rank() == 0
    assert mpu.get_pipeline_model_parallel_rank() == 0
    assert mpu.get_pipeline_model_parallel_world_size() == 1


def test_an_adapted_unit_is_complete_already(group):
    first = adapt_mpu(
        types.SimpleNamespace(get_data_parallel_group=lambda: group, get_model_parallel_group=lambda: group)
    )
    assert adapt_mpu(first) == first
    assert find_grid({}, mpu=first).data_size == 1


def test_the_group_that_is_missing_is_named(group):
    with pytest.raises(UserError, match=r"^mpu has no get_data_parallel_group\(\): initialise Megatron's"):
        adapt_mpu(types.SimpleNamespace(get_model_parallel_group=lambda: group))
    with pytest.raises(UserError, match=r"^mpu has no get_tensor_model_parallel_group\(\): "):
        adapt_mpu(types.SimpleNamespace(get_data_parallel_group=lambda: group))


def test_ranks_and_sizes_that_the_groups_contradict_are_refused(group):
    unit = types.SimpleNamespace(
        get_data_parallel_group=lambda: group,
        get_model_parallel_group=lambda: group,
        get_model_parallel_world_size=lambda: 2,
    )
    with pytest.raises(
        UserError, match=r"get_model_parallel_world_size\(\) = 2 on rank 0, but its group gives 1"
    ):
        adapt_mpu(unit)


def test_an_mpu_that_raises_is_a_one_line_error(group):
    def fails():
        raise RuntimeError("parallel state\nis not set")

    unit = types.SimpleNamespace(get_data_parallel_group=fails, get_model_parallel_group=lambda: group)
    with pytest.raises(
        UserError, match=r"^mpu.get_data_parallel_group\(\) raises RuntimeError: parallel state; initialise"
    ):
        adapt_mpu(unit)
