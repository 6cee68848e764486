"""Metrics with planted changes: when the alarm comes, and that nothing later than its step is used."""

import itertools
import random

import pytest

from megalowbit.pretrain.sweep.instability.alarms import (
    METRICS,
    Metric,
    false_alarms,
    first_alarm,
    limit_of,
    series,
)
from megalowbit.pretrain.sweep.instability.settings import InstabilitySettings

NORM = Metric(column="grad_norm", null_is_infinite=True)
SNR = Metric(column="quantization/input/snr_db", is_above=False, absolute=0.5)
SETTINGS = InstabilitySettings(bucket=10, in_a_row=2, margin=0.5)


def rows_of(column, values):
    return [{"step": step, **({} if value is ... else {column: value})} for step, value in values]


def every_step(values):
    return rows_of("grad_norm", enumerate(values, start=1))


def alarm(metric, unstressed, run):
    limit = limit_of(metric, unstressed, SETTINGS.margin)
    return first_alarm(run, limit, SETTINGS.in_a_row)


def test_values_are_medians_of_buckets_and_the_last_may_be_shorter():
    values = [*range(1, 11), *[7] * 9, 1000, 4, 5, 9]
    assert series(every_step(values), NORM, 10) == {10: 5.5, 20: 7, 23: 5}


def test_a_metric_that_is_not_recorded_in_every_step_has_the_buckets_in_which_it_was():
    rows = rows_of(SNR.column, [(step, 20.0 + step if step in (1, 25) else ...) for step in range(1, 41)])
    assert series(rows, SNR, 10) == {10: 21.0, 30: 45.0}


def test_null_is_infinite_for_a_norm_and_nothing_for_a_ratio_of_nothing():
    assert series(every_step([1.0] * 4 + [None] * 6), NORM, 10) == {10: float("inf")}
    assert series(rows_of(SNR.column, [(step, None) for step in range(1, 11)]), SNR, 10) == {}


def test_a_total_counts_what_came_in_a_bucket():
    skips = Metric(column="skipped_steps", is_total=True)
    rows = rows_of("skipped_steps", enumerate([0] * 10 + [1, 1, 2] + [2] * 7 + [2] * 10, start=1))
    assert series(rows, skips, 10) == {10: 0, 20: 2, 30: 0}


def test_limits_are_those_of_a_brute_force_search():
    draw = random.Random(2)
    runs = [{step: draw.uniform(1, 3) for step in range(10, 110, 10)} for _ in range(3)]
    limit = limit_of(NORM, runs, 0.5)
    below = limit_of(SNR, runs, 0.5)
    for step in range(10, 110, 10):
        near = [run[each] for run in runs for each in run if step / 2 <= each <= 2 * step]
        spread = max(near) - min(near)
        assert limit.at(step) == pytest.approx(max(near) + 0.5 * spread)
        assert below.at(step) == pytest.approx(min(near) - max(0.5, 0.5 * spread))
    assert limit.at(1) == limit.at(10)
    assert limit.at(5000) == limit.at(100)


def test_a_planted_jump_gives_an_alarm_with_the_second_median_beyond_the_limit():
    unstressed = [{step: 1.0 + 0.1 * (step % 20 == 0) for step in range(10, 210, 10)}]
    run = {step: 1.05 if step < 120 else 1.2 for step in range(10, 210, 10)}
    found = alarm(NORM, unstressed, run)
    assert (found.metric, found.step, found.value) == ("grad_norm", 130, 1.2)
    assert found.limit == pytest.approx(1.15)
    assert alarm(NORM, unstressed, {**run, 130: 1.05}).step == 150  # one alone is none
    assert alarm(NORM, unstressed, dict.fromkeys(run, 1.14)) is None


def test_a_planted_loss_of_signal_gives_an_alarm_below_and_a_gain_none():
    unstressed = [dict.fromkeys(range(10, 110, 10), 20.0)]
    falling = {step: 20.0 - 0.01 * step for step in range(10, 110, 10)}
    assert alarm(SNR, unstressed, falling).step == 70  # 60 and 70 are below 19.5
    assert alarm(SNR, unstressed, dict.fromkeys(falling, 25.0)) is None


def test_an_alarm_uses_nothing_later_than_its_step():
    draw = random.Random(3)
    unstressed = [{step: draw.uniform(1, 2) for step in range(10, 310, 10)} for _ in range(2)]
    limit = limit_of(NORM, unstressed, 0.5)
    num_alarms = 0
    for seed in range(50):
        own = random.Random(seed)
        values = [own.uniform(1, 2) + 0.006 * step for step in range(300)]
        rows = every_step(values)
        found = first_alarm(series(rows, NORM, 10), limit, 2)
        if found is None:
            continue
        num_alarms += 1
        assert first_alarm(series(rows[: found.step], NORM, 10), limit, 2) == found
        assert first_alarm(series(rows[: found.step - 1], NORM, 10), limit, 2) != found
    assert num_alarms > 25


def test_a_loss_that_is_not_finite_is_beyond_every_limit_and_written_as_null():
    found = alarm(NORM, [{10: 1.0, 20: 1.0}], {10: float("inf"), 20: float("inf")})
    assert found.step == 20
    assert found.to_dict()["value"] is None


def test_false_alarms_are_those_of_runs_left_out():
    steps = range(10, 110, 10)
    runs = [{step: base + 0.01 * (step % 20) for step in steps} for base in (1.0, 1.05, 9.0)]
    assert false_alarms(NORM, runs, SETTINGS) == 1  # the others' limits do not know of 9
    assert false_alarms(SNR, runs, SETTINGS) == 0
    assert false_alarms(NORM, runs[:1], SETTINGS) is None
    assert false_alarms(NORM, [runs[0], {}], SETTINGS) is None
    for order in itertools.permutations(runs):
        assert false_alarms(NORM, list(order), SETTINGS) == 1


def test_metrics_are_columns_that_runs_record():
    from megalowbit.telemetry.overflow.counters import ROLES, OperandCounts

    rates = {f"quantization/{role}/{name}" for role in ROLES for name in OperandCounts().rates()}
    own = {metric.column for metric in METRICS if metric.column.startswith("quantization/")}
    assert own <= rates
    assert len({metric.column for metric in METRICS}) == len(METRICS)
