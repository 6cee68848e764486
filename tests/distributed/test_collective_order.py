"""The comparison of ranks' collectives, which follows each launch of this folder, finds what gloo accepts."""

import copy

import collective_order
import pytest


def call(kind, what=(), *, group="a of ranks [0, 1]", ranks=(0, 1), peer=None, where="f.py:1 f"):
    return {
        "group": group, "ranks": list(ranks), "kind": kind, "what": list(what), "peer": peer, "where": where,
    }  # fmt: skip


SUM = call("allreduce", ["SUM", None, [["torch.float32", 4]]])
GATHER = call("allgather", [None, None, [["torch.float32", 4]]])
OTHER = {**SUM, "group": "b of ranks [0, 1]"}
SEND = call("send", [None, None, [["torch.bfloat16", 8]]], peer=1)
RECV = {**SEND, "kind": "recv", "peer": 0}


def found(*ranks):
    records = [{"rank": rank, "calls": list(calls), "refused": []} for rank, calls in enumerate(ranks)]
    return collective_order.problems(copy.deepcopy(records))


def test_ranks_that_agree_have_no_problem():
    assert found([SUM, SEND, OTHER, GATHER], [SUM, RECV, OTHER, GATHER]) == []
    alone = call("allreduce", group="c of ranks [2]", ranks=[2])
    assert found([SUM], [SUM], [alone, alone]) == []


def changed(call, *, op=None, dtype="torch.float32", numel=4):
    return {**call, "what": [op, None, [[dtype, numel]]]}


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ([SUM, GATHER], [GATHER, SUM], ["ranks [0, 1], call 0: rank 0 allreduce", ", rank 1 allgather"]),
        ([SUM, SUM], [SUM], ["group a of ranks [0, 1], call 1: rank 0 alone allreduce "]),
        ([], [OTHER], ["group b of ranks [0, 1], call 0: rank 1 alone allreduce "]),
        ([SUM], [changed(SUM, op="MAX")], ["rank 0 allreduce ['SUM'", "rank 1 allreduce ['MAX'"]),
        ([SUM], [changed(SUM, op="SUM", dtype="torch.half")], ["'torch.float32', 4", "'torch.half', 4"]),
        ([SUM], [changed(SUM, op="SUM", numel=5)], ["'torch.float32', 4", "'torch.float32', 5"]),
        ([SEND], [], ["from rank 0 to rank 1 in group a of ranks [0, 1], call 0: rank 0 alone transfer"]),
        ([SEND], [changed(RECV, dtype="torch.bfloat16", numel=9)], ["'torch.bfloat16', 8", "bfloat16', 9"]),
    ],
)
def test_the_first_difference_of_a_group_or_of_a_pair_is_named(one, other, parts):
    (only,) = found(one, other)
    assert all(part in only for part in parts), only
    assert "f.py:1 f" in only


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([SUM, OTHER], [OTHER, SUM]),
        ([SUM, SEND], [RECV, SUM]),
        ([SEND, {**RECV, "peer": 1}], [{**SEND, "peer": 0}, RECV]),
    ],
)
def test_groups_whose_orders_do_not_fit_together_are_named(one, other):
    (only,) = found(one, other)
    assert only.startswith("no order of the groups suits all ranks: rank 0 ")
    assert ", rank 1 " in only


@pytest.fixture(scope="module")
def ranks(launch_ranks):
    launched = launch_ranks("ranks_collectives.py", is_compared=False)
    return launched.wait(timeout=90), launched.collectives()


def test_real_ranks_are_recorded_and_their_differences_found(ranks):
    _, records = ranks
    lines = collective_order.problems(records)
    assert len(lines) == 2, lines
    assert "cannot take a tensor of shape (3, 2)" in lines[0]
    assert "ranks_collectives.py:" in lines[0]
    assert "rank 0 allreduce ['SUM', None, [['torch.float32', 4]]]" in lines[1]
    assert "rank 1 allreduce ['MAX', None, [['torch.float32', 4]]]" in lines[1]
    first = [
        {**record, "refused": [], "calls": [each for each in record["calls"] if "float32" in str(each)][:4]}
        for record in records
    ]
    (line,) = collective_order.problems(first)
    assert line.startswith("no order of the groups suits all ranks: ")


def test_the_flight_recorder_has_the_same_collectives_in_the_same_order(ranks):
    """Not the transfers: over gloo torch records none."""
    recorded, records = ranks
    names = {"allreduce": "gloo:all_reduce", "broadcast": "gloo:broadcast", "allgather": "gloo:all_gather"}
    for rank, record in enumerate(records):
        ours = [names[each["kind"]] for each in record["calls"] if each["kind"] in names]
        assert [name for name in recorded[rank] if name in names.values()] == ours
