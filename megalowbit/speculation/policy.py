"""Which precision a product runs at: pure functions of predicted and measured signal-to-noise ratios.

A candidate of the ladder is *safe* while the prediction, and the one that a line through the last looks
foretells for `lookahead` steps later, both reach its threshold; so must the line through the last two looks
alone where a fall has begun: by more than `hysteresis_db`, and than the prediction moved between looks
before. A product leaves an unsafe candidate at once, for the cheapest safe one. It goes to a cheaper
candidate only after that one has stood `hysteresis_db` above its threshold, trend included, for `patience`
looks in a row (a product never looked at before: for one), so that a prediction that swings about a threshold
leaves once and stays away. A measured ratio below the threshold is a miss: the product goes to the last
candidate, which quantises nothing, until `cooldown` steps have passed; looks in that time count for patience.
What is decided after step s holds from step s + 1 on.

Predictions are corrected by what was measured: by the *alignment*, how much larger the product's signal is
than that of independent operands, and by a *correction* of each candidate that the product has run at, what
that leaves between predicted and measured. Both are running means of a few measurements. They are added to
the present prediction and to its trend alike, so that what is learnt is never taken for a trend. A candidate
that a product is kept from by its correction is not measured any more; so the correction fades, and after
some hundred looks the candidate is tried again.

A prediction that is NaN is unsafe. One of +inf says that a candidate would quantise nothing of the product;
it is then at the last one, so that nobody counts it as low precision. Not covered: who predicts, measures and
agrees among ranks; whoever is given the same numbers decides the same.
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
FADING = 1 / 128  # of a correction, at each verified look at which the product runs at another candidate
DAMAGED = "the saved state of a product is damaged"
NEW_SHARE = 0.5  # of a new measurement in a running mean


def _begins_with_a_step(look: list[float | None]) -> list[float | None]:
    step = look[0] if look else None
    if step is None or step < 0 or step != int(step):
        raise ValueError("a look begins with its step")
    return look


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was predicted at one look.

    Attributes:
        step: the optimizer step.
        predicted: dB for each candidate but the last, neither aligned nor corrected; `None` where it was not
            finite.
    """

    step: int
    predicted: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class GemmState:
    """All that is remembered of one product between looks.

    Attributes:
        ladder: the candidates that `history` and `streak` speak of.
        precision: the candidate from the next step on.
        history: the last `trend_window` looks, oldest first.
        streak: for each candidate but the last, looks in a row at which it could have been entered.
        blocked_until: the step after which a candidate may be entered again after a miss.
        hits: verifications whose measured ratio reached the threshold.
        misses: verifications whose measured ratio did not.
        alignment_db: running mean of measured alignments; `None`: never measured.
        corrections: for each candidate but the last, running mean in dB of what was measured there less what
            was predicted, alignment included; `None`: never measured there.
        reason: why `precision` is what it is. "start": nothing decided yet; "safe": the cheapest candidate
            that may be entered; "predicted", "trend": a cheaper one is, or will be, below its threshold;
            "missed": was measured below it; "waiting": is not far or not long enough above it; "not finite":
            has no prediction; "unquantised": would quantise nothing.
    """

    ladder: tuple[str, ...]
    precision: str
    history: tuple[Prediction, ...] = ()
    streak: tuple[int, ...] = ()
    blocked_until: int = 0
    hits: int = 0
    misses: int = 0
    alignment_db: float | None = None
    corrections: tuple[float | None, ...] = ()
    reason: Reason = "start"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives back an equal state."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        history = [[look.step, *look.predicted] for look in self.history]
        lists = {name: list(values[name]) for name in ("ladder", "streak", "corrections")}
        return {**values, **lists, "history": history}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> GemmState:
        """Build a state from what `to_dict` gave, through JSON or not.

        Raises:
            UserError: a key is missing or foreign, or the values do not fit the ladder among them.
        """
        known = {field.name for field in fields(GemmState)}
        if values.keys() != known:
            wrong = ", ".join(sorted(known ^ values.keys()))
            raise UserError(
                f"the saved state of a product lacks or does not know {wrong}: it was written by another "
                "version; start decisions anew"
            )
        try:
            saved = _Saved.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{DAMAGED}: {where} = {shown(first['input'])}, {first['msg']}; start decisions anew"
            ) from None
        lists = {name: tuple(getattr(saved, name)) for name in ("ladder", "streak", "corrections")}
        history = tuple(Prediction(step=step, predicted=tuple(dbs)) for step, *dbs in values["history"])
        state = GemmState(**{**saved.model_dump(), **lists, "history": history})
        lengths = {len(state.streak), len(state.corrections), *(len(look.predicted) for look in history)}
        if state.precision not in state.ladder or lengths != {len(state.ladder) - 1}:
            raise UserError(
                f"{DAMAGED}: it does not fit its ladder {shown(state.ladder)}; start decisions anew"
            )
        return state


