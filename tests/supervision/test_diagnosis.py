import pytest

from megalowbit.supervision.diagnosis import diagnose, name_ranks
from megalowbit.supervision.heartbeat_store import Heartbeat, HeartbeatSnapshot

REDUCE = "all_reduce (telemetry/step_facts.py:92 reduce_step_facts)"
LOADER = "data/loader.py:88 next_batch"


def heartbeat(
    count=1, *, place=REDUCE, is_waiting=True, host="n1", mark="step 7", seconds=20.0, is_done=False
):
    return Heartbeat(
        count=count,
        mark=mark,
        seconds=seconds,
        place=place,
        is_waiting=is_waiting,
        is_done=is_done,
        host=host,
    )


def elsewhere(count=1, place=LOADER, **more):
    return heartbeat(count, place=place, is_waiting=False, **more)


def snapshot(*pairs):
    """Of each rank the first heartbeat and the second; None where there was none."""
    first = {rank: pair[0] for rank, pair in enumerate(pairs) if pair[0] is not None}
    second = {rank: pair[1] for rank, pair in enumerate(pairs) if pair[1] is not None}
    return HeartbeatSnapshot(first, second, len(pairs))


def line_of(found, *, observer):
    return diagnose(found, observer=observer).line


WAITS = (heartbeat(1), heartbeat(4))


def test_heartbeats_survive_the_store():
    assert Heartbeat.from_text(heartbeat().to_text().encode()) == heartbeat()


def test_a_silent_rank_is_named_with_its_host():
    silent = heartbeat(9, host="n2", mark="step 5")
    assert line_of(snapshot(WAITS, (silent, silent)), observer=0) == (
        "rank 1 (host n2) does not answer: silent since step 7 (killed, stopped, or cut off the network); "
        f"rank 0 (host n1) waited 20 s in {REDUCE}"
    )


def test_a_rank_that_never_sent_a_heartbeat_is_silent():
    line = line_of(snapshot(WAITS, (None, None)), observer=0)
    assert line.startswith("rank 1 does not answer: ")


def test_a_first_heartbeat_between_two_reads_counts():
    assert snapshot(WAITS, (None, heartbeat())).silent == []


def test_a_silent_rank_is_named_before_a_hung_one():
    silent = heartbeat(9, host="n2")
    line = line_of(snapshot(WAITS, (silent, silent), (elsewhere(1), elsewhere(4))), observer=0)
    assert line.startswith("rank 1 (host n2) does not answer")


def test_a_hung_rank_is_named_with_its_phase():
    found = snapshot(WAITS, (elsewhere(1, host="n2"), elsewhere(4, host="n2")))
    assert diagnose(found, observer=0).is_hang
    expected = (
        f"rank 1 (host n2) has hung since step 7, in {LOADER}; rank 0 (host n1) waited 20 s in {REDUCE}"
    )
    assert line_of(found, observer=0) == expected
    assert line_of(found, observer=1) == expected  # it is not its own witness


def test_a_slow_rank_is_not_reported_as_hung():
    found = snapshot(WAITS, (elsewhere(1), elsewhere(4, place="layers/matmul/gemms.py:10 multiply")))
    assert line_of(found, observer=0).startswith(
        "rank 1 (host n1) has been working since step 7 (20 s), now in layers/matmul/gemms.py:10 multiply; "
    )


def test_a_rank_that_has_ended_training_is_named():
    done = heartbeat(3, is_waiting=False, is_done=True, host="n2")
    line = line_of(snapshot(WAITS, (done, done)), observer=0)
    assert line.startswith("rank 1 (host n2) has left training after step 7, but the others have not; ")


def test_the_minority_is_named_if_no_rank_is_seen_waiting():
    # as on GPUs, where a host waits for a number
    read = "telemetry/step_facts.py:95 reduce_step_facts"
    waits = (elsewhere(1, read), elsewhere(4, read))
    line = line_of(snapshot(waits, waits, (elsewhere(1, host="n2"), elsewhere(4, host="n2"))), observer=0)
    assert line == f"rank 2 (host n2) has hung since step 7, in {LOADER}"


def test_two_equally_large_groups_of_ranks_give_no_faulty_rank():
    found = snapshot(
        (elsewhere(1, "a.py:1 f"), elsewhere(4, "a.py:1 f")), (elsewhere(1), elsewhere(4, host="n2"))
    )
    assert not diagnose(found, observer=0).is_hang
    assert line_of(found, observer=0) == (
        "all ranks answer, but none has made progress since step 7 (20 s): rank 0 (host n1) in a.py:1 f, "
        f"rank 1 (host n2) in {LOADER}"
    )


def test_ranks_in_different_collectives_are_listed():
    other = "broadcast (hf/save.py:9 save)"
    line = line_of(snapshot(WAITS, WAITS, (heartbeat(1, place=other), heartbeat(4, place=other))), observer=2)
    assert line == (
        f"all ranks answer, but none has made progress since step 7 (20 s): ranks 0-1 (host n1) in {REDUCE}, "
        f"rank 2 (host n1) in {other}"
    )


def test_ranks_waiting_in_one_collective_mean_that_no_data_passes():
    line = line_of(snapshot(WAITS, WAITS), observer=0)
    assert line.startswith(
        f"all ranks answer and have waited in {REDUCE} since step 7 (20 s): no data passes"
    )
    assert "NCCL_SOCKET_IFNAME" in line


def test_ranks_stuck_at_one_place_outside_collectives_are_hung():
    both = (elsewhere(1), elsewhere(4))
    assert (
        line_of(snapshot(both, both), observer=0) == f"all ranks have hung since step 7 (20 s), in {LOADER}"
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "rank 3 (host n3)"),
        ([1, 2, 3], "ranks 1-3 (hosts n1, n2, n3)"),
        ([0, 1, 5], "ranks 0-1, 5 (hosts n0, n1, n5)"),
        (
            range(0, 40, 2),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, … (20 in all) (hosts n0, n2, n4, n6 and 16 more)",
        ),
        ([99], "rank 99"),
    ],
)
def test_lists_of_ranks_are_abbreviated(ranks, expected):
    known = {rank: heartbeat(host=f"n{rank}") for rank in range(40)}
    assert name_ranks(ranks, known) == expected


def test_sixteen_thousand_ranks_fit_on_one_line():
    lost = {rank: heartbeat(9, host=f"node{rank // 8}") for rank in range(64, 72)}
    rest = {rank: heartbeat(1, host=f"node{rank // 8}") for rank in range(16384) if rank not in lost}
    later = {rank: heartbeat(4, host=f"node{rank // 8}") for rank in rest}
    line = line_of(HeartbeatSnapshot({**rest, **lost}, {**later, **lost}, 16384), observer=3)
    assert line.startswith("ranks 64-71 (host node8) do not answer: silent since step 7 ")
    assert len(line) < 300
