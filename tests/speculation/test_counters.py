"""Totals over steps and checks, against sums written out by hand."""

import json
from collections import Counter

import pytest

from megalowbit.speculation.counters import PrecisionCounters
from megalowbit.speculation.report import Change
from megalowbit.speculation.settings import BITS

CANDIDATES = ("int8", "fp8", "bf16")


def change(reason):
    return Change(layer="a", product="output", before="int8", after="bf16", reason=reason)


def filled():
    counters = PrecisionCounters()
    counters.count_step(Counter(bf16=4))
    counters.count_step(Counter(int8=3, bf16=1))
    counters.count_step(Counter(int8=2, fp8=1, bf16=1))
    counters.count_check(2, 1, [change("missed"), change("predicted")])
    counters.count_check(1, 0, (change("safe") for _ in range(3)))
    return counters


def test_shares_count_each_product_of_each_step_once():
    totals = filled().totals(CANDIDATES)
    assert totals.shares == {"int8": 5 / 12, "fp8": 1 / 12, "bf16": 6 / 12}
    assert totals.share_8bit == pytest.approx(6 / 12)
    assert (totals.hits, totals.misses, totals.changes, totals.rollbacks) == (3, 1, 5, 1)


def test_the_share_of_eight_bits_or_fewer_follows_the_candidates():
    for candidate, bits in BITS.items():
        counters = PrecisionCounters()
        counters.count_step(Counter({candidate: 2}))
        assert counters.totals((candidate,)).share_8bit == (1.0 if bits <= 8 else 0.0), candidate


def test_nothing_counted_is_no_share_of_anything():
    totals = PrecisionCounters().totals(CANDIDATES)
    assert totals.shares == dict.fromkeys(CANDIDATES, 0.0)
    assert totals.share_8bit == 0
    assert totals.hit_rate is None


def test_counters_continue_from_json_as_if_never_interrupted():
    counters = PrecisionCounters.from_dict(json.loads(json.dumps(filled().to_dict())))
    whole = filled()
    for each in (counters, whole):
        each.count_step(Counter(int8=4))
        each.count_check(0, 1, [change("missed")])
    assert counters.totals(CANDIDATES) == whole.totals(CANDIDATES)
    assert counters.totals(CANDIDATES).rollbacks == 2


def test_a_state_without_its_parts_is_refused():
    with pytest.raises(KeyError):
        PrecisionCounters.from_dict({"sums": {}})
