"""Two views of the policy: an oracle that replays its whole past in exact fractions, and laws over time.

Predictions of the oracle's machine lie on quarters and thresholds beside them, so that no comparison hangs on
how a sum was rounded; equality has tests of its own.
"""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megalowbit.errors import UserError
from megalowbit.speculation.policy import GemmState, Policy, line_at
from megalowbit.speculation.settings import SpeculationSettings

INF, NAN = math.inf, math.nan
THRESHOLD = 15.0


def policy(**changes):
    """Two rungs, a threshold of 15 dB; whatever a test is not about is switched off."""
    quiet = {
        "ladder": ["int8", "bf16"],
        "threshold_db": THRESHOLD,
        "lookahead": 0,
        "hysteresis_db": 0.0,
        "patience": 1,
    }
    return Policy(SpeculationSettings(**{**quiet, **changes}))


def run(policy, predictions, *, state=None, step=0):
    """States after each look, every `every` steps; `predictions` of the cheapest rung, or of all but bf16."""
    state, states = state or policy.start(), []
    for each in predictions:
        predicted = [*each, INF] if isinstance(each, tuple | list) else [each, INF]
        state = policy.decide(state, step, predicted)
        states.append(state)
        step += policy.settings.every
    return states


def rungs(policy, predictions, **options):
    return [state.precision for state in run(policy, predictions, **options)]


def changes(precisions):
    return sum(one != other for one, other in itertools.pairwise(precisions))


# --- one rule at a time ---


def test_nothing_is_quantised_before_the_first_look():
    assert policy().start().precision == "bf16"


def test_the_cheapest_safe_rung_is_taken_at_the_first_look():
    three = policy(ladder=["int4", "int8", "bf16"], threshold_db={"int4": 10, "int8": 15}, patience=3)
    assert rungs(three, [(10.0, 99.0)]) == ["int4"]  # reaching a threshold is enough
    assert rungs(three, [(math.nextafter(10, 0), 15.0)]) == ["int8"]
    assert rungs(three, [(9.0, 14.0)]) == ["bf16"]


def test_an_unsafe_rung_is_left_at_once_for_the_cheapest_safe_one():
    three = policy(ladder=["int4", "int8", "bf16"], hysteresis_db=2.0, patience=4)
    assert rungs(three, [(20.0, 30.0), (14.0, 15.0)]) == ["int4", "int8"]  # no margin is asked for
    assert rungs(three, [(20.0, 30.0), (14.0, 14.0)]) == ["int4", "bf16"]
    assert rungs(three, [(14.0, 30.0), (14.0, 14.0)]) == ["int8", "bf16"]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_cheaper_rung_needs_its_margin_for_patience_looks_in_a_row(patience):
    patient = policy(patience=patience, hysteresis_db=1.0)
    interrupted = [10.0, *[16.0] * (patience - 1), 15.9, *[16.0] * patience]
    assert rungs(patient, interrupted) == ["bf16"] * (len(interrupted) - 1) + ["int8"]


def test_each_rung_earns_its_own_patience():
    three = policy(ladder=["int4", "int8", "bf16"], patience=2)
    assert rungs(three, [(1.0, 1.0), (1.0, 20.0), (20.0, 20.0), (20.0, 20.0)]) == [
        "bf16",
        "bf16",
        "int8",
        "int4",
    ]


def test_a_cheaper_rung_that_has_earned_it_is_preferred_to_a_dearer_one():
    """A dearer rung may well be the noisier one: E5M2 beside INT8 on data without outliers."""
    three = policy(ladder=["int8", "fp8", "bf16"], patience=2)
    assert rungs(three, [(10.0, 20.0), (20.0, 20.0), (20.0, 10.0)]) == ["fp8", "fp8", "int8"]


def test_a_trend_is_the_line_through_the_last_looks():
    falling = [22.0, 22.0, 22.0, 20.0, 18.0]
    # 22, 20, 18 lead to 14 in two looks; with the 22 before them, to 15.6
    states = run(policy(lookahead=20, trend_window=3), falling)
    assert [state.precision for state in states] == ["int8"] * 4 + ["bf16"]
    assert states[-1].reason == "trend"
    assert rungs(policy(lookahead=20, trend_window=4), falling) == ["int8"] * 5
    assert rungs(policy(lookahead=0, trend_window=3), falling) == ["int8"] * 5


