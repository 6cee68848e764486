"""The rules of the policy, one at a time; other files test laws over time and compare with an oracle."""

import math

import pytest
from policy_runs import INF, NAN, THRESHOLD, candidates, policy, run


def test_nothing_is_quantised_before_the_first_check():
    assert policy().start().precision == "bf16"


def test_the_first_check_chooses_the_cheapest_safe_candidate():
    three = policy(candidates=["int4", "int8", "bf16"], threshold_db={"int4": 10, "int8": 15}, patience=3)
    assert candidates(three, [(10.0, 99.0)]) == ["int4"]  # reaching a threshold is enough
    assert candidates(three, [(math.nextafter(10, 0), 15.0)]) == ["int8"]
    assert candidates(three, [(9.0, 14.0)]) == ["bf16"]


def test_an_unsafe_candidate_is_left_at_once_for_the_cheapest_safe_one():
    three = policy(candidates=["int4", "int8", "bf16"], hysteresis_db=2.0, patience=4)
    assert candidates(three, [(20.0, 30.0), (14.0, 15.0)]) == ["int4", "int8"]  # no margin is asked for
    assert candidates(three, [(20.0, 30.0), (14.0, 14.0)]) == ["int4", "bf16"]
    assert candidates(three, [(14.0, 30.0), (14.0, 14.0)]) == ["int8", "bf16"]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_cheaper_candidate_needs_its_margin_for_patience_checks_in_a_row(patience):
    patient = policy(patience=patience, hysteresis_db=1.0)
    interrupted = [10.0, *[16.0] * (patience - 1), 15.9, *[16.0] * patience]
    assert candidates(patient, interrupted) == ["bf16"] * (len(interrupted) - 1) + ["int8"]


def test_patience_is_counted_for_each_candidate():
    three = policy(candidates=["int4", "int8", "bf16"], patience=2)
    assert candidates(three, [(1.0, 1.0), (1.0, 20.0), (20.0, 20.0), (20.0, 20.0)]) == [
        "bf16",
        "bf16",
        "int8",
        "int4",
    ]


def test_a_cheaper_candidate_past_its_patience_is_preferred_to_a_more_expensive_one():
    """A dearer candidate may well be the noisier one: E5M2 beside INT8 on data without outliers."""
    three = policy(candidates=["int8", "fp8", "bf16"], patience=2)
    assert candidates(three, [(10.0, 20.0), (20.0, 20.0), (20.0, 10.0)]) == ["fp8", "fp8", "int8"]


def test_a_trend_is_the_line_through_the_last_checks():
    falling = [22.0, 22.0, 22.0, 20.0, 18.0]
    # 22, 20, 18 lead to 14 in two checks; with the 22 before them, to 15.6
    states = run(policy(lookahead=20, trend_window=3), falling)
    assert [state.precision for state in states] == ["int8"] * 4 + ["bf16"]
    assert states[-1].reason == "trend"
    assert candidates(policy(lookahead=20, trend_window=4), falling) == ["int8"] * 5
    assert candidates(policy(lookahead=0, trend_window=3), falling) == ["int8"] * 5


def test_a_fall_that_has_just_begun_counts_alone():
    wary = policy(lookahead=20, trend_window=4, hysteresis_db=1.0)
    begun = [30.0, 30.0, 30.0, 24.0]  # to 12 in two checks; the line of all four leads to 21.6
    states = run(wary, begun)
    assert [state.precision for state in states] == ["int8"] * 3 + ["bf16"]
    assert states[-1].reason == "trend"
    swinging = [30.0, 23.5, 30.0, 24.0]  # no more than before
    assert candidates(wary, [37.0, *swinging])[-1] == "int8"
    assert candidates(policy(lookahead=20, trend_window=4, hysteresis_db=6.5), begun) == ["int8"] * 4


def test_a_rising_line_promises_nothing():
    assert candidates(policy(lookahead=50), [5.0, 9.0, 13.0]) == ["bf16"] * 3


