from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import start_process_group
from megalowbit.supervision.diagnosis import INTERVALS_BETWEEN_READINGS
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.timeouts import set_group_timeouts, timeout_of
from megalowbit.supervision.watchdog import TIMEOUTS_WITHOUT_PROGRESS

BEFORE = timedelta(minutes=30)


def seen_timeout(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def all_groups():
    return list(dist.distributed_c10d._world.pg_map)


@pytest.fixture
def groups():
    start_process_group()
    made = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0], backend="gloo")]
    set_group_timeouts(BEFORE)
    yield made
    set_group_timeouts(BEFORE)


def test_every_group_gets_the_timeout(groups):
    assert set_group_timeouts(timedelta(seconds=7)) >= len(groups)
    assert {seen_timeout(group) for group in all_groups()} == {timedelta(seconds=7)}


def test_gloo_has_the_same_timeout_under_a_watchdog(groups):
    assert set_group_timeouts(timedelta(seconds=8), is_watched=True) >= len(groups)
    assert {seen_timeout(group) for group in all_groups()} == {timedelta(seconds=8)}


@pytest.mark.parametrize("timeout", [5.0, 6.0, 60.0, 600.0])
def test_nccl_ends_a_process_soon_after_the_watchdog_times_out(timeout):
    def of(backend, **how):
        return timeout_of(backend, timedelta(seconds=timeout), **how).total_seconds()

    assert of("nccl", is_watched=False) == of("gloo", is_watched=False) == timeout
    assert of("gloo", is_watched=True) == timeout  # its errors are raised, and become the diagnosis
    reading_time = INTERVALS_BETWEEN_READINGS * WatchdogSettings(timeout=timeout).interval
    assert TIMEOUTS_WITHOUT_PROGRESS * timeout + reading_time < of("nccl", is_watched=True) < 1.5 * timeout


def test_other_backends_are_ignored():
    assert timeout_of("mpi", timedelta(seconds=8), is_watched=True) is None


@pytest.mark.parametrize(
    ("block", "argument", "seconds"),
    [
        ({}, None, 600),
        ({"timeout": 41.5}, None, 41.5),
        ({"timeout": 41.5}, 90, 90),
        ({"timeout": None}, None, None),
    ],
)
def test_initialize_sets_groups_that_deepspeed_made_without_one(groups, block, argument, seconds):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 1},
        "megalowbit": {"watchdog": block},
    }
    initialize(
        model=torch.nn.Linear(2, 1),
        config=config,
        timeout=None if argument is None else timedelta(seconds=argument),
    )
    expected = BEFORE if seconds is None else timedelta(seconds=seconds)
    assert {seen_timeout(group) for group in all_groups()} == {expected}
    assert seen_timeout(groups[1]) == expected
