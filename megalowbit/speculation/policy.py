"""Which precision a product runs at: pure functions of predicted and measured signal-to-noise ratios.

Rules:

- A candidate is *safe* if its predicted SNR reaches its threshold, both now and `lookahead` steps later on a
  line fitted to the last checks. If the last prediction fell by more than `hysteresis_db`, and by more than
  any change between the checks before it, the line through the last two checks must reach it as well.
- A product leaves an unsafe candidate at once and moves to the cheapest safe one.
- A product moves to a cheaper candidate only if that one was `hysteresis_db` above its threshold, trend
  included, at `patience` consecutive checks (its first check: at that one alone). A prediction that
  oscillates around a threshold therefore leaves once and stays away.
- A measured SNR below the threshold is a miss. The product runs at the last candidate, which quantises
  nothing, until `cooldown` steps have passed; checks in that time count for `patience`.
- A decision made after step s is in force from step s + 1.

Measurements correct the predictions, which assume that operands and rounding errors are independent of each
other. A *correction* per candidate is the measured difference in dB. It is a running mean of a few
measurements, and is added to the current prediction and to its trend, so learning never shows up as a trend.
All candidates are measured in a verified check, not only the one that a product runs at.

A NaN prediction is unsafe. A prediction of +inf means that the candidate would quantise neither operand; the
product is then assigned the last candidate, so it does not count as low precision. Not here: prediction,
measurement and agreement between ranks. The same inputs always give the same decision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, ValidationError

from megalowbit.errors import UserError, shown
from megalowbit.speculation.settings import SpeculationSettings

Reason = Literal["start", "safe", "predicted", "trend", "missed", "waiting", "not finite", "unquantised"]
FORMER_KEY = "alignment_db"  # of saved states
DAMAGED = "the saved state of a product is damaged"
RESTART = "start again without the saved decisions"
NEW_SHARE = 0.5  # weight of a new measurement in a running mean


def _begins_with_a_step(check: list[float | None]) -> list[float | None]:
    step = check[0] if check else None
    if step is None or step < 0 or step != int(step):
        raise ValueError("a check begins with its step")
    return check


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predictions of one check.

    Attributes:
        step: the optimizer step.
        predicted: dB for each candidate but the last, without correction; `None` if not finite.
    """

    step: int
    predicted: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class GemmState:
    """The state of one product between checks.

    Attributes:
        candidates: the candidates that `history` and `streak` refer to; saved under the key `ladder`.
        precision: the candidate from the next step on.
        history: the last `trend_window` checks, oldest first.
        streak: for each candidate but the last, the number of consecutive checks at which a product could
            have moved to it.
        blocked_until: after a miss, the step after which quantised candidates are allowed again.
        hits: verifications whose measured SNR reached the threshold.
        misses: verifications whose measured SNR did not.
        corrections: for each candidate but the last, running mean in dB of measured minus predicted SNR;
            `None`: never measured.
        reason: why the product runs at `precision`.

            - "start": nothing was decided yet
            - "safe": the cheapest candidate that the product may move to
            - "predicted", "trend": a cheaper candidate is, or will be, below its threshold
            - "missed": a cheaper candidate was measured below its threshold
            - "waiting": a cheaper candidate is not far enough, or not long enough, above its threshold
            - "not finite": a cheaper candidate has no prediction
            - "unquantised": a cheaper candidate would quantise nothing
    """

    candidates: tuple[str, ...]
    precision: str
    history: tuple[Prediction, ...] = ()
    streak: tuple[int, ...] = ()
    blocked_until: int = 0
    hits: int = 0
    misses: int = 0
    corrections: tuple[float | None, ...] = ()
    reason: Reason = "start"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` restores an equal state."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {"ladder" if name == "candidates" else name: value for name, value in values.items()}
        history = [[check.step, *check.predicted] for check in self.history]
        lists = {name: list(values[name]) for name in ("ladder", "streak", "corrections")}
        return {**values, **lists, "history": history}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> GemmState:
        """Build a state from the output of `to_dict`.

        Earlier versions had another model of the noise. Of their states the decisions are kept. The
        predictions of that model are dropped, as they would look like a trend, and the alignment, which it
        measured once for all candidates, becomes part of the corrections.

        Raises:
            UserError: a key is missing or unknown, or the values do not match the candidates among them.
        """
        values = _with_present_keys(values)
        known = _Saved.model_fields.keys()
        if values.keys() != known:
            wrong = ", ".join(sorted(known ^ values.keys()))
            raise UserError(
                f"the saved state of a product has missing or unknown keys ({wrong}): it was written by "
                f"another version; {RESTART}"
            )
        try:
            saved = _Saved.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{DAMAGED}: {where} = {shown(first['input'])}, {first['msg']}; {RESTART}"
            ) from None
        history = tuple(Prediction(step=step, predicted=tuple(dbs)) for step, *dbs in values["history"])
        scalars = saved.model_dump(exclude={"ladder", "history", "streak", "corrections"})
        state = GemmState(
            candidates=tuple(saved.ladder),
            history=history,
            streak=tuple(saved.streak),
            corrections=tuple(saved.corrections),
            **scalars,
        )
        lengths = {len(state.streak), len(state.corrections), *(len(check.predicted) for check in history)}
        if state.precision not in state.candidates or lengths != {len(state.candidates) - 1}:
            raise UserError(
                f"{DAMAGED}: it does not match its candidates {shown(state.candidates)}; {RESTART}"
            )
        return state


def _with_present_keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state, without `alignment_db` of earlier versions; see `GemmState.from_dict`."""
    alignment, corrections = values.get(FORMER_KEY), values.get("corrections")
    numbers = [alignment, *corrections] if isinstance(corrections, list) else ["damaged"]
    if FORMER_KEY not in values or not all(isinstance(each, float | None) for each in numbers):
        return values
    kept = {key: value for key, value in values.items() if key != FORMER_KEY}
    if alignment is not None:
        kept["corrections"] = [alignment + (known or 0.0) for known in numbers[1:]]
    return {**kept, "history": []}


class _Saved(BaseModel):
    """The keys and types that `GemmState.to_dict` writes."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ladder: list[str]
    precision: str
    history: list[Annotated[list[float | None], AfterValidator(_begins_with_a_step)]]
    streak: list[NonNegativeInt]
    blocked_until: NonNegativeInt
    hits: NonNegativeInt
    misses: NonNegativeInt
    corrections: list[float | None]
    reason: Reason


class Policy:
    """The decision rules under given settings; each product's state is passed in and returned."""

    def __init__(self, settings: SpeculationSettings):
        self.settings = settings
        self.candidates = settings.candidates
        self._thresholds = tuple(settings.threshold(candidate) for candidate in self.candidates[:-1])

    def start(self) -> GemmState:
        """The state of a product before its first check: at the last candidate."""
        candidates = len(self._thresholds)
        return GemmState(
            candidates=self.candidates,
            precision=self.candidates[-1],
            streak=(0,) * candidates,
            corrections=(None,) * candidates,
        )

    def restore(self, values: Mapping[str, Any]) -> GemmState:
        """A state saved with this policy's candidates.

        Raises:
            UserError: it was saved with other candidates, or `GemmState.from_dict` rejects it.
        """
        state = GemmState.from_dict(values)
        if state.candidates != self.candidates:
            raise UserError(
                f"the saved state has the candidates {', '.join(state.candidates)}, not "
                f"{', '.join(self.candidates)}: set speculation.candidates to those, or {RESTART}"
            )
        return state

    def corrected(self, state: GemmState, predicted: Sequence[float]) -> tuple[float, ...]:
        """Predictions plus each candidate's correction, as decisions use them.

        In dB, one for each candidate, the last one included.

        Raises:
            ValueError: the number of predictions is not that of the candidates.
        """
        if len(predicted) != len(self.candidates):
            raise ValueError(f"expected one prediction for each of {self.candidates}, got {len(predicted)}")
        return tuple(float(db) + self._offset(state, candidate) for candidate, db in enumerate(predicted))

    def correct(self, state: GemmState, precision: str, residual_db: float) -> GemmState:
        """Update the correction of a candidate; a residual that is not finite is ignored.

        The residual is by how much the SNR of the compared part differs from that of independent operands
        and errors. The candidate is any but the last.
        """
        corrections = list(state.corrections)
        candidate = self.candidates.index(precision)
        corrections[candidate] = _averaged(corrections[candidate], residual_db)
        return replace(state, corrections=tuple(corrections))

    def decide(self, state: GemmState, step: int, predicted: Sequence[float]) -> GemmState:
        """Choose the candidate for the steps after this one. Call `verify` for the same step first.

        Predictions are in dB, one for each candidate, without correction; inf for the last one.

        Raises:
            ValueError: the number of predictions is not that of the candidates.
        """
        now = self.corrected(state, predicted)[:-1]
        newest = Prediction(step=step, predicted=tuple(map(finite_or_none, predicted[:-1])))
        history = (*state.history, newest)[-self.settings.trend_window :]
        worst = [self._worst(state, history, candidate, db) for candidate, db in enumerate(now)]
        margin = self.settings.hysteresis_db
        streak = tuple(
            before + 1 if db >= threshold + margin else 0
            for before, db, threshold in zip(state.streak, worst, self._thresholds, strict=True)
        )
        patience = self.settings.patience if state.history else 1
        current = self.candidates.index(state.precision)
        # a cheaper candidate needs hysteresis and patience; the present one and costlier ones must be safe
        is_allowed = [
            streak[candidate] >= patience if candidate < current else worst[candidate] >= threshold
            for candidate, threshold in enumerate(self._thresholds)
        ]
        if step < state.blocked_until:
            is_allowed = []
        chosen = is_allowed.index(True) if True in is_allowed else len(worst)
        reason = self._reason(state, chosen, step, now, worst)
        return replace(
            state, precision=self.candidates[chosen], history=history, streak=streak, reason=reason
        )

    def verify(self, state: GemmState, step: int, measured_db: float) -> tuple[GemmState, bool | None]:
        """Compare a measured SNR (inf without noise) with the threshold of the candidate the step ran at.

        Returns:
            The new state, and whether it was a hit. `None` if the step ran at the last candidate, or if the
            SNR is NaN (no signal, or values that were not finite).
        """
        candidate = self.candidates.index(state.precision)
        if candidate == len(self._thresholds) or math.isnan(measured_db):
            return state, None
        if measured_db >= self._thresholds[candidate]:
            return replace(state, hits=state.hits + 1), True
        return replace(
            state,
            precision=self.candidates[-1],
            misses=state.misses + 1,
            blocked_until=step + self.settings.cooldown,
            streak=(0,) * len(self._thresholds),
            reason="missed",
        ), False

    def _offset(self, state: GemmState, candidate: int) -> float:
        if not self.settings.use_alignment or candidate == len(self._thresholds):
            return 0.0
        return state.corrections[candidate] or 0.0

    def _worst(self, state: GemmState, history: Sequence[Prediction], candidate: int, now: float) -> float:
        """The lowest of a candidate's predictions, now and `lookahead` steps later; NaN if there is none."""
        if not math.isfinite(now):
            return math.nan
        if not self.settings.lookahead:
            return now
        known = [(check.step, check.predicted[candidate]) for check in history]
        points = [(step, db) for step, db in known if db is not None]
        until = history[-1].step + self.settings.lookahead
        later = [line_at(points, until)]
        if _has_begun_to_fall([db for _, db in points], self.settings.hysteresis_db):
            later.append(line_at(points[-2:], until))  # the line through all points reacts too slowly
        return min([now, *(db + self._offset(state, candidate) for db in later if db is not None)])

    def _reason(
        self, state: GemmState, chosen: int, step: int, now: Sequence[float], worst: Sequence[float]
    ) -> Reason:
        current, last = self.candidates.index(state.precision), len(now)
        if not last:
            return state.reason  # bf16 is the only candidate
        if step < state.blocked_until:
            return "missed"
        if chosen < current:
            return "safe"
        # the candidate the product leaves or stays at; from the last one, the cheapest that it cannot move to
        candidate = current if current < last else 0
        is_explained = current < last or state.reason in ("predicted", "trend")
        if chosen == current and is_explained and math.isfinite(now[candidate]):
            return state.reason
        if now[candidate] == math.inf:
            return "unquantised"
        if not math.isfinite(now[candidate]):
            return "not finite"
        if now[candidate] < self._thresholds[candidate]:
            return "predicted"
        return "trend" if worst[candidate] < self._thresholds[candidate] else "waiting"


def finite_or_none(value: float) -> float | None:
    """The value, or `None` if it is not finite and JSON cannot represent it."""
    return float(value) if math.isfinite(value) else None


def _averaged(mean: float | None, new: float) -> float | None:
    """A running mean after one more measurement, which is ignored if it is not finite."""
    if not math.isfinite(new):
        return mean
    return new if mean is None else mean + NEW_SHARE * (new - mean)


def _has_begun_to_fall(values: Sequence[float], least: float) -> bool:
    """Whether the last change is a drop by more than `least`, and larger than any change before it."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    return bool(steps) and -steps[-1] > max([least, *map(abs, steps[:-1])])


def line_at(points: Iterable[tuple[float, float]], x: float) -> float | None:
    """Value at x of the least-squares line through points (x, y); `None` if they do not determine a line."""
    pairs = list(points)
    if len(pairs) < 2:
        return None
    center = math.fsum(each for each, _ in pairs) / len(pairs)
    spread = math.fsum((each - center) ** 2 for each, _ in pairs)
    if not spread:
        return None
    mean = math.fsum(y for _, y in pairs) / len(pairs)
    slope = math.fsum((each - center) * (y - mean) for each, y in pairs) / spread
    return mean + slope * (x - center)
