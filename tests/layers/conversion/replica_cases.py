"""How ranks of DistributedDataParallel are checked; test_replicas.py runs this file."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import convert, random_stream


@contextmanager
def process(rank, size):
    """This process as one of a group whose other members answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model(**arguments):
    made = torch.nn.Sequential(torch.nn.Linear(16, 16))
    convert(made, **arguments)
    return made


@pytest.mark.parametrize("given", [None, 3])
def test_a_replica_with_its_own_random_numbers_trains(given):
    with process(3, 4):
        net = model(rank=given)
        DistributedDataParallel(net)(torch.ones(2, 16))
        assert random_stream(net).rank == 3
        assert random_stream(net).step == 1


@pytest.mark.parametrize("given", [0, 1, 7])
def test_a_rank_of_another_process_is_rejected_in_the_first_forward(given):
    with process(3, 4):
        replica = DistributedDataParallel(model(rank=given))
        with pytest.raises(UserError, match=rf"rank = {given} was given .* on rank 3 of the 4 .* rank= out"):
            replica(torch.ones(2, 16))
        replica.eval()(torch.ones(2, 16))  # evaluation averages nothing


def test_a_smaller_group_accepts_the_global_rank_and_the_rank_in_the_group():
    for given in (1, 3):
        with process(3, 4):
            group = dist.new_group([1, 3])
            assert dist.get_rank(group) == 1
            DistributedDataParallel(model(rank=given), process_group=group)(torch.ones(2, 16))


def test_without_a_replica_any_rank_may_be_given():
    with process(3, 4):
        model(rank=0)(torch.ones(2, 16))
        alone = dist.new_group([3])
        DistributedDataParallel(model(rank=0), process_group=alone)(torch.ones(2, 16))