class _Saved(BaseModel):
    """What `GemmState.to_dict` writes, type by type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ladder: list[str]
    precision: str
    history: list[Annotated[list[float | None], AfterValidator(_begins_with_a_step)]]
    streak: list[NonNegativeInt]
    blocked_until: NonNegativeInt
    hits: NonNegativeInt
    misses: NonNegativeInt
    alignment_db: float | None
    corrections: list[float | None]
    reason: Reason


class Policy:
    """Decides for one product after another; holds settings alone."""

    def __init__(self, settings: SpeculationSettings):
        self.settings = settings
        self.ladder = settings.ladder
        self._thresholds = tuple(settings.threshold(candidate) for candidate in self.ladder[:-1])

    def start(self) -> GemmState:
        """The state of a product before its first look: at the last candidate."""
        candidates = len(self._thresholds)
        return GemmState(
            ladder=self.ladder,
            precision=self.ladder[-1],
            streak=(0,) * candidates,
            corrections=(None,) * candidates,
        )

    def restore(self, values: Mapping[str, Any]) -> GemmState:
        """A state saved with this policy's ladder.

        Raises:
            UserError: it belongs to another ladder, or `GemmState.from_dict` refuses it.
        """
        state = GemmState.from_dict(values)
        if state.ladder != self.ladder:
            raise UserError(
                f"the saved state belongs to the ladder {', '.join(state.ladder)}, not to "
                f"{', '.join(self.ladder)}: set speculation.ladder to the former, or start decisions anew"
            )
        return state

    def corrected(self, state: GemmState, predicted: Sequence[float]) -> tuple[float, ...]:
        """Predictions with the product's alignment and each candidate's correction, as decisions take them.

        In dB, one for each candidate of the ladder, the last one included.

        Raises:
            ValueError: there is not one for each candidate.
        """
        if len(predicted) != len(self.ladder):
            raise ValueError(f"predictions must be one for each of {self.ladder}, not {len(predicted)}")
        return tuple(float(db) + self._offset(state, candidate) for candidate, db in enumerate(predicted))

    def align(self, state: GemmState, alignment_db: float) -> GemmState:
        """Take a measured signal over that of independent operands into its running mean, if it is finite."""
        return replace(state, alignment_db=_averaged(state.alignment_db, alignment_db))

    def correct(self, state: GemmState, precision: str, residual_db: float) -> GemmState:
        """Take what a measurement says of a candidate's predictions into their correction, if it is finite.

        The residual is measured less predicted, with the alignment that was measured in the same step; the
        candidate is any but the last.
        """
        corrections = list(state.corrections)
        candidate = self.ladder.index(precision)
        corrections[candidate] = _averaged(corrections[candidate], residual_db)
        return replace(state, corrections=tuple(corrections))

    def fade(self, state: GemmState, precision: str) -> GemmState:
        """Trust corrections a little less, but that of `precision`, which it ran at and is measured."""
        corrections = tuple(
            known if known is None or candidate == precision else known * (1 - FADING)
            for candidate, known in zip(self.ladder[:-1], state.corrections, strict=True)
        )
        return replace(state, corrections=corrections)

    def decide(self, state: GemmState, step: int, predicted: Sequence[float]) -> GemmState:
        """Choose the candidate for the steps after this one; `verify` of the same step comes first.

        Predictions are in dB for each candidate of the ladder, without alignment and correction; inf for the
        last one.

        Raises:
            ValueError: there is not one prediction for each candidate.
        """
        now = self.corrected(state, predicted)[:-1]
        look = Prediction(step=step, predicted=tuple(map(finite_or_none, predicted[:-1])))
        history = (*state.history, look)[-self.settings.trend_window :]
        worst = [self._worst(state, history, candidate, db) for candidate, db in enumerate(now)]
        margin = self.settings.hysteresis_db
        streak = tuple(
            before + 1 if db >= bar + margin else 0
            for before, db, bar in zip(state.streak, worst, self._thresholds, strict=True)
        )
        patience = self.settings.patience if state.history else 1
        current = self.ladder.index(state.precision)
        # a cheaper candidate has to have earned it; the present and dearer ones need to be safe, no more
        is_open = [
            streak[candidate] >= patience if candidate < current else worst[candidate] >= bar
            for candidate, bar in enumerate(self._thresholds)
        ]
        if step < state.blocked_until:
            is_open = []
        chosen = is_open.index(True) if True in is_open else len(worst)
        reason = self._reason(state, chosen, step, now, worst)
        return replace(state, precision=self.ladder[chosen], history=history, streak=streak, reason=reason)

    def verify(self, state: GemmState, step: int, measured_db: float) -> tuple[GemmState, bool | None]:
        """Compare a measured ratio, inf without noise, with the threshold of the candidate the step ran at.

        Returns:
            The state, and whether it was a hit; `None` where the step ran at the last candidate, or the ratio
            is NaN (no signal, or values that were not finite), which says nothing about the candidate.
        """
        candidate = self.ladder.index(state.precision)
        if candidate == len(self._thresholds) or math.isnan(measured_db):
            return state, None
        if measured_db >= self._thresholds[candidate]:
            return replace(state, hits=state.hits + 1), True
        return replace(
            state,
            precision=self.ladder[-1],
            misses=state.misses + 1,
            blocked_until=step + self.settings.cooldown,
            streak=(0,) * len(self._thresholds),
            reason="missed",
        ), False

    def _offset(self, state: GemmState, candidate: int) -> float:
        if not self.settings.use_alignment or candidate == len(self._thresholds):
            return 0.0
        return (state.alignment_db or 0.0) + (state.corrections[candidate] or 0.0)

    def _worst(self, state: GemmState, history: Sequence[Prediction], candidate: int, now: float) -> float:
        """The lower one of a candidate's predictions now and later; NaN where there is none."""
        if not math.isfinite(now):
            return math.nan
        if not self.settings.lookahead:
            return now
        known = [(look.step, look.predicted[candidate]) for look in history]
        points = [(step, db) for step, db in known if db is not None]
        until = history[-1].step + self.settings.lookahead
        later = [line_at(points, until)]
        if _has_begun_to_fall([db for _, db in points], self.settings.hysteresis_db):
            later.append(line_at(points[-2:], until))  # the line of all is slow to see it
        return min([now, *(db + self._offset(state, candidate) for db in later if db is not None)])

    def _reason(
        self, state: GemmState, chosen: int, step: int, now: Sequence[float], worst: Sequence[float]
    ) -> Reason:
        current, last = self.ladder.index(state.precision), len(now)
        if not last:
            return state.reason  # a ladder of one candidate
        if step < state.blocked_until:
            return "missed"
        if chosen < current:
            return "safe"
        # the candidate that it leaves, or else the cheapest of those it is kept from
        candidate = current if current < last else 0
        is_told = current < last or state.reason in ("predicted", "trend")
        if chosen == current and is_told and math.isfinite(now[candidate]):
            return state.reason
        if now[candidate] == math.inf:
            return "unquantised"
        if not math.isfinite(now[candidate]):
            return "not finite"
        if now[candidate] < self._thresholds[candidate]:
            return "predicted"
        return "trend" if worst[candidate] < self._thresholds[candidate] else "waiting"


def finite_or_none(value: float) -> float | None:
    """A number that files can hold, or `None`."""
    return float(value) if math.isfinite(value) else None


def _averaged(mean: float | None, new: float) -> float | None:
    """A running mean after one more measurement; one that is not finite says nothing."""
    if not math.isfinite(new):
        return mean
    return new if mean is None else mean + NEW_SHARE * (new - mean)


def _has_begun_to_fall(values: Sequence[float], least: float) -> bool:
    """Whether the last step down is more than `least`, and more than any step up or down before it."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    return bool(steps) and -steps[-1] > max([least, *map(abs, steps[:-1])])


def line_at(points: Iterable[tuple[float, float]], x: float) -> float | None:
    """Value at x of the least-squares line through points (x, y); `None` where they determine none."""
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
