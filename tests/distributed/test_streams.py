"""Random numbers of two real ranks: those of rank 0 and rank 1, wherever gradients are averaged."""

import importlib.util
from pathlib import Path

import pytest
import torch

import megalowbit as mlb

WAYS = ("by_local_ddp", "by_ddp", "by_stock_deepspeed", "by_initialize")


@pytest.fixture(scope="module")
def seen(launch_ranks):
    return launch_ranks("ranks_streams.py").wait(timeout=120)


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("ranks_streams", Path(__file__).parent / "ranks_streams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def average(one, other):
    """What fp32 sums of halves come to, which is exact but for one rounding."""
    return (torch.tensor(one).float() / 2 + torch.tensor(other).float() / 2).double().tolist()


@pytest.fixture(scope="module")
def expected(program):
    """From one process a rank."""
    one, other = (program.gradients(program.model(rank=rank)) for rank in range(2))
    assert one != other
    return average(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_average_gradients_that_were_rounded_with_different_numbers(way, seen, expected):
    for rank in seen:
        assert rank[way] == expected, "converted before the process group was made"
        assert rank[f"{way} after"] == expected, "converted in it"


def test_averaging_two_ranks_halves_the_variance_of_rounding(program):
    found = torch.tensor(
        [[program.gradients(program.model(seed=seed, rank=rank)) for rank in range(2)] for seed in range(60)]
    )
    alone, averaged = found[:, 0], found.mean(1)
    ratio = averaged.var(0).sum() / alone.var(0).sum()
    assert 0.45 < ratio < 0.55
    with_equal_numbers = (found[:, 0] + found[:, 0]) / 2
    assert with_equal_numbers.var(0).sum() / alone.var(0).sum() > 0.99


def test_a_stream_used_before_the_group_existed_continues_with_this_ranks_numbers(seen, program):
    after = []
    for number, rank in enumerate(seen):
        net = program.model(rank=0)
        assert rank["before"] == program.gradients(net)
        net = program.model(rank=number)
        program.gradients(net)
        net.zero_grad()
        after.append(program.gradients(net))
    for rank in seen:
        assert rank["used before"] == average(*after)


def test_layers_built_without_convert_draw_numbers_of_their_rank(seen, program):
    found = []
    for rank in range(2):
        net = program.alone()
        for layer in mlb.bit_layers(net).values():
            layer.set_data_rank(rank)
        found.append(program.gradients(net))
    assert found[0] != found[1]
    for rank in seen:
        assert rank["alone"] == average(*found)


def test_the_engine_sets_the_rank_whatever_was_given(seen, expected):
    for rank in seen:
        assert rank["explicit"] == expected


def test_replicas_that_would_draw_the_same_numbers_are_refused(seen):
    for rank in seen:
        line = rank["LocalDDP"]
        assert "ranks 0 and 1 draw the same random numbers" in line
        assert "leave rank= out of megalowbit.convert" in line
        assert rank["LocalDDP right"] is rank["LocalDDP of one"] is rank["DDP right"] is None
    assert seen[0]["DDP"] is None
    assert "rank = 0 was given to megalowbit.convert on rank 1" in seen[1]["DDP"]


def test_a_controller_refuses_ranks_with_equal_numbers_but_for_shards(seen):
    for rank in seen:
        assert "draw the same random numbers" in rank["controller"]
        assert rank["controller right"] is rank["controller sharded"] is None


def test_ranks_that_were_converted_with_other_seeds_are_refused(seen):
    for rank in seen:
        assert "ranks disagree on random stream" in rank["initialize"]
        assert "seed 0" in rank["initialize"]
        assert "seed 1" in rank["initialize"]


def test_a_stream_takes_its_rank_from_local_ddps_group(seen):
    assert [rank["rank in a group of one"] for rank in seen] == [0, 0]