def test_a_fall_that_has_just_begun_counts_alone():
    wary = policy(lookahead=20, trend_window=4, hysteresis_db=1.0)
    begun = [30.0, 30.0, 30.0, 24.0]  # to 12 in two looks; the line of all four leads to 21.6
    states = run(wary, begun)
    assert [state.precision for state in states] == ["int8"] * 3 + ["bf16"]
    assert states[-1].reason == "trend"
    swinging = [30.0, 23.5, 30.0, 24.0]  # no more than before
    assert rungs(wary, [37.0, *swinging])[-1] == "int8"
    assert rungs(policy(lookahead=20, trend_window=4, hysteresis_db=6.5), begun) == ["int8"] * 4


def test_a_rising_line_promises_nothing():
    assert rungs(policy(lookahead=50), [5.0, 9.0, 13.0]) == ["bf16"] * 3


def test_a_trend_counts_steps_and_not_looks():
    slow = policy(lookahead=10)
    state = slow.decide(slow.start(), 0, [20.0, INF])
    assert slow.decide(state, 1, [18.0, INF]).precision == "bf16"  # 2 dB a step
    assert slow.decide(state, 100, [18.0, INF]).precision == "int8"


def test_the_alignment_moves_predictions_and_their_trend_alike():
    shifted = policy(lookahead=10)
    state = run(shifted, [20.0, 19.5])[-1]
    low = shifted.align(state, -4.25)
    assert shifted.aligned(low, [20.0, INF]) == (15.75, INF)
    # 19 leads to 18.5, which is 14.25 with the alignment
    assert shifted.decide(low, 20, [19.0, INF]).precision == "bf16"
    assert shifted.decide(low, 20, [19.0, INF]).reason == "predicted"  # 19 - 4.25 alone is below
    assert shifted.decide(shifted.align(state, -3.75), 20, [19.0, INF]).reason == "trend"
    assert shifted.decide(shifted.align(state, -3.25), 20, [19.0, INF]).precision == "int8"
    off = policy(lookahead=10, use_alignment=False)
    assert off.decide(low, 20, [19.0, INF]).precision == "int8"


def test_a_measured_alignment_is_no_trend():
    """Raw predictions stand in the history: a jump of the alignment must not look like a fall."""
    shifted = policy(lookahead=40)
    state = shifted.align(run(shifted, [30.0, 30.0])[-1], -12.0)
    assert [each.precision for each in run(shifted, [30.0, 30.0], state=state, step=20)] == ["int8", "int8"]


def test_the_alignment_is_a_running_mean_of_half_weight():
    state = policy().start()
    assert state.alignment_db is None
    for measured, mean in ((4.0, 4.0), (8.0, 6.0), (NAN, 6.0), (-INF, 6.0), (0.0, 3.0)):
        state = policy().align(state, measured)
        assert state.alignment_db == mean


def test_one_prediction_for_each_rung_is_asked_for():
    for predicted in ([20.0], [20.0, 20.0, INF]):
        with pytest.raises(ValueError, match="one for each of"):
            policy().decide(policy().start(), 0, predicted)


def test_a_ladder_of_one_rung_decides_nothing():
    alone = policy(ladder=["bf16"])
    state = alone.decide(alone.start(), 0, [INF])
    assert (state.precision, state.reason) == ("bf16", "start")
    assert alone.verify(state, 0, 3.0) == (state, None)


# --- misses ---


@pytest.mark.parametrize(
    ("every", "cooldown", "at_bf16"),
    [(10, 100, 100), (10, 10, 10), (1, 7, 7), (10, 95, 100), (7, 100, 105), (5, 1, 5)],
)
def test_a_miss_keeps_a_product_at_bf16_for_the_cooldown(every, cooldown, at_bf16):
    """For exactly so many steps where a look falls on their end, else until the next look."""
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