def test_a_trend_counts_steps_and_not_checks():
    slow = policy(lookahead=10)
    state = slow.decide(slow.start(), 0, [20.0, INF])
    assert slow.decide(state, 1, [18.0, INF]).precision == "bf16"  # 2 dB a step
    assert slow.decide(state, 100, [18.0, INF]).precision == "int8"


def test_a_correction_applies_to_its_candidate_only():
    three = policy(candidates=["int8", "fp8", "bf16"], lookahead=10)
    state = three.correct(three.correct(three.start(), "int8", -3.0), "fp8", 2.0)
    assert three.corrected(state, [20.0, 20.0, INF]) == (17.0, 22.0, INF)
    assert state.precision == "bf16"
    assert three.decide(state, 0, [18.0, 13.0, INF]).precision == "int8"
    assert three.decide(state, 0, [17.9, 13.0, INF]).precision == "fp8"
    assert three.decide(three.correct(state, "fp8", 1.5), 0, [17.9, 13.0, INF]).precision == "bf16"
    off = policy(candidates=["int8", "fp8", "bf16"], use_alignment=False)
    assert off.corrected(state, [20.0, 20.0, INF]) == (20.0, 20.0, INF)


def test_a_correction_moves_the_trend_too():
    shifted = policy(lookahead=10)
    state = run(shifted, [20.0, 19.5])[-1]
    # 19 leads to 18.5
    assert shifted.decide(shifted.correct(state, "int8", -3.5), 20, [19.0, INF]).precision == "int8"
    left = shifted.decide(shifted.correct(state, "int8", -3.75), 20, [19.0, INF])
    assert (left.precision, left.reason) == ("bf16", "trend")


def test_a_correction_that_was_learnt_is_no_trend():
    shifted = policy(lookahead=40)
    state = shifted.correct(run(shifted, [30.0, 30.0])[-1], "int8", -12.0)
    assert [each.precision for each in run(shifted, [30.0, 30.0], state=state, step=20)] == ["int8", "int8"]


def test_a_correction_is_a_running_mean_of_half_weight_for_each_candidate():
    three = policy(candidates=["int8", "fp8", "bf16"])
    state = three.start()
    assert state.corrections == (None, None)
    for candidate, measured, means in (
        ("fp8", -4.0, (None, -4.0)),
        ("fp8", -8.0, (None, -6.0)),
        ("int8", NAN, (None, -6.0)),
        ("int8", 1.0, (1.0, -6.0)),
        ("fp8", INF, (1.0, -6.0)),
        ("fp8", -INF, (1.0, -6.0)),
        ("fp8", 0.0, (1.0, -3.0)),
    ):
        state = three.correct(state, candidate, measured)
        assert state.corrections == means


def test_one_prediction_for_each_candidate_is_required():
    for predicted in ([20.0], [20.0, 20.0, INF]):
        with pytest.raises(ValueError, match="one prediction for each of"):
            policy().decide(policy().start(), 0, predicted)


def test_a_single_candidate_needs_no_decision():
    alone = policy(candidates=["bf16"])
    state = alone.decide(alone.start(), 0, [INF])
    assert (state.precision, state.reason) == ("bf16", "start")
    assert alone.verify(state, 0, 3.0) == (state, None)


# --- misses ---


@pytest.mark.parametrize(
    ("every", "cooldown", "at_bf16"),
    [(10, 100, 100), (10, 10, 10), (1, 7, 7), (10, 95, 100), (7, 100, 105), (5, 1, 5)],
)
def test_a_miss_keeps_a_product_at_bf16_for_the_cooldown(every, cooldown, at_bf16):
    """For exactly that many steps if a check falls on their end, otherwise until the next check."""
    missing = policy(every=every, cooldown=cooldown, patience=1, verify_every=1)
    state, by_step = missing.start(), []
    for step in range(400):
        by_step.append(state.precision)
        if step % every == 0:
            if step == 10 * every:
                state, is_hit = missing.verify(state, step, THRESHOLD - 0.1)
                assert is_hit is False
                assert state.precision == "bf16"
            state = missing.decide(state, step, [30.0, INF])
    rolled_back = range(10 * every + 1, 10 * every + 1 + at_bf16)
    assert by_step == ["bf16" if step == 0 or step in rolled_back else "int8" for step in range(400)]
    assert (state.hits, state.misses) == (0, 1)


