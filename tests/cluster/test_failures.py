"""Rates of failures at any shape, and that traces are the same whoever asks for how much of them."""

import math

import numpy as np
import pytest

from megalowbit.cluster.failures import FailureTrace, NodeFailures
from megalowbit.errors import UserError

DAY = 86400.0


def moments(trace, until):
    found = []
    while (moment := trace.moment(len(found))) < until:
        found.append(moment)
    return found


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_the_failure_rate_is_nodes_over_mtbf_from_the_first_day_at_any_shape(shape):
    failures = NodeFailures(nodes=400, node_mtbf=50 * DAY, shape=shape)
    assert failures.mtbf == 50 * DAY / 400
    early, late = [], []
    for seed in range(20):
        found = moments(FailureTrace(failures, seed), 100 * DAY)
        assert found == sorted(found)
        early.append(sum(moment < 10 * DAY for moment in found))
        late.append(sum(moment > 90 * DAY for moment in found))
    # 80 expected in ten days, 20 times: four standard errors of a Poisson mean, more at shapes below 1
    assert np.mean(early) == pytest.approx(80, abs=4 * math.sqrt(80 / 20) * max(1, 1 / shape))
    assert np.mean(late) == pytest.approx(80, abs=4 * math.sqrt(80 / 20) * max(1, 1 / shape))


def test_gaps_of_exponential_nodes_have_their_distribution():
    trace = FailureTrace(NodeFailures(nodes=10, node_mtbf=1000.0), 3)
    gaps = np.diff([0.0, *(trace.moment(index) for index in range(4000))])
    for share in (0.1, 0.5, 0.9):
        assert np.mean(gaps < -100 * math.log(1 - share)) == pytest.approx(share, abs=0.025)


def test_shape_one_of_the_general_simulation_is_exponential():
    # just off 1, so that nodes are followed one by one
    trace = FailureTrace(NodeFailures(nodes=50, node_mtbf=5000.0, shape=1.0001), 4)
    gaps = np.diff([0.0, *(trace.moment(index) for index in range(4000))])
    for share in (0.1, 0.5, 0.9):
        assert np.mean(gaps < -100 * math.log(1 - share)) == pytest.approx(share, abs=0.025)


def test_a_node_that_wears_out_fails_at_regular_times_and_one_of_early_faults_in_bursts():
    def spread(shape):
        trace = FailureTrace(NodeFailures(nodes=1, node_mtbf=1000.0, shape=shape), 5)
        gaps = np.diff([trace.moment(index) for index in range(4000)])
        return np.std(gaps) / np.mean(gaps)

    # standard deviation over mean of a Weibull distribution: √(Γ(1 + 2/k) / Γ(1 + 1/k)² − 1)
    for shape in (0.7, 3.0):
        expected = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
        assert spread(shape) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("shape", [1.0, 0.7])
def test_a_trace_is_the_same_asked_in_any_order(shape):
    failures = NodeFailures(nodes=8, node_mtbf=100.0, shape=shape)
    first, second = FailureTrace(failures, 1, 2), FailureTrace(failures, 1, 2)
    far = first.moment(900)
    assert [first.moment(index) for index in range(0, 900, 100)] == [
        second.moment(index) for index in range(0, 900, 100)
    ]
    assert second.moment(900) == far
    assert FailureTrace(failures, 1, 3).moment(900) != far


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes = 0"),
        ({"node_mtbf": 0.0}, "node_mtbf = 0"),
        ({"node_mtbf": math.nan}, "node_mtbf = nan"),
        ({"node_mtbf": math.inf}, "node_mtbf = inf"),
        ({"shape": -1.0}, "shape = -1"),
        ({"shape": 50.0}, "shape = 50"),
    ],
)
def test_impossible_failures_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        NodeFailures(**{"nodes": 2, "node_mtbf": 100.0, **wrong})
