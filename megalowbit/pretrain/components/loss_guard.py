"""What a run does when its loss is in trouble: skip, roll back, or stop.

Trouble is a loss that is not finite, or one that stands out or has risen (`LossSpikes`). A single such step
is said and passed over: its update was left out, or is one among thousands. What stays for `patience` steps,
and a loss that has risen as a whole, is acted upon. The guard only decides; `roll_back` does it.

It sees the loss of all ranks, the same number on each, so all decide the same, and NaN on one rank is NaN for
all. Its state goes with the checkpoints: a run that was killed decides again as it did. A step skipped
because of the loss scale has a finite loss, and is no trouble here.
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
from megalowbit.values import SettingsModel

KEY = "megalowbit.loss_guard"
Action = Literal["go on", "roll back", "stop"]
NEW_RUN = "megalowbit.model.checkpoint, with a lower learning rate"
ACTIONS: Mapping[str, Action] = {"rollback": "roll back", "stop": "stop"}  # other policies go on
MIN_WINDOW = 32  # losses; a spread found from fewer is no measure of anything
MAD_TO_STD = 1.4826  # deviation of a normal distribution in median absolute deviations
MIN_DEVIATION = 0.002  # of log loss; a loss that hardly varies must not make every step a spike
RISE_DEVIATIONS = 1.5  # deviations of single steps by which the median of a window has risen
MIN_RISE = 0.02  # of log loss: less than 2 % is not worth a word
MIN_LOSS = 1e-9  # below it the logarithm says nothing any more


class LossGuardSettings(SettingsModel):
    """`"loss_guard"`: losses that mean trouble, and what is done about them."""

    nonfinite: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="a loss that is NaN or infinite; skip: training goes on, without updates whose gradients "
        "are not finite, for run.max_consecutive_skips steps in a row at most",
    )
    patience: int = Field(
        default=3,
        ge=1,
        description="steps in a row that are in trouble before a rollback or stop",
    )
    spike: Literal["off", "warn", "rollback", "stop"] = Field(
        default="warn", description="a loss that stands out above those before it, or has risen and stays"
    )
    spike_deviations: float = Field(
        default=5.0,
        gt=0,
        description="by how many deviations (of log loss, robust) above the median a loss stands out",
    )
    window: int = Field(
        default=100,
        ge=MIN_WINDOW,
        le=1000,
        description="finite losses that median and deviation are taken of",
    )
    max_rollbacks: int = Field(
        default=3, ge=1, description="rollbacks in the whole run; the next one stops it"
    )

    @property
    def rolls_back(self) -> bool:
        """Whether any trouble leads to a rollback."""
        return "rollback" in (self.nonfinite, self.spike)


@dataclass(frozen=True, kw_only=True)
class SpikeFinding:
    """What a step's loss was like.

    Attributes:
        spike: what to say of it if it stands out; `None` if it does not.
        rise: what to say if the loss has risen and stays, as of this step; otherwise `None`.
    """

    spike: str | None = None
    rise: str | None = None


class _Level(NamedTuple):
    """Where losses lie, and how far from it single ones usually are."""

    median: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> _Level:
        middle = median(values) if values else 0.0
        deviation = MAD_TO_STD * median(abs(value - middle) for value in values) if values else 0.0
        return cls(middle, max(deviation, MIN_DEVIATION))


class LossSpikes:
    """Which losses stand out above those before them, and when the loss as a whole has risen.

    Two questions, both asked of the logarithm of the loss, which is nearly symmetric about its trend where
    the loss itself has a tail towards high values (small batches). *Does this step stand out?* Its distance
    above the median of the last `window` losses, in deviations: 1.4826 times the median absolute deviation,
    which a few spikes in the window do not move and which the steep start of a run only widens. *Has the loss
    risen?* The median of a full window, against the lowest such median so far: a divergence moves it for
    good, a spike not at all. After a rise has been found, further ones are measured from there.

    Pure arithmetic on what it was given, so equal losses give equal findings. A falling loss is never
    reported. Not covered: a loss that rises by less than MIN_RISE, or within a run's first window; a loss
    that ought to rise (harder data, a learning rate that starts again) is found to have risen.
    """

    def __init__(self, settings: LossGuardSettings) -> None:
        self._threshold, self._length = settings.spike_deviations, settings.window
        self._losses: list[float] = []  # logarithms, newest last
        self._level = _Level.of(self._losses)
        self._lowest: _Level | None = None  # of the full windows so far
        self._low_until = 0  # the last step at which the median was near the lowest

    @property
    def low_until(self) -> int:
        """A step up to which the loss had not begun to rise: that long ago the window was all low."""
        return self._low_until - self._length

    def add(self, step: int, loss: float) -> SpikeFinding:
        """Judge the loss of a step, which is finite; numbers of steps ascend."""
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
            f"the loss has risen and stays: {now:.4g} is the median of the last {self._length} steps, after "
            f"{before:.4g} at its lowest"
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
    """What is to be done after a step.

    Attributes:
        action: whether to train on, to roll back, or to stop.
        line: what to tell of the step; where it stops the run, with the remedy. `None` is nothing.
        since: where it does not, the first step that was in trouble.
    """

    action: Action = "go on"
    line: str | None = None
    since: int | None = None


class LossGuard(Component):
    """Decides after each step.

    Attributes:
        settings: the policies.
        rollbacks: those made so far, as `{"after_step", "to_step", "reason"}`.
    """

    key = "loss_guard"
    settings_class = LossGuardSettings
    may_change = (f"{KEY}.*",)

    def __init__(self, settings: LossGuardSettings) -> None:
        self.settings = settings
        self.rollbacks: list[dict[str, Any]] = []
        self._spikes = LossSpikes(settings)
        self._nonfinite_in_a_row = 0
        self._spikes_in_a_row = 0
        self._since: int | None = None  # first step of trouble that may have to be acted upon

    @classmethod
    def check(cls, settings: LossGuardSettings, run: RunSettings, recipe: object) -> None:
        """Refuse a rollback that would never come, for the run is stopped before."""
        skips = run.max_consecutive_skips
        if settings.nonfinite != "skip" and settings.patience >= skips:
            raise UserError(
                f"{KEY}.patience = {settings.patience} never ends, for megalowbit.run.max_consecutive_skips "
                f"= {skips} stops the run before: lower the former, or raise the latter"
            )

    @classmethod
    def build(cls, settings: LossGuardSettings, parts: RunParts) -> LossGuard:
        return cls(settings)

    @property
    def is_stable(self) -> bool:
        """Whether the last step is one to come back to; where it is not, a checkpoint would be no refuge."""
        return self._since is None

    def good_until(self, step: int) -> int | None:
        """The newest step that a rollback may ask for once `step` is trained; `None`: there are none."""
        if not self.settings.rolls_back:
            return None
        newest = step if self._since is None else self._since - 1
        return min(newest, self._spikes.low_until) if self.settings.spike == "rollback" else newest

    def judge(self, step: int, loss: float, *, is_skipped: bool) -> GuardDecision:
        """Decide after a step, once for each; `loss` is the mean over all ranks, and the first step is 1."""
        decide = self._judge_finite if math.isfinite(loss) else self._judge_nonfinite
        decision = decide(step, loss)
        if math.isfinite(loss) or is_skipped or decision.line is not None:
            return decision
        line = f"step {step}: the loss is {loss}, but its gradients were finite and have moved the weights"
        return GuardDecision(line=line)

    def _judge_nonfinite(self, step: int, loss: float) -> GuardDecision:
        policy, patience = self.settings.nonfinite, self.settings.patience
        self._nonfinite_in_a_row += 1
        self._spikes_in_a_row = 0
        self._note_trouble(step, is_trouble=policy in ACTIONS)
        if self._nonfinite_in_a_row < patience:
            return GuardDecision()
        steps = f"{patience} steps in a row" if patience > 1 else "the step"
        reason = f"step {step}: the loss of {steps} was not finite (the last one is {loss})"
        if policy not in ACTIONS:
            # once in a row of them: each skipped step has a line of its own
            return GuardDecision(line=reason if self._nonfinite_in_a_row == patience else None)
        return self._act("nonfinite", reason, self._since or step)

    def _judge_finite(self, step: int, loss: float) -> GuardDecision:
        policy = self.settings.spike
        self._nonfinite_in_a_row = 0
        if policy == "off":
            self._note_trouble(step, is_trouble=False)
            return GuardDecision()
        found = self._spikes.add(step, loss)
        is_spike = found.spike is not None
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if is_spike else 0
        self._note_trouble(step, is_trouble=is_spike and policy in ACTIONS)
        if found.rise is not None:
            reason = f"step {step}: {found.rise}"
            since = min(self._spikes.low_until + 1, self._since or step)
            return self._act("spike", reason, since) if policy in ACTIONS else GuardDecision(line=reason)
        if not is_spike:
            return GuardDecision()
        reason = f"step {step}: {found.spike}"
        if policy in ACTIONS and self._spikes_in_a_row >= self.settings.patience:
            many = f", as {self._spikes_in_a_row} steps in a row" if self._spikes_in_a_row > 1 else ""
            return self._act("spike", reason + many, self._since or step)
        return GuardDecision(line=reason if self._spikes_in_a_row == 1 else None)

    def _note_trouble(self, step: int, *, is_trouble: bool) -> None:
        self._since = (self._since or step) if is_trouble else None

    def _act(self, key: str, reason: str, since: int) -> GuardDecision:
        action = ACTIONS[getattr(self.settings, key)]
        if action == "stop":
            way_out = f"resume with --set {KEY}.{key}=rollback to leave these data out"
        elif len(self.rollbacks) >= self.settings.max_rollbacks:
            action = "stop"
            way_out = f"{KEY}.max_rollbacks = {self.settings.max_rollbacks} are made: raise it"
        else:
            return GuardDecision(action=action, line=reason, since=since)
        line = f"{reason}: {way_out}, or start a new run from an earlier checkpoint ({NEW_RUN})"
        return GuardDecision(action=action, line=line, since=since)

    def newest_good_step(self, since: int) -> int:
        """The newest step to roll back to from trouble that began at `since`.

        Where the run has not got past the trouble that it rolled back from last, what it rolled back to is
        under suspicion too, and an earlier step is asked for.
        """
        last = self.rollbacks[-1] if self.rollbacks else None
        if last is not None and since <= last["after_step"]:
            return min(since, last["to_step"]) - 1
        return since - 1

    def facts(self, known: Facts) -> Facts:
        """Rollbacks so far, once there are any."""
        return {"rollbacks": len(self.rollbacks)} if self.rollbacks else {}

    def summary(self) -> Summary:
        """To which step the run went back after which, and why."""
        if not self.rollbacks:
            return Summary()
        steps = (f"after step {each['after_step']} to step {each['to_step']}" for each in self.rollbacks)
        return Summary(
            entries={"rollbacks": [dict(each) for each in self.rollbacks]},
            line=f"rollbacks {len(self.rollbacks)}: {', '.join(steps)}",
        )

    def state_dict(self) -> dict[str, Any]:
        """All that decisions rest on, as plain values."""
        return {
            "rollbacks": [dict(each) for each in self.rollbacks],
            "spikes": self._spikes.state_dict(),
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, source: Path) -> None:
        """Continue from `state`; runs of earlier versions saved none, and begin as new ones do."""
        state = state or LossGuard(self.settings).state_dict()
        self.rollbacks = [dict(each) for each in state["rollbacks"]]
        self._spikes.load_state_dict(state["spikes"])
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._since = None if state["since"] is None else int(state["since"])
