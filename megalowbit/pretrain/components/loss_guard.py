"""The loss guard: decides whether to continue, roll back or stop when the loss is unstable.

The loss is unstable if it is not finite, if it spikes, or if its level has risen (`LossSpikes`). A single bad
step is only reported: its update was skipped, or is one of thousands. The guard acts on problems that last
`patience` steps, and on a loss whose level has risen. It only decides; `loop.roll_back` carries out a
rollback.

The guard uses the mean loss over all ranks, which is the same number on each rank, so all ranks decide the
same. NaN on one rank is NaN on all. The guard's state is saved in checkpoints: a run that was killed and
resumed makes the same decisions. A step that is skipped because of the loss scale has a finite loss and does
not count as unstable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic import Field

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings, Summary
from megalowbit.telemetry.facts import Facts
from megalowbit.values import SettingsModel, unit

KEY = "megalowbit.loss_guard"
Action = Literal["continue", "roll back", "stop"]
NEW_RUN = "megalowbit.model.checkpoint, with a lower learning rate"
ACTIONS: Mapping[str, Action] = {"rollback": "roll back", "stop": "stop"}  # other policies continue
MIN_WINDOW = 32  # losses; fewer do not give a usable deviation
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
MIN_DEVIATION = 0.002  # of log loss; otherwise every step of a nearly constant loss would be a spike
RISE_DEVIATIONS = 1.5  # the median of a window has risen if it grows by this many deviations of single steps
MIN_RISE = 0.02  # of log loss: a rise of less than 2 % is not reported
MIN_LOSS = 1e-9  # losses are clamped to this before the logarithm


class LossGuardSettings(SettingsModel):
    """What to do about a loss that is not finite, spikes, or rises and stays high."""

    nonfinite: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="what to do when the loss is NaN or infinite. `skip`: skip updates whose gradients are "
        "not finite and continue, for at most `run.max_consecutive_skips` steps in a row. `rollback`, "
        "`stop`: act after `patience` such steps in a row",
    )
    patience: int = Field(
        default=3,
        ge=1,
        description="bad steps in a row before a rollback or stop",
        json_schema_extra=unit("steps"),
    )
    spike: Literal["off", "warn", "rollback", "stop"] = Field(
        default="warn",
        description="what to do about a spike, or a loss that has risen and stays high. `warn`: print a "
        "line. `rollback`, `stop`: act after `patience` spikes in a row, and at once if the loss has risen",
    )
    spike_deviations: float = Field(
        default=5.0,
        gt=0,
        description="distance above the median from which on a loss is a spike, in units of 1.4826 × the "
        "median absolute deviation of log loss",
        json_schema_extra=unit("deviations"),
    )
    window: int = Field(
        default=100,
        ge=MIN_WINDOW,
        le=1000,
        description="number of finite losses over which the median and the deviation are computed",
        json_schema_extra=unit("steps"),
    )
    max_rollbacks: int = Field(
        default=3,
        ge=1,
        description="rollbacks allowed in the whole run, resumed parts included; the next one stops it",
    )

    @property
    def rolls_back(self) -> bool:
        """Whether any trouble leads to a rollback."""
        return "rollback" in (self.nonfinite, self.spike)


@dataclass(frozen=True, kw_only=True)
class SpikeFinding:
    """The result of examining one loss.

    Attributes:
        spike: describes the spike; `None` if the loss is not a spike.
        rise: describes the rise, if the level of the loss has risen as of this step; otherwise `None`.
    """

    spike: str | None = None
    rise: str | None = None


class _Level(NamedTuple):
    """Median of log losses, and the typical deviation of single losses from it."""

    median: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> _Level:
        middle = median(values) if values else 0.0
        deviation = MAD_TO_STD * median(abs(value - middle) for value in values) if values else 0.0
        return cls(middle, max(deviation, MIN_DEVIATION))


class LossSpikes:
    """Finds spikes of the loss, and rises of its level.

    Both use the logarithm of the loss: with small batches the loss has a tail towards high values, while its
    logarithm is nearly symmetric about the trend.

    - *Spike*: the loss is more than `spike_deviations` deviations above the median of the last `window`
      losses. A deviation is 1.4826 times the median absolute deviation. A few spikes in the window do not
      change it, and the steep start of a run only increases it.
    - *Rise*: the median of a full window is above the lowest such median so far. A divergence moves this
      median permanently, a spike does not. After a rise, the next rise is measured from the new level.

    The result depends on the losses only. A falling loss is never reported. Not covered: a loss that rises by
    less than MIN_RISE, or within the first window of a run. A rise with a legitimate cause, such as harder
    data or a restarted learning rate, is reported as well.
    """

    def __init__(self, settings: LossGuardSettings) -> None:
        self._threshold, self._length = settings.spike_deviations, settings.window
        self._losses: list[float] = []  # logarithms, newest last
        self._level = _Level.of(self._losses)
        self._lowest: _Level | None = None  # of the full windows so far
        self._low_until = 0  # the last step at which the median was close to the lowest

    @property
    def low_until(self) -> int:
        """A step before any rise: the window that ended at `_low_until` began after it."""
        return self._low_until - self._length

    def add(self, step: int, loss: float) -> SpikeFinding:
        """Examine the finite loss of a step; step numbers must increase."""
        value = math.log(max(loss, MIN_LOSS))
        spike = self._spike(value, loss)
        self._losses = [*self._losses, value][-self._length :]
        self._level = _Level.of(self._losses)
        return SpikeFinding(spike=spike, rise=self._rise(step))

    def _spike(self, value: float, loss: float) -> str | None:
        if len(self._losses) < MIN_WINDOW:
            return None
        deviations = (value - self._level.median) / self._level.deviation
        if deviations <= self._threshold:
            return None
        usual = f"{math.exp(self._level.median):.4g}, the median of the last {len(self._losses)} steps"
        return f"loss {loss:.4g} is {deviations:.3g} deviations above {usual}"

    def _rise(self, step: int) -> str | None:
        if len(self._losses) < self._length:
            self._low_until = step
            return None
        level = self._level
        if self._lowest is None or level.median < self._lowest.median:
            self._lowest = level
        lowest = self._lowest
        rise, allowed = level.median - lowest.median, max(RISE_DEVIATIONS * lowest.deviation, MIN_RISE)
        if rise <= allowed / 2:
            self._low_until = step
        if rise <= allowed:
            return None
        self._lowest = level
        now, before = math.exp(level.median), math.exp(lowest.median)
        return (
            f"the loss has risen: the median of the last {self._length} steps is {now:.4g}, the lowest was "
            f"{before:.4g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for the checkpoint."""
        return {
            "losses": list(self._losses),
            "lowest": None if self._lowest is None else list(self._lowest),
            "low_until": self._low_until,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, also with a window of another length."""
        self._losses = [float(each) for each in state["losses"]][-self._length :]
        self._level = _Level.of(self._losses)
        self._lowest = None if state["lowest"] is None else _Level(*map(float, state["lowest"]))
        self._low_until = int(state["low_until"])


@dataclass(frozen=True, kw_only=True)
class GuardDecision:
    """The decision after a step.

    Attributes:
        action: whether to continue, roll back or stop.
        line: the line to print, with the remedy if the run stops; `None` prints nothing.
        since: the first step of the problem, for a rollback or stop.
    """

    action: Action = "continue"
    line: str | None = None
    since: int | None = None


class LossGuard(Component):
    """Decides after each step whether to continue, roll back or stop.

    Attributes:
        settings: the policies.
        rollbacks: rollbacks so far, each as `{"after_step", "to_step", "reason"}`.
    """

    key = "loss_guard"
    settings_class = LossGuardSettings
    description = "what to do about a loss that is not finite, spikes, or rises"
    may_change = (f"{KEY}.*",)

    def __init__(self, settings: LossGuardSettings) -> None:
        self.settings = settings
        self.rollbacks: list[dict[str, Any]] = []
        self._spikes = LossSpikes(settings)
        self._nonfinite_in_a_row = 0
        self._spikes_in_a_row = 0
        self._since: int | None = None  # first step of a current problem that a policy may act on

    @classmethod
    def check(cls, settings: LossGuardSettings, run: RunSettings, recipe: object) -> None:
        """Reject a patience that is never reached, because max_consecutive_skips stops the run earlier."""
        skips = run.max_consecutive_skips
        if settings.nonfinite != "skip" and settings.patience >= skips:
            raise UserError(
                f"{KEY}.patience = {settings.patience} is never reached, because "
                f"megalowbit.run.max_consecutive_skips = {skips} stops the run earlier: lower the first or "
                "raise the second"
            )

    @classmethod
    def build(cls, settings: LossGuardSettings, parts: RunParts) -> LossGuard:
        return cls(settings)

    @property
    def is_stable(self) -> bool:
        """Whether the loss is stable, so that a rollback could return to a checkpoint of this step."""
        return self._since is None

    def good_until(self, step: int) -> int | None:
        """The newest step that a rollback after `step` could return to; `None` if rollbacks are off."""
        if not self.settings.rolls_back:
            return None
        newest = step if self._since is None else self._since - 1
        return min(newest, self._spikes.low_until) if self.settings.spike == "rollback" else newest

    def judge(self, step: int, loss: float, *, is_skipped: bool) -> GuardDecision:
        """Decide after a step; call it once per step.

        Args:
            step: counted from 1.
            loss: mean over all ranks.
            is_skipped: whether the update was skipped.
        """
        decide = self._judge_finite if math.isfinite(loss) else self._judge_nonfinite
        decision = decide(step, loss)
        if math.isfinite(loss) or is_skipped or decision.line is not None:
            return decision
        line = f"step {step}: the loss is {loss}, but its gradients were finite and the weights were updated"
        return GuardDecision(line=line)

    def _judge_nonfinite(self, step: int, loss: float) -> GuardDecision:
        policy, patience = self.settings.nonfinite, self.settings.patience
        self._nonfinite_in_a_row += 1
        self._spikes_in_a_row = 0
        self._mark_unstable(step, is_unstable=policy in ACTIONS)
        if self._nonfinite_in_a_row < patience:
            return GuardDecision()
        steps = f"{patience} steps in a row" if patience > 1 else "the step"
        reason = f"step {step}: the loss of {steps} was not finite (the last one is {loss})"
        if policy not in ACTIONS:
            # once per series: each skipped step has a line already
            return GuardDecision(line=reason if self._nonfinite_in_a_row == patience else None)
        return self._act("nonfinite", reason, self._since or step)

    def _judge_finite(self, step: int, loss: float) -> GuardDecision:
        policy = self.settings.spike
        self._nonfinite_in_a_row = 0
        if policy == "off":
            self._mark_unstable(step, is_unstable=False)
            return GuardDecision()
        found = self._spikes.add(step, loss)
        is_spike = found.spike is not None
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if is_spike else 0
        self._mark_unstable(step, is_unstable=is_spike and policy in ACTIONS)
        if found.rise is not None:
            reason = f"step {step}: {found.rise}"
            since = min(self._spikes.low_until + 1, self._since or step)
            return self._act("spike", reason, since) if policy in ACTIONS else GuardDecision(line=reason)
        if not is_spike:
            return GuardDecision()
        reason = f"step {step}: {found.spike}"
        if policy in ACTIONS and self._spikes_in_a_row >= self.settings.patience:
            many = f", {self._spikes_in_a_row} steps in a row" if self._spikes_in_a_row > 1 else ""
            return self._act("spike", reason + many, self._since or step)
        return GuardDecision(line=reason if self._spikes_in_a_row == 1 else None)

    def _mark_unstable(self, step: int, *, is_unstable: bool) -> None:
        self._since = (self._since or step) if is_unstable else None

    def _act(self, key: str, reason: str, since: int) -> GuardDecision:
        action = ACTIONS[getattr(self.settings, key)]
        if action == "stop":
            way_out = f"resume with --set {KEY}.{key}=rollback to skip these batches"
        elif len(self.rollbacks) >= self.settings.max_rollbacks:
            action = "stop"
            way_out = f"{KEY}.max_rollbacks = {self.settings.max_rollbacks} is reached: raise it"
        else:
            return GuardDecision(action=action, line=reason, since=since)
        line = f"{reason}: {way_out}, or start a new run from an earlier checkpoint ({NEW_RUN})"
        return GuardDecision(action=action, line=line, since=since)

    def newest_good_step(self, since: int) -> int:
        """The newest step to roll back to from a problem that began at `since`.

        If the run has not passed the step of the last rollback, the checkpoint it rolled back to may be bad
        as well, so this returns an earlier step.
        """
        last = self.rollbacks[-1] if self.rollbacks else None
        if last is not None and since <= last["after_step"]:
            return min(since, last["to_step"]) - 1
        return since - 1

    def facts(self, known: Facts) -> Facts:
        """The number of rollbacks so far; no column before the first."""
        return {"rollbacks": len(self.rollbacks)} if self.rollbacks else {}

    def summary(self) -> Summary:
        """The step after which each rollback happened, the step it returned to, and the reason."""
        if not self.rollbacks:
            return Summary()
        steps = (f"after step {each['after_step']} to step {each['to_step']}" for each in self.rollbacks)
        return Summary(
            entries={"rollbacks": [dict(each) for each in self.rollbacks]},
            line=f"rollbacks {len(self.rollbacks)}: {', '.join(steps)}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that decisions depend on, as plain values."""
        return {
            "rollbacks": [dict(each) for each in self.rollbacks],
            "spikes": self._spikes.state_dict(),
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue from `state`; without one (earlier versions saved none), start like a new run."""
        state = state or LossGuard(self.settings).state_dict()
        self.rollbacks = [dict(each) for each in state["rollbacks"]]
        self._spikes.load_state_dict(state["spikes"])
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._since = None if state["since"] is None else int(state["since"])
