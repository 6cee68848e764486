"""A rank is named if chance would not name it so often."""

import random

import pytest

from megalowbit.findings import base
from megalowbit.findings.ranks import findings, is_no_chance


@pytest.fixture
def of_ranks(records):
    """The records of a healthy run of four ranks on a busy machine: all ranks are slow at times."""
    draw = random.Random(3)
    records.attempts[0]["processes"] = 4
    for row in records.rows:
        row |= {
            "ranks/slowest": draw.randrange(4),
            "ranks/slowest_milliseconds": 100 * draw.choice([1.05, 1.1, 1.2, 2.5]),
            "ranks/other_milliseconds": 100.0,
            "ranks/highest_loss_rank": draw.randrange(4),
            "ranks/highest_loss": row["loss"] + abs(draw.gauss(0, 0.05)),
            "ranks/other_loss": row["loss"],
        }
    return records


def test_a_healthy_run_of_one_or_four_ranks_has_no_finding(of_ranks, tmp_path):
    assert not findings(of_ranks.read(tmp_path / "four"))
    for row in of_ranks.rows:
        for name in [name for name in row if name.startswith("ranks/")]:
            del row[name]
    assert not findings(of_ranks.read(tmp_path / "one"))


def test_a_rank_that_stays_slow_is_named_with_its_first_step(of_ranks, tmp_path):
    for row in of_ranks.rows[29:]:
        row |= {"ranks/slowest": 2, "ranks/slowest_milliseconds": 260.0, "tokens_per_second": 400.0}
    of_ranks.rows[35]["ranks/slowest"] = 0
    (found,) = findings(of_ranks.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.SLOW_RANK, 30)
    assert "rank 2 is 2.6 times as slow" in found.title
    assert "400 since" in found.evidence[2].text


def test_a_rank_that_is_slow_by_little_is_healthy(of_ranks, tmp_path):
    for row in of_ranks.rows[29:]:
        row |= {"ranks/slowest": 2, "ranks/slowest_milliseconds": 120.0}
    assert not findings(of_ranks.read(tmp_path / "run"))


def test_a_replica_that_computes_another_loss_is_named(of_ranks, tmp_path):
    for row in of_ranks.rows[19:]:
        row |= {"ranks/highest_loss_rank": 3, "ranks/highest_loss": row["loss"] + 0.6}
    (found,) = findings(of_ranks.read(tmp_path / "run"))
    assert (found.name, found.step) == (base.REPLICAS, 20)
    assert "rank 3 computes another model than the others" in found.title


def test_of_two_ranks_the_one_that_changed_is_named_as_evidence_only(of_ranks, tmp_path):
    of_ranks.attempts[0]["processes"] = 2
    for row in of_ranks.rows:
        row["ranks/highest_loss_rank"] %= 2
    for row in of_ranks.rows[19:]:
        row |= {"ranks/highest_loss_rank": 1, "ranks/highest_loss": row["loss"] + 0.9}
    (found,) = findings(of_ranks.read(tmp_path / "run"))
    assert "the two ranks compute different models" in found.title
    assert "rank 1 changed" in found.evidence[2].text


@pytest.mark.parametrize(
    ("length", "misses", "share", "expected"),
    [(9, 0, 0.01, False), (10, 0, 0.05, True), (10, 0, 0.5, False), (24, 0, 0.5, True), (24, 2, 0.5, False)],
)
def test_the_length_of_a_series_decides(length, misses, share, expected):
    assert is_no_chance(length, misses, share, rows=100) is expected
