"""Two real ranks gather statistics of gradients; both must get the same values and decide the same."""

import math

import pytest


@pytest.fixture(scope="module")
def seen(launch_ranks):
    """What both ranks of ranks_statistics.py reported; launched once for all tests of this file."""
    return launch_ranks("ranks_statistics.py").wait(timeout=90)


def test_maxima_are_those_of_both_ranks_and_nothing_hides_an_overflow(seen):
    clean, infinite, not_a_number, empty = zip(*(rank["watched"] for rank in seen), strict=True)
    expected = [max(values) for values in zip(*(rank["own"] for rank in clean), strict=True)]
    assert clean[0]["all"] == clean[1]["all"] == expected
    for bad in (infinite, not_a_number):
        assert bad[0]["all"] == bad[1]["all"]
        assert bad[0]["all"][1] == math.inf
        assert bad[0]["all"][0] == max(rank["own"][0] for rank in bad)
    assert empty[0]["all"] == empty[1]["all"]  # rank 0 has seen nothing and takes part
    assert empty[0]["all"][0] > 0


def test_a_rank_that_trains_nothing_takes_part(seen):
    idle, busy = (rank["watched_by_one"] for rank in seen)
    assert idle["own"] == 0 < busy["own"]
    assert idle["all"] == busy["all"] == [busy["own"], 0.0]


def test_probed_sums_are_added_over_ranks(seen):
    (own, total), (other, same) = (rank["probed"] for rank in seen)
    assert total == same
    assert total == pytest.approx([a + b for a, b in zip(own, other, strict=True)], rel=1e-12)
    assert own[0] != other[0]
    assert total[0] > 0


def test_factors_are_the_same_on_both_ranks(seen):
    assert seen[0]["scaled"] == seen[1]["scaled"]
    assert all(block["octaves"] > 0 for block in seen[0]["scaled"]["blocks"].values())


def test_an_overflow_on_one_rank_is_retried_on_both(seen):
    assert seen[0]["retried"]["retries"] == seen[1]["retried"]["retries"]
    assert [attempts[:2] for attempts in seen[0]["retried"]["retries"]] == [[True, 2], [True, 0], [True, 0]]
    assert seen[0]["retried"]["retries"][-1][2] == 64.0
    assert seen[0]["retried"]["weights"] == seen[1]["retried"]["weights"]
