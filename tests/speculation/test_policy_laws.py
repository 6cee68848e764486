"""Laws that decisions keep over time, and that a saved state goes on as if it had never left."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_runs import INF, NAN, THRESHOLD, candidates, changes, policy, run

from megalowbit.errors import UserError
from megalowbit.speculation.policy import GemmState, line_at


@given(
    hysteresis=st.sampled_from([0.5, 1.0, 3.0]),
    offsets=st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=60),
    lookahead=st.sampled_from([0, 10, 20, 100]),
    patience=st.integers(1, 3),
    is_at_int8=st.booleans(),
)
def test_a_prediction_that_swings_within_the_hysteresis_changes_a_product_at_most_once(
    hysteresis, offsets, lookahead, patience, is_at_int8
):
    steady = policy(hysteresis_db=hysteresis, lookahead=lookahead, patience=patience)
    begin = [THRESHOLD + 10.0] * 4 if is_at_int8 else []
    swings = [THRESHOLD + hysteresis * offset for offset in offsets]
    precisions = candidates(steady, [*begin, *swings])
    assert changes(precisions) <= 1
    if is_at_int8 and min(swings) < THRESHOLD:
        assert precisions[-1] == "bf16"


def test_without_hysteresis_such_a_prediction_flaps():
    """That the law above can fail."""
    assert changes(candidates(policy(), [15.1, 14.9] * 10)) == 19


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("looks_ahead", [1, 2, 5])
@pytest.mark.parametrize("window", [2, 4, 7])
def test_a_falling_prediction_is_left_before_it_crosses(every, looks_ahead, window):
    """For every slope that needs a second check to cross; a single check has no trend."""
    for slope in [0.01, 0.05, 0.1, 0.37, 1.0, 1.9, 3.3, 5.0, 8.0, 14.0]:
        for phase in np.linspace(0, 1, 9):
            falling = policy(every=every, lookahead=looks_ahead * every, trend_window=window)
            start = THRESHOLD + slope * (1.02 + phase) + 2 * phase
            checks = int((start - THRESHOLD) / slope) + 3
            line = [start - slope * check for check in range(checks)]
            precisions = candidates(falling, line)
            left = precisions.index("bf16")
            assert precisions == ["int8"] * left + ["bf16"] * (checks - left)
            if left > 1:
                # safe up to the check at which it was left, and not left before the line crossed
                assert line[left] >= THRESHOLD - 1e-9
                assert line[left - 1] - looks_ahead * slope >= THRESHOLD - 1e-9
                assert line[left] - looks_ahead * slope < THRESHOLD + 1e-9
            else:
                assert line[left] >= THRESHOLD - 1e-9


def test_without_a_trend_a_falling_prediction_crosses_first():
    """That the law above can fail."""
    line = [20.3 - check for check in range(8)]
    precisions = candidates(policy(lookahead=0), line)
    assert line[precisions.index("bf16")] < THRESHOLD


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_a_rising_prediction_is_followed_once(slope, patience):
    rising = policy(lookahead=20, hysteresis_db=1.0, patience=patience)
    line = [THRESHOLD - 2 + slope * check for check in range(int(4 / slope) + 10)]
    precisions = candidates(rising, line)
    entered = precisions.index("int8")
    assert precisions == ["bf16"] * entered + ["int8"] * (len(line) - entered)
    reached = next(check for check, db in enumerate(line) if db >= THRESHOLD + 1.0)
    assert entered == reached + patience - 1


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_prediction_with_noise_far_above_the_threshold_never_leaves(seed):
    """Two checks with noise of 0.5 dB, extended by two checks, stray by 1.8 dB and cannot reach 9 dB."""
    noise = np.random.default_rng(seed).normal(scale=0.5, size=2000)
    averaging = policy(lookahead=20, trend_window=4, hysteresis_db=1.0, patience=2)
    assert set(candidates(averaging, [float(each) for each in THRESHOLD + 9 + noise])) == {"int8"}


@given(
    points=st.lists(st.tuples(st.integers(0, 500), st.floats(-60, 60)), min_size=1, max_size=8),
    x=st.integers(0, 600),
)
def test_a_line_is_that_of_least_squares(points, x):
    steps = [step for step, _ in points]
    if len(set(steps)) < 2:
        assert line_at(points, x) is None
    else:
        slope, offset = np.polyfit(np.array(steps, float), [db for _, db in points], 1)
        assert line_at(points, x) == pytest.approx(slope * x + offset, rel=1e-6, abs=1e-6)


# --- saving ---

numbers = st.floats(-80, 80) | st.sampled_from([NAN, INF, -INF])


@given(
    checks=st.lists(st.tuples(numbers, numbers, numbers, numbers, numbers), max_size=8),
    rest=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4),
)
def test_a_policy_restored_from_json_continues_unchanged(checks, rest):
    three = policy(
        candidates=["int8", "fp8", "bf16"], lookahead=20, hysteresis_db=1.0, patience=2, cooldown=25
    )
    state, step = three.start(), 0
    for left, right, measured, residual, other in checks:
        state, _ = three.verify(state, step, measured)
        state = three.correct(three.correct(state, "fp8", residual), "int8", other)
        state = three.decide(state, step, [left, right, INF])
        step += 10
    again = three.restore(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
    assert again == state
    assert run(three, rest, state=again, step=step) == run(three, rest, state=state, step=step)


def test_a_state_with_other_candidates_is_rejected_naming_both():
    saved = run(policy(candidates=["int8", "fp8", "bf16"]), [(20.0, 20.0)])[-1].to_dict()
    with pytest.raises(
        UserError, match=r"candidates int8, fp8, bf16, not int4, bf16: set speculation\.candidates to"
    ):
        policy(candidates=["int4", "bf16"]).restore(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved.pop("misses"), r"missing or unknown keys \(misses\): .* start again without"),
        (lambda saved: saved.update(mood=3), r"missing or unknown keys \(mood\)"),
        (
            lambda saved: saved.update(precision="int4"),
            r"damaged: it does not match its candidates \('int8', 'bf16'\)",
        ),
        (lambda saved: saved.update(streak=[1, 2]), "damaged: it does not match its candidates"),
        (lambda saved: saved.update(corrections=[]), "damaged: it does not match its candidates"),
        (lambda saved: saved.update(corrections=2.0), r"damaged: corrections = 2\.0"),
        (lambda saved: saved.update(history=[[0, 1.0, 2.0]]), "damaged: it does not match its candidates"),
        (lambda saved: saved.update(history=[3]), r"damaged: history\.0 = 3"),
        (lambda saved: saved.update(history=[[]]), "damaged: .* begins with its step"),
        (lambda saved: saved.update(history=[[None, 1.0]]), "damaged: .* begins with its step"),
        (lambda saved: saved.update(history=["abc"]), r"damaged: history\.0 = 'abc'"),
        (lambda saved: saved.update(blocked_until=None), "damaged: blocked_until = None"),
        (lambda saved: saved.update(hits=-1), "damaged: hits = -1"),
        (lambda saved: saved.update(streak=["a"]), r"damaged: streak\.0 = 'a'"),
        (lambda saved: saved.update(reason="foo"), "damaged: reason = 'foo'"),
        (lambda saved: saved.update(streak=None), "damaged: streak = None"),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(damage, message):
    saved = run(policy(), [20.0, 20.0])[-1].to_dict()
    assert GemmState.from_dict(saved)
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        policy().restore(saved)
    assert "\n" not in str(caught.value)


def test_a_state_of_an_earlier_version_keeps_its_decisions_and_what_it_learnt():
    """Its predictions came from another noise model, so they must not look like a trend."""
    three = policy(candidates=["int8", "fp8", "bf16"])
    state = three.correct(run(three, [(20.0, 20.0)])[-1], "fp8", 1.5)
    saved = json.loads(json.dumps(state.to_dict()))
    found = three.restore({**saved, "alignment_db": 4.0})
    assert found == replace(state, corrections=(4.0, 5.5), history=())
    assert three.restore({**saved, "alignment_db": None}) == replace(state, history=())
    with pytest.raises(UserError, match=r"missing or unknown keys \(alignment_db\)"):
        three.restore({**saved, "alignment_db": "x"})
