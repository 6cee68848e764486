"""Each rank fills its own places, and the slowest and the one with the highest loss are named."""

import math

import pytest
import torch

from megalowbit.pretrain.components.machine.rank_comparison import RankComparison
from megalowbit.pretrain.loop import train_step

CPU = torch.device("cpu")


def noted(times, losses):
    component = RankComparison(0, len(times), CPU)
    component.note([*times, *losses])
    return component.facts({})


def test_a_rank_fills_its_places_of_the_sums_only():
    component = RankComparison(1, 3, CPU)
    with component.forward():
        torch.ones(64, 64) @ torch.ones(64, 64)
    sums = component.sums(torch.tensor(2.5))
    assert sums.shape == (6,)
    assert sums.dtype == torch.float64
    assert sums[1] > 0
    assert sums[4] == 2.5
    assert sums[[0, 2, 3, 5]].tolist() == [0, 0, 0, 0]


def test_the_slowest_and_the_highest_are_named_with_the_median_of_the_others():
    assert noted([10.0, 40.0, 12.0, 11.0], [3.1, 3.0, 3.3, 2.9]) == {
        "ranks/slowest": 1,
        "ranks/slowest_milliseconds": 40.0,
        "ranks/other_milliseconds": 11.0,
        "ranks/highest_loss_rank": 2,
        "ranks/highest_loss": 3.3,
        "ranks/other_loss": 3.0,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_whose_loss_is_not_finite_is_the_highest(bad):
    facts = noted([1.0, 1.0, 1.0], [3.0, bad, 3.2])
    assert facts["ranks/highest_loss_rank"] == 1
    assert facts["ranks/other_loss"] == pytest.approx(3.1)


def test_without_a_time_of_each_rank_only_losses_are_compared():
    facts = noted([math.nan, 3.0], [3.0, 2.0])
    assert "ranks/slowest" not in facts
    assert facts["ranks/highest_loss_rank"] == 0


def test_a_run_of_one_process_compares_nothing(build_job):
    job = build_job()
    assert job.rank_comparison is None
    assert not [name for name in train_step(job).facts if name.startswith("ranks/")]
