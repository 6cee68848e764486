"""One process locates its own overflow; several ranks are in tests/distributed/test_overflow.py."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from forks import Forked

from megalowbit.optim.gradients.locate_overflow import RankOverflow, joined, locate_overflow

PROGRAM = Path(__file__).with_name("ranks_locate_overflow.py")
ROOT = Path(__file__).parents[3]
WORLD = 3


def seen(rank, positions, *, is_own=False, prefix="p"):
    return RankOverflow(
        rank=rank, tensors=[(place, f"{prefix}{place}") for place in positions], num_gradients=9,
        is_own=is_own,
    )  # fmt: skip


# what each rank of a group saw: places of its gradients, whether they are known to be its own, their names
CASES = {
    "nothing": [([], False, "p"), ([], False, "p")],
    "one of three": [([], False, "p"), ([4], False, "p"), ([], False, "p")],
    "one of three, own": [([], True, "p"), ([4], True, "p"), ([], True, "p")],
    "several": [([5], True, "p"), ([2, 5], True, "p"), ([2], True, "p")],
    "averaged over all": [([3, 4], False, "p")] * 3,
    "averaged over a part": [([3, 4], False, "p")] * 2,
    "the same, own": [([3], True, "p"), ([3], True, "p")],
    "shards": [([3], False, "p"), ([1, 3], False, "shard")],
    "alone": [([1], False, "p")],
}


@pytest.fixture(scope="module")
def located(tmp_path_factory):
    """By case what all ranks of its group found: tensor, rank, number of tensors, ranks, text."""
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    ranks = [
        Forked(
            PROGRAM, rank, folder / "rendezvous", json.dumps(CASES), env=env,
            output=folder / f"output{rank}", errors=str(folder / f"errors{rank}"),
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [0] * WORLD, (folder / "errors0").read_text()
    found = [json.loads((folder / f"output{rank}").read_text()) for rank in range(WORLD)]
    for name, of_ranks in CASES.items():
        assert all(each[name] == found[0][name] for each in found[: len(of_ranks)])
    return found[0]


def test_alone_the_first_in_the_order_of_backward_is_named():
    found = locate_overflow(seen(3, [2, 5]), None)
    assert (found.tensor, found.rank, found.ranks) == ("p2", 3, (3,))
    assert (found.num_tensors, found.num_gradients) == (2, 9)


def test_without_an_overflow_there_is_no_place(located):
    assert locate_overflow(seen(0, []), None) is None
    assert located["nothing"] is None


@pytest.mark.parametrize("name", ["one of three", "one of three, own"])
def test_the_one_rank_that_overflowed_is_named(located, name):
    assert located[name][:4] == ["p4", 1, 1, [1]]


def test_of_several_ranks_the_earliest_in_backward_is_named(located):
    assert located["several"][:4] == ["p2", 1, 2, [0, 1, 2]]


def test_averaged_gradients_are_infinite_on_all_ranks_and_name_none(located):
    *found, text = located["averaged over all"]
    assert found == ["p3", None, 2, [0, 1, 2]]
    assert text == "overflow in p3 (first of 2 of 9 gradients)"
    text = located["averaged over a part"][-1]
    assert text == "overflow in p3 on one of the 2 ranks from 0 to 1 (first of 2 of 9 gradients)"


def test_gradients_known_to_be_of_this_rank_name_one_even_if_all_are_the_same(located):
    assert located["the same, own"][1] == 0


def test_shards_that_differ_name_a_rank_even_if_averaging_is_unknown(located):
    assert located["shards"][0] == "shard1"


def test_a_group_of_one_names_its_rank(located):
    assert located["alone"][1] == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("has_main_grad", [True, False])
def test_an_optimizer_reports_bad_gradients_in_the_order_of_backward(bad, has_main_grad):
    from megalowbit.optim.optimizers.mixed_precision import FP32Optimizer

    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    optimizer = FP32Optimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), clip_grad=0.0, params_have_main_grad=has_main_grad,
        named_parameters=model.named_parameters(),
    )  # fmt: skip
    model(torch.ones(1, 2)).sum().backward()
    for index in (0, 2):
        (model[index].weight.main_grad if has_main_grad else model[index].weight.grad)[1, 1] = bad
    for is_before in (True, False):  # nothing was averaged: before and now are the same
        here = optimizer.gradients.local_overflow(is_before=is_before)
        assert [name for _, name in sorted(here.tensors)] == ["2.weight", "0.weight"]
        assert (here.rank, here.num_gradients, here.is_own) == (0, 6, False)


def test_overflows_of_several_optimizers_are_sorted_in_the_order_of_backward():
    found = joined([seen(1, [4, 7], is_own=True), seen(1, [2], is_own=True, prefix="expert")])
    assert list(found.tensors) == [(2, "expert2"), (4, "p4"), (7, "p7")]
    assert (found.rank, found.num_gradients, found.is_own) == (1, 18, True)
    assert not joined([seen(1, [4], is_own=True), seen(1, [2])]).is_own


def test_an_optimizer_without_gradients_does_not_make_those_of_another_doubtful():
    nothing = RankOverflow(rank=1, tensors=[], num_gradients=0, is_own=False)
    assert joined([seen(1, [4], is_own=True), nothing]).is_own
