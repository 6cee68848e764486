"""Quotas: the bound at every prefix, and choices that depend on position, counts and shares alone."""

import random
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.data.order import quota
from megalowbit.data.order.quota import QuotaOrder, Segment, is_within_quota

PRIME = 1_000_003  # a period that is too long for blocks


def order(segments, position=None, counts=None):
    counts = counts or [0] * len(segments[0].weights)
    return QuotaOrder(segments, segments[0].start if position is None else position, counts)


def constant(*weights, start=0):
    return [Segment(start=start, weights=weights)]


def split(total, num_parts, generator):
    cuts = sorted(generator.randint(0, total) for _ in range(num_parts - 1))
    return [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def segments(draw, *, most=6):
    """Shares with a common denominator, also zeros, that change up to five times."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    total = draw(st.sampled_from([1, 2, 7, 12, 100, 997, PRIME]))
    num_sources, start, found = draw(st.integers(1, most)), draw(st.integers(0, 50)), []
    for _ in range(draw(st.integers(1, 6))):
        found.append(Segment(start=start, weights=tuple(split(total, num_sources, generator))))
        start += draw(st.sampled_from([1, 2, 3, 17, 100]))
    return found


def largest_errors(segments, chosen):
    """Largest |target − count| over the prefixes, by adding up the share of each sample."""
    num_sources, total = len(segments[0].weights), sum(segments[0].weights)
    due, given_so_far, largest = [Fraction(0)] * num_sources, [0] * num_sources, Fraction(0)
    for number, source in enumerate(chosen, start=segments[0].start):
        weights = next(each.weights for each in reversed(segments) if each.start <= number)
        given_so_far[source] += 1
        for place, weight in enumerate(weights):
            due[place] += Fraction(weight, total)
            largest = max(largest, abs(due[place] - given_so_far[place]))
    return largest


@settings(deadline=None, max_examples=150)
@given(segments())
def test_each_source_is_within_its_quota_at_every_prefix(shares):
    bound = 1 - Fraction(1, max(2, 2 * len(shares[0].weights) - 2))
    assert largest_errors(shares, order(shares).take(300).tolist()) <= bound


@settings(deadline=None, max_examples=60)
@given(segments(), st.integers(0, 2**32))
def test_choices_depend_on_position_and_counts_alone(shares, seed):
    generator = random.Random(seed)
    whole = order(shares).take(400).tolist()
    taker, found = order(shares), []
    while len(found) < 300:
        found += taker.take(generator.randint(0, 90)).tolist()
        assert taker.position == shares[0].start + len(found)
        assert taker.counts == np.bincount(found, minlength=len(taker.counts)).tolist()
        if generator.random() < 0.5:
            taker = order(shares, taker.position, taker.counts)
    assert found == whole[: len(found)]


@settings(deadline=None, max_examples=15)
@given(segments(most=4))
def test_blocks_that_recur_have_the_choices_of_the_algorithm(shares):
    shares = [Segment(start=each.start * 5000, weights=each.weights) for each in shares]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quota, "LONGEST_PERIOD", 0)
        expected = order(shares).take(30000)
    found = order(shares)
    assert np.array_equal(np.concatenate([found.take(7), found.take(20001), found.take(9992)]), expected)


@pytest.mark.parametrize("weights", [(7, 2, 1), (500_000, 300_001, 200_002), (1,), (0, 3)])
def test_a_far_position_takes_no_scan(weights):
    """After whole periods each source has exactly its share, so the order is that from the beginning."""
    periods = 10**9 // sum(weights) + 1
    position = periods * sum(weights)
    started = time.perf_counter()
    far = order(constant(*weights), position, [periods * weight for weight in weights])
    found = far.take(2000)
    assert time.perf_counter() - started < 2  # from the beginning, it would take many minutes
    assert position >= 10**9
    assert np.array_equal(found, order(constant(*weights)).take(2000))
    assert far.position == position + 2000


def test_a_known_change_is_prepared_for():
    """One source is due just after the change: without the look ahead, it would be late."""
    shares = [Segment(start=0, weights=(4, 4, 4)), Segment(start=1, weights=(0, 0, 12))]
    assert largest_errors(shares, order(shares).take(3).tolist()) <= Fraction(3, 4)


def test_a_source_of_share_0_gives_nothing():
    assert set(order(constant(0, 3, 0, 5)).take(999).tolist()) == {1, 3}
    assert set(order(constant(0, PRIME, 0, 5)).take(999).tolist()) == {1}


@pytest.mark.parametrize(
    ("counts", "is_fitting"), [([7, 2, 1], True), ([8, 1, 1], False), ([7, 2, 2], False), ([6, 2, 1], False)]
)
def test_counts_that_the_algorithm_cannot_reach_are_refused(counts, is_fitting):
    shares = constant(7, 2, 1)
    assert is_within_quota(shares, 10, counts) == is_fitting
    if not is_fitting:
        with pytest.raises(ValueError, match="do not fit position 10"):
            order(shares, 10, counts)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([], "must be a segment"),
        (constant(), "a source in it"),
        (constant(0, 0), "one positive sum"),
        (constant(3, -1), "not be negative"),
        ([*constant(1, 2), *constant(1, 3, start=5)], "one positive sum"),
        ([*constant(1, 2), *constant(3, start=5)], "one positive sum"),
        ([*constant(1, 2, start=5), *constant(2, 1, start=5)], "increasing"),
    ],
)
def test_shares_that_are_none_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        QuotaOrder(shares, 9, [0, 0])
