"""One process tells of itself; several ranks are in tests/distributed/test_overflow.py."""

import math

import pytest
import torch
import torch.distributed as dist

from megalowbit.optim.gradients.locate_overflow import RankOverflow, joined, locate_overflow


def seen(rank, positions, *, is_own=False, prefix="p"):
    return RankOverflow(
        rank=rank, tensors=[(place, f"{prefix}{place}") for place in positions], num_gradients=9,
        is_own=is_own,
    )  # fmt: skip


@pytest.fixture
def located(monkeypatch):
    """`located(*of_ranks)`: what ranks that saw this come to; only the transport is replaced."""

    def locate(*of_ranks):
        def gather(gathered, own, group):
            assert own in of_ranks
            gathered[:] = of_ranks

        monkeypatch.setattr(dist, "all_gather_object", gather)
        group = type("Group", (), {})()
        monkeypatch.setattr(
            "megalowbit.distributed.process_group.world_size", lambda asked=None: len(of_ranks)
        )
        found = {locate_overflow(own, group) for own in of_ranks}
        assert len(found) == 1
        return found.pop()

    return locate


def test_alone_the_first_in_the_order_of_backward_is_named():
    found = locate_overflow(seen(3, [2, 5]), None)
    assert (found.tensor, found.rank, found.ranks) == ("p2", 3, (3,))
    assert (found.num_tensors, found.num_gradients) == (2, 9)


def test_where_nobody_saw_anything_there_is_no_place(located):
    assert locate_overflow(seen(0, []), None) is None
    assert located(seen(0, []), seen(1, [])) is None


@pytest.mark.parametrize("is_own", [True, False])
def test_the_one_rank_that_overflowed_is_named(located, is_own):
    found = located(seen(0, [], is_own=is_own), seen(1, [4], is_own=is_own), seen(2, [], is_own=is_own))
    assert (found.tensor, found.rank, found.ranks) == ("p4", 1, (1,))


def test_of_several_ranks_the_earliest_in_backward_is_named(located):
    found = located(seen(0, [5], is_own=True), seen(1, [2, 5], is_own=True), seen(2, [2], is_own=True))
    assert (found.tensor, found.rank, found.num_tensors, found.ranks) == ("p2", 1, 2, (0, 1, 2))


def test_averaged_gradients_are_infinite_alike_and_name_no_rank(located):
    found = located(seen(0, [3, 4]), seen(1, [3, 4]))
    assert (found.tensor, found.rank, found.ranks) == ("p3", None, (0, 1))
    assert str(found) == "overflow in p3 (first of 2 of 9 gradients)"


def test_gradients_known_to_be_of_this_rank_name_one_even_if_alike(located):
    assert located(seen(0, [3], is_own=True), seen(1, [3], is_own=True)).rank == 0


def test_shards_that_differ_name_a_rank_though_nobody_knows_of_averaging(located):
    assert located(seen(0, [3]), seen(1, [1, 3], prefix="shard")).tensor == "shard1"


def test_a_group_of_one_sends_nothing(monkeypatch):
    monkeypatch.setattr(dist, "all_gather_object", None)  # calling it would fail
    monkeypatch.setattr("megalowbit.distributed.process_group.world_size", lambda asked=None: 1)
    group = type("Group", (), {})()
    assert locate_overflow(seen(0, [1]), group).rank == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("has_main_grad", [True, False])
def test_an_optimizer_tells_of_bad_gradients_in_the_order_of_backward(bad, has_main_grad):
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


def test_what_the_optimizers_of_a_rank_saw_is_put_in_the_order_of_backward():
    found = joined([seen(1, [4, 7], is_own=True), seen(1, [2], is_own=True, prefix="expert")])
    assert list(found.tensors) == [(2, "expert2"), (4, "p4"), (7, "p7")]
    assert (found.rank, found.num_gradients, found.is_own) == (1, 18, True)
    assert not joined([seen(1, [4], is_own=True), seen(1, [2])]).is_own


def test_an_optimizer_without_gradients_does_not_make_those_of_another_doubtful():
    nothing = RankOverflow(rank=1, tensors=[], num_gradients=0, is_own=False)
    assert joined([seen(1, [4], is_own=True), nothing]).is_own
