import subprocess
import sys

import pytest

from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.errors import UserError

CUTS = [(4, 1, 1), (4, 2, 1), (8, 4, 1), (6, 3, 1), (4, 1, 2), (12, 1, 3), (4, 4, 1), (4, 1, 4), (1, 1, 1)]


def grids(world_size, tensor_size, pipeline_size):
    return [ProcessGrid(rank, world_size, tensor_size, pipeline_size) for rank in range(world_size)]


@pytest.mark.parametrize("cut", CUTS)
def test_every_place_is_taken_once(cut):
    places = {(grid.stage, grid.data_rank, grid.tensor_rank) for grid in grids(*cut)}
    world_size, tensor_size, pipeline_size = cut
    data_size = world_size // tensor_size // pipeline_size
    assert places == {
        (stage, data, tensor)
        for stage in range(pipeline_size)
        for data in range(data_size)
        for tensor in range(tensor_size)
    }


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["tensor_ranks", "data_ranks", "pipeline_ranks", "model_parallel_ranks"])
def test_groups_are_the_same_for_all_their_members_and_hold_each_rank_once(cut, kind):
    everyone = grids(*cut)
    groups = {getattr(grid, kind) for grid in everyone}
    for grid in everyone:
        assert grid.rank in getattr(grid, kind)
    assert sorted(rank for group in groups for rank in group) == list(range(cut[0]))


@pytest.mark.parametrize("cut", CUTS)
def test_members_of_a_group_differ_only_in_its_coordinate(cut):
    everyone = grids(*cut)
    for grid in everyone:
        assert [everyone[rank].tensor_rank for rank in grid.tensor_ranks] == list(range(grid.tensor_size))
        assert [everyone[rank].data_rank for rank in grid.data_ranks] == list(range(grid.data_size))
        assert [everyone[rank].stage for rank in grid.pipeline_ranks] == list(range(grid.pipeline_size))
        assert {everyone[rank].data_rank for rank in grid.model_parallel_ranks} == {grid.data_rank}
        shared = set(grid.data_ranks) & set(grid.model_parallel_ranks)
        assert shared == {grid.rank}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, (4, 1, 1)),
        ({"tensor_parallel": {"autotp_size": 2}}, (2, 2, 1)),
        ({"tensor_parallel": {"autotp_size": 0}, "pipeline": {"stages": 2}}, (2, 1, 2)),
        ({"tensor_parallel": {"autotp_size": None}, "pipeline": {"partition": "best"}}, (4, 1, 1)),
        ({"tensor_parallel": [], "pipeline": None}, (4, 1, 1)),  # refused where values are checked
    ],
)
def test_sizes_are_read_from_the_configuration(config, sizes):
    grid = ProcessGrid.from_config(config, 3, 4)
    assert (grid.data_size, grid.tensor_size, grid.pipeline_size) == sizes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}},
            "tensor_parallel.autotp_size = 3 does not divide the 4 proc",
        ),
        (
            {"pipeline": {"stages": 8}},
            "pipeline.stages = 8 does not divide the 4 processes of the job: start",
        ),
        ({"pipeline": {"stages": -1}}, "pipeline.stages = -1 must be a whole number ≥ 1"),
        ({"pipeline": {"stages": 0}}, "pipeline.stages = 0 must be a whole number ≥ 1, or left out"),
        (
            {"tensor_parallel": {"autotp_size": -2}},
            "tensor_parallel.autotp_size = -2 must be a whole number ≥ 1",
        ),
        (
            {"tensor_parallel": {"autotp_size": "2"}},
            "tensor_parallel.autotp_size = '2' must be a whole number",
        ),
        ({"pipeline": {"stages": True}}, "pipeline.stages = True must be a whole number"),
        (
            {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}},
            "tensor_parallel.autotp_size = 2 cannot be used with pipeline.stages = 2: set one of them to 1",
        ),
    ],
)
def test_impossible_sizes_are_one_line_errors(config, said):
    with pytest.raises(UserError) as error:
        ProcessGrid.from_config(config, 0, 4)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_size_below_one_is_named():
    with pytest.raises(UserError, match=r"pipeline\.stages = 0 must be a whole number ≥ 1"):
        ProcessGrid(0, 4, pipeline_size=0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_a_defect(rank):
    with pytest.raises(ValueError, match=f"rank must be 0 … world_size-1: {rank}, 4"):
        ProcessGrid(rank, 4)


def test_it_reports_the_layout_of_the_job():
    assert str(ProcessGrid(0, 4)) == "data 4"
    assert str(ProcessGrid(0, 4, tensor_size=2)) == "2 × 2: data 2, tensor 2"
    assert str(ProcessGrid(0, 6, pipeline_size=3)) == "2 × 3: data 2, stages 3"


def test_it_needs_neither_torch_nor_deepspeed():
    heavy = "{'torch', 'deepspeed'} & set(sys.modules)"
    code = f"import sys, megalowbit.distributed.process_grid; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