def test_patience_counts_checks_during_the_cooldown_but_not_those_before_the_miss():
    patient = policy(patience=3, cooldown=30)
    state = run(patient, [30.0] * 5)[-1]
    state, _ = patient.verify(state, 50, 1.0)
    assert candidates(patient, [30.0] * 5, state=state, step=50) == ["bf16"] * 3 + ["int8"] * 2
    assert candidates(patient, [30.0, 30.0, 3.0, 30.0, 30.0, 30.0], state=state, step=50) == ["bf16"] * 5 + [
        "int8"
    ]


def test_hits_and_misses_are_counted_where_something_was_quantised():
    counting = policy()
    state = run(counting, [30.0])[-1]
    for measured, is_hit, counts in (
        (THRESHOLD, True, (1, 0)),
        (INF, True, (2, 0)),  # no noise at all
        (NAN, None, (2, 0)),
        (-INF, False, (2, 1)),
        (99.0, None, (2, 1)),  # it runs at bf16 since
    ):
        state, verdict = counting.verify(state, 10, measured)
        assert verdict is is_hit
        assert (state.hits, state.misses) == counts


def test_hits_and_misses_use_the_threshold_of_each_candidate():
    two = policy(candidates=["int4", "int8", "bf16"], threshold_db={"int4": 8, "int8": 20})
    int4, int8 = run(two, [(9.0, 30.0)])[-1], run(two, [(7.0, 30.0)])[-1]
    assert two.verify(int4, 0, 9.0)[1] is True
    assert two.verify(int8, 0, 9.0)[1] is False


# --- what is not finite ---


@pytest.mark.parametrize("db", [NAN, -INF])
def test_a_nan_prediction_is_unsafe_until_patience_is_served(db):
    wary = policy(patience=2, lookahead=20)
    states = run(wary, [30.0, db, 30.0, 30.0])
    assert [state.precision for state in states] == ["int8", "bf16", "bf16", "int8"]
    assert [state.reason for state in states] == ["safe", "not finite", "waiting", "safe"]
    assert candidates(wary, [db, 30.0, 30.0]) == ["bf16", "bf16", "int8"]


def test_a_trend_uses_only_checks_with_finite_predictions():
    wary = policy(lookahead=20, trend_window=4)
    # 30, –, 20 at steps 0 and 20 lead to 10 at step 40
    assert run(wary, [30.0, NAN, 20.0])[-1].streak == (0,)
    assert run(wary, [NAN, NAN, 20.0])[-1].streak == (1,)


def test_a_product_without_quantised_operands_is_at_the_last_candidate():
    """After a late switch: the candidate's name would count the product as low precision."""
    states = run(policy(patience=2), [30.0, INF, INF, 30.0, 30.0])
    assert [state.precision for state in states] == ["int8", "bf16", "bf16", "bf16", "int8"]
    assert [state.reason for state in states] == ["safe", "unquantised", "unquantised", "waiting", "safe"]
    assert run(policy(), [INF])[-1].reason == "unquantised"


# --- reasons ---


def test_a_reason_explains_the_current_precision_of_a_product():
    telling = policy(lookahead=10, hysteresis_db=1.0, patience=2, cooldown=20)
    assert telling.start().reason == "start"
    assert run(telling, [10.0])[-1].reason == "predicted"
    assert run(telling, [15.5])[-1].reason == "waiting"
    states = run(telling, [30.0, 30.0, 10.0, 10.0, 30.0, 30.0, 30.0, 30.0, 30.0])
    assert [state.reason for state in states[:5]] == ["safe", "safe", "predicted", "predicted", "predicted"]
    assert states[-1].reason == "safe"
    state, _ = telling.verify(states[-1], 90, 3.0)
    assert state.reason == "missed"
    after = run(telling, [5.0, 5.0, 5.0], state=state, step=90)
    assert [each.reason for each in after] == ["missed", "missed", "predicted"]