def test_looks_during_the_cooldown_count_for_patience_and_those_before_the_miss_do_not():
    patient = policy(patience=3, cooldown=30)
    state = run(patient, [30.0] * 5)[-1]
    state, _ = patient.verify(state, 50, 1.0)
    assert rungs(patient, [30.0] * 5, state=state, step=50) == ["bf16"] * 3 + ["int8"] * 2
    assert rungs(patient, [30.0, 30.0, 3.0, 30.0, 30.0, 30.0], state=state, step=50) == ["bf16"] * 5 + [
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


def test_each_rung_is_held_to_its_own_threshold():
    two = policy(ladder=["int4", "int8", "bf16"], threshold_db={"int4": 8, "int8": 20})
    int4, int8 = run(two, [(9.0, 30.0)])[-1], run(two, [(7.0, 30.0)])[-1]
    assert two.verify(int4, 0, 9.0)[1] is True
    assert two.verify(int8, 0, 9.0)[1] is False


# --- what is not finite ---


@pytest.mark.parametrize("db", [NAN, -INF])
def test_a_prediction_that_is_not_a_number_is_unsafe_until_patience_says_otherwise(db):
    wary = policy(patience=2, lookahead=20)
    states = run(wary, [30.0, db, 30.0, 30.0])
    assert [state.precision for state in states] == ["int8", "bf16", "bf16", "int8"]
    assert [state.reason for state in states] == ["safe", "not finite", "waiting", "safe"]
    assert rungs(wary, [db, 30.0, 30.0]) == ["bf16", "bf16", "int8"]


def test_a_trend_is_taken_over_the_looks_that_have_a_number():
    wary = policy(lookahead=20, trend_window=4)
    # 30, –, 20 at steps 0 and 20 lead to 10 at step 40
    assert run(wary, [30.0, NAN, 20.0])[-1].streak == (0,)
    assert run(wary, [NAN, NAN, 20.0])[-1].streak == (1,)


def test_where_nothing_would_be_quantised_a_product_is_at_the_last_rung():
    """After a late switch: the rung's name would count the product as low precision."""
    states = run(policy(patience=2), [30.0, INF, INF, 30.0, 30.0])
    assert [state.precision for state in states] == ["int8", "bf16", "bf16", "bf16", "int8"]
    assert [state.reason for state in states] == ["safe", "unquantised", "unquantised", "waiting", "safe"]
    assert run(policy(), [INF])[-1].reason == "unquantised"


# --- reasons ---


def test_a_reason_says_what_brought_a_product_where_it_is():
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


# --- laws over time ---


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
    precisions = rungs(steady, [*begin, *swings])
    assert changes(precisions) <= 1
    if is_at_int8 and min(swings) < THRESHOLD:
        assert precisions[-1] == "bf16"


def test_without_hysteresis_such_a_prediction_flaps():
    """That the law above can fail."""
    assert changes(rungs(policy(), [15.1, 14.9] * 10)) == 19


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("looks_ahead", [1, 2, 5])
@pytest.mark.parametrize("window", [2, 4, 7])
def test_a_falling_prediction_is_left_before_it_crosses(every, looks_ahead, window):
    """For every slope that takes a second look to cross; one look knows no trend."""
    for slope in [0.01, 0.05, 0.1, 0.37, 1.0, 1.9, 3.3, 5.0, 8.0, 14.0]:
        for phase in np.linspace(0, 1, 9):
            falling = policy(every=every, lookahead=looks_ahead * every, trend_window=window)
            start = THRESHOLD + slope * (1.02 + phase) + 2 * phase
            looks = int((start - THRESHOLD) / slope) + 3
            line = [start - slope * look for look in range(looks)]
            precisions = rungs(falling, line)
            left = precisions.index("bf16")
            assert precisions == ["int8"] * left + ["bf16"] * (looks - left)
            if left > 1:
                # safe up to the look at which it was left, and no earlier than the line bade
                assert line[left] >= THRESHOLD - 1e-9
                assert line[left - 1] - looks_ahead * slope >= THRESHOLD - 1e-9
                assert line[left] - looks_ahead * slope < THRESHOLD + 1e-9
            else:
                assert line[left] >= THRESHOLD - 1e-9


def test_without_a_trend_a_falling_prediction_crosses_first():
    """That the law above can fail."""
    line = [20.3 - look for look in range(8)]
    precisions = rungs(policy(lookahead=0), line)
    assert line[precisions.index("bf16")] < THRESHOLD


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_a_rising_prediction_is_followed_once(slope, patience):
    rising = policy(lookahead=20, hysteresis_db=1.0, patience=patience)
    line = [THRESHOLD - 2 + slope * look for look in range(int(4 / slope) + 10)]
    precisions = rungs(rising, line)
    entered = precisions.index("int8")
    assert precisions == ["bf16"] * entered + ["int8"] * (len(line) - entered)
    reached = next(look for look, db in enumerate(line) if db >= THRESHOLD + 1.0)
    assert entered == reached + patience - 1


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_prediction_with_noise_far_above_the_threshold_never_leaves(seed):
    """Two looks with noise of 0.5 dB, read two looks ahead, stray by 1.8 dB: 9 dB are out of their reach."""
    noise = np.random.default_rng(seed).normal(scale=0.5, size=2000)
    looked = policy(lookahead=20, trend_window=4, hysteresis_db=1.0, patience=2)
    assert set(rungs(looked, [float(each) for each in THRESHOLD + 9 + noise])) == {"int8"}


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
    looks=st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=8),
    rest=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4),
)
def test_a_state_goes_on_from_json_as_if_it_had_never_left(looks, rest):
    three = policy(ladder=["int8", "fp8", "bf16"], lookahead=20, hysteresis_db=1.0, patience=2, cooldown=25)
    state, step = three.start(), 0
    for left, right, measured, alignment in looks:
        state, _ = three.verify(state, step, measured)
        state = three.decide(three.align(state, alignment), step, [left, right, INF])
        step += 10
    again = three.restore(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
    assert again == state
    assert run(three, rest, state=again, step=step) == run(three, rest, state=state, step=step)


def test_a_state_of_another_ladder_is_refused_naming_both():
    saved = run(policy(ladder=["int8", "fp8", "bf16"]), [(20.0, 20.0)])[-1].to_dict()
    with pytest.raises(
        UserError, match=r"ladder int8, fp8, bf16, not to int4, bf16: set speculation\.ladder to"
    ):
        policy(ladder=["int4", "bf16"]).restore(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved.pop("misses"), "lacks or does not know misses: .* start decisions anew"),
        (lambda saved: saved.update(mood=3), "lacks or does not know mood"),
        (
            lambda saved: saved.update(precision="int4"),
            r"damaged: it does not fit its ladder \('int8', 'bf16'\)",
        ),
        (lambda saved: saved.update(streak=[1, 2]), "damaged: it does not fit its ladder"),
        (lambda saved: saved.update(history=[[0, 1.0, 2.0]]), "damaged: it does not fit its ladder"),
        (lambda saved: saved.update(history=[3]), "damaged: its lists are not lists"),
        (lambda saved: saved.update(history=[[]]), "damaged: its lists are not lists"),
        (lambda saved: saved.update(streak=None), "damaged: its lists are not lists"),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(damage, message):
    saved = run(policy(), [20.0, 20.0])[-1].to_dict()
    assert GemmState.from_dict(saved)
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        policy().restore(saved)
    assert "\n" not in str(caught.value)


# --- the whole against an oracle ---


class Oracle:
    """The same rules, told from the whole past: nothing is counted along the way, all in exact fractions."""

    def __init__(self, settings):
        self.settings = settings
        self.last = len(settings.ladder) - 1
        self.bars = [Fraction(settings.threshold(rung)) for rung in settings.ladder[:-1]]
        self.looks = []  # (step, predictions, rungs that could have been entered)
        self.measured = []  # alignments
        self.misses = []  # (step, looks before it)
        self.hits = 0
        self.rung = self.last

    def alignment(self):
        if not self.measured or not self.settings.use_alignment:
            return Fraction(0)
        mean = self.measured[0]
        for each in self.measured[1:]:
            mean = (mean + each) / 2
        return mean

    def worst(self, rung):
        """The lower of now and later, or None where there is no number now."""
        step, predictions = self.looks[-1][:2]
        if not math.isfinite(predictions[rung]):
            return None
        seen = [
            (Fraction(at), Fraction(each[rung]))
            for at, each, _ in self.looks[-self.settings.trend_window :]
            if math.isfinite(each[rung])
        ]
        now = Fraction(predictions[rung])
        if self.settings.lookahead and len({at for at, _ in seen}) > 1:
            # normal equations by Cramer's rule
            n, sx, sy = len(seen), sum(x for x, _ in seen), sum(y for _, y in seen)
            sxx, sxy = sum(x * x for x, _ in seen), sum(x * y for x, y in seen)
            determinant = n * sxx - sx * sx
            slope, offset = (n * sxy - sx * sy) / determinant, (sxx * sy - sx * sxy) / determinant
            later = offset + slope * (step + self.settings.lookahead)
            (x1, y1), (x2, y2) = seen[-2:]
            before = [abs(b - a) for (_, a), (_, b) in itertools.pairwise(seen[:-1])]
            fall = y1 - y2
            if fall > max([Fraction(self.settings.hysteresis_db), *before]) and x1 != x2:
                later = min(later, y2 - fall / (x2 - x1) * (step + self.settings.lookahead - x2))
            now = min(now, later)
        return now + self.alignment()

    def is_safe(self, rung, margin=0):
        worst = self.worst(rung)
        return worst is not None and worst >= self.bars[rung] + Fraction(margin)

    def decide(self, step, predictions):
        is_first = not self.looks
        self.looks.append((step, predictions, None))
        enterable = {rung for rung in range(self.last) if self.is_safe(rung, self.settings.hysteresis_db)}
        self.looks[-1] = (step, predictions, enterable)
        since = self.misses[-1][1] if self.misses else 0
        recent = [each for _, _, each in self.looks[since:]]
        patience = 1 if is_first else self.settings.patience
        if self.misses and step < self.misses[-1][0] + self.settings.cooldown:
            self.rung = self.last
            return
        candidates = [self.last]
        for rung in range(self.last):
            if rung >= self.rung:
                is_open = self.is_safe(rung)
            else:
                is_open = len(recent) >= patience and all(rung in each for each in recent[-patience:])
            candidates += [rung] * is_open
        self.rung = min(candidates)

    def verify(self, step, measured):
        if self.rung == self.last or math.isnan(measured):
            return None
        if measured >= self.bars[self.rung]:
            self.hits += 1
            return True
        self.misses.append((step, len(self.looks)))
        self.rung = self.last
        return False


quarters = st.integers(4 * 5, 4 * 30).map(lambda quarter: quarter / 4)
predictions = st.lists(quarters | st.sampled_from([NAN, INF, -INF]), min_size=3, max_size=3)


class PolicyMachine(RuleBasedStateMachine):
    """Looks, verifications, alignments and restarts in any order."""

    @initialize(
        lookahead=st.sampled_from([0, 10, 25]),
        window=st.integers(2, 5),
        hysteresis=st.sampled_from([0.0, 1.0, 2.5]),
        patience=st.integers(1, 3),
        cooldown=st.sampled_from([1, 15, 40]),
        use_alignment=st.booleans(),
    )
    def begin(self, lookahead, window, hysteresis, patience, cooldown, use_alignment):
        self.policy = Policy(
            SpeculationSettings(
                ladder=["int4", "int8", "fp8", "bf16"],
                threshold_db={"int4": 9.0123457, "int8": 14.9876541, "fp8": 18.0314159},
                lookahead=lookahead,
                trend_window=window,
                hysteresis_db=hysteresis,
                patience=patience,
                cooldown=cooldown,
                use_alignment=use_alignment,
            )
        )
        self.oracle = Oracle(self.policy.settings)
        self.state = self.policy.start()
        self.step = 0
        self.has_decided = False

    @rule(predicted=predictions, gap=st.sampled_from([0, 1, 10, 10, 10, 30]))
    def look(self, predicted, gap):
        self.step += gap
        self.state = self.policy.decide(self.state, self.step, [*predicted, INF])
        self.oracle.decide(self.step, predicted)
        self.has_decided = True

    @precondition(lambda self: self.oracle.looks and all(map(math.isfinite, self.oracle.looks[-1][1])))
    @rule(change=st.sampled_from([-1.0, -0.25, 0.0, 0.25, 1.0]), times=st.integers(1, 4))
    def drift(self, change, times):
        """More of the same: what trends are made of."""
        for _ in range(times):
            self.look([db + change for db in self.oracle.looks[-1][1]], 10)

    @rule(measured=quarters | st.sampled_from([NAN, INF, -INF]))
    def verify(self, measured):
        before = self.state
        self.state, is_hit = self.policy.verify(self.state, self.step, measured)
        assert is_hit is self.oracle.verify(self.step, measured)
        assert (is_hit is None) == (self.state == before)
        self.has_decided = False

    @rule(measured=st.integers(-8, 8).map(lambda quarter: quarter / 4) | st.sampled_from([NAN, INF, -INF]))
    def align(self, measured):
        self.state = self.policy.align(self.state, measured)
        if math.isfinite(measured):
            self.oracle.measured.append(Fraction(measured))
        self.has_decided = False

    @rule()
    def restart(self):
        self.state = self.policy.restore(json.loads(json.dumps(self.state.to_dict(), allow_nan=False)))

    @invariant()
    def agrees_with_the_oracle(self):
        if hasattr(self, "oracle"):
            assert self.state.precision == self.policy.ladder[self.oracle.rung]
            assert (self.state.hits, self.state.misses) == (self.oracle.hits, len(self.oracle.misses))

    @invariant()
    def is_never_where_it_is_not_safe(self):
        if getattr(self, "has_decided", False):
            rung = self.policy.ladder.index(self.state.precision)
            assert rung == self.oracle.last or self.oracle.is_safe(rung)

    @invariant()
    def reasons_fit(self):
        if getattr(self, "has_decided", False):
            is_highest = self.state.precision == "bf16"
            assert self.state.reason != "start"
            assert is_highest or self.state.reason in (
                "safe",
                "predicted",
                "trend",
                "not finite",
                "unquantised",
            )
            assert not is_highest or self.state.reason != "safe"


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
