"""The policy against an oracle that replays its whole past in exact fractions.

Predictions lie on quarters and thresholds beside them, so that no comparison hangs on how a sum was rounded;
equality has tests of its own.
"""

import itertools
import json
import math
from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_runs import INF, NAN

from megalowbit.speculation.policy import Policy
from megalowbit.speculation.settings import SpeculationSettings


class Oracle:
    """The same rules, computed from the whole past in exact fractions, without running counts."""

    def __init__(self, settings):
        self.settings = settings
        self.last = len(settings.candidates) - 1
        self.bars = [Fraction(settings.threshold(candidate)) for candidate in settings.candidates[:-1]]
        self.checks = []  # (step, predictions, candidates that could have been entered)
        self.residuals = [[] for _ in self.bars]  # for each candidate
        self.misses = []  # (step, checks before it)
        self.hits = 0
        self.candidate = self.last

    def learnt(self, candidate):
        """The correction, from all that was ever measured of it."""
        return self.mean(self.residuals[candidate]) if self.settings.use_alignment else Fraction(0)

    @staticmethod
    def mean(known):
        """The last of n measurements weighs 1/2, …, the first two 1/2ⁿ⁻¹ each."""
        weights = [Fraction(1, 2 ** min(halves, len(known) - 1)) for halves in range(1, len(known) + 1)]
        parts = [weight * each for weight, each in zip(weights, reversed(known), strict=True)]
        return sum(parts, Fraction(0))

    def worst(self, candidate):
        """The lower of now and later, or None where there is no number now."""
        step, predictions = self.checks[-1][:2]
        if not math.isfinite(predictions[candidate]):
            return None
        seen = [
            (Fraction(at), Fraction(each[candidate]))
            for at, each, _ in self.checks[-self.settings.trend_window :]
            if math.isfinite(each[candidate])
        ]
        now = Fraction(predictions[candidate])
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
        return now + self.learnt(candidate)

    def is_safe(self, candidate, margin=0):
        worst = self.worst(candidate)
        return worst is not None and worst >= self.bars[candidate] + Fraction(margin)

    def decide(self, step, predictions):
        is_first = not self.checks
        self.checks.append((step, predictions, None))
        enterable = {
            candidate
            for candidate in range(self.last)
            if self.is_safe(candidate, self.settings.hysteresis_db)
        }
        self.checks[-1] = (step, predictions, enterable)
        since = self.misses[-1][1] if self.misses else 0
        recent = [each for _, _, each in self.checks[since:]]
        patience = 1 if is_first else self.settings.patience
        if self.misses and step < self.misses[-1][0] + self.settings.cooldown:
            self.candidate = self.last
            return
        candidates = [self.last]
        for candidate in range(self.last):
            if candidate >= self.candidate:
                is_open = self.is_safe(candidate)
            else:
                is_open = len(recent) >= patience and all(candidate in each for each in recent[-patience:])
            candidates += [candidate] * is_open
        self.candidate = min(candidates)

    def verify(self, step, measured):
        if self.candidate == self.last or math.isnan(measured):
            return None
        if measured >= self.bars[self.candidate]:
            self.hits += 1
            return True
        self.misses.append((step, len(self.checks)))
        self.candidate = self.last
        return False


quarters = st.integers(4 * 5, 4 * 30).map(lambda quarter: quarter / 4)
predictions = st.lists(quarters | st.sampled_from([NAN, INF, -INF]), min_size=3, max_size=3)


class PolicyMachine(RuleBasedStateMachine):
    """Checks, verifications, corrections and restarts in any order."""

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
                candidates=["int4", "int8", "fp8", "bf16"],
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
    def check(self, predicted, gap):
        self.step += gap
        self.state = self.policy.decide(self.state, self.step, [*predicted, INF])
        self.oracle.decide(self.step, predicted)
        self.has_decided = True

    @precondition(lambda self: self.oracle.checks and all(map(math.isfinite, self.oracle.checks[-1][1])))
    @rule(change=st.sampled_from([-1.0, -0.25, 0.0, 0.25, 1.0]), times=st.integers(1, 4))
    def drift(self, change, times):
        """More of the same: what trends are made of."""
        for _ in range(times):
            self.check([db + change for db in self.oracle.checks[-1][1]], 10)

    @rule(measured=quarters | st.sampled_from([NAN, INF, -INF]))
    def verify(self, measured):
        before = self.state
        self.state, is_hit = self.policy.verify(self.state, self.step, measured)
        assert is_hit is self.oracle.verify(self.step, measured)
        assert (is_hit is None) == (self.state == before)
        self.has_decided = False

    @rule(
        candidate=st.integers(0, 2),
        residual=st.integers(-8, 8).map(lambda quarter: quarter / 4) | st.sampled_from([NAN, INF, -INF]),
    )
    def correct(self, candidate, residual):
        self.state = self.policy.correct(self.state, self.policy.candidates[candidate], residual)
        if math.isfinite(residual):
            self.oracle.residuals[candidate].append(Fraction(residual))
        self.has_decided = False

    @rule()
    def restart(self):
        self.state = self.policy.restore(json.loads(json.dumps(self.state.to_dict(), allow_nan=False)))

    @invariant()
    def agrees_with_the_oracle(self):
        if hasattr(self, "oracle"):
            assert self.state.precision == self.policy.candidates[self.oracle.candidate]
            assert (self.state.hits, self.state.misses) == (self.oracle.hits, len(self.oracle.misses))

    @invariant()
    def is_never_where_it_is_not_safe(self):
        if getattr(self, "has_decided", False):
            candidate = self.policy.candidates.index(self.state.precision)
            assert candidate == self.oracle.last or self.oracle.is_safe(candidate)

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
