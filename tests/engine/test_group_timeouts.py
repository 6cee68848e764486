from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megalowbit.engine.group_timeouts import set_group_timeouts
from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import start_process_group

BEFORE = timedelta(minutes=30)


def timeout_of(group):
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
    assert {timeout_of(group) for group in all_groups()} == {timedelta(seconds=7)}


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
    assert {timeout_of(group) for group in all_groups()} == {expected}
    assert timeout_of(groups[1]) == expected
