"""What a run does when its loss is in trouble: skip, roll back, or stop.

Trouble is a loss that is not finite, or one that stands out (`loss_spikes`). A single such step is told and
passed over: its update was left out, or is one among thousands. What stays for `patience` steps, and a loss
that has risen as a whole, is acted upon. The guard only decides; `roll_back` does it.

It sees the loss of all ranks, the same number on each, so all decide alike, and NaN on one rank is NaN for
all. Its state goes with the checkpoints: a run that was killed decides again as it did. A step skipped
because of the loss scale has a finite loss, and is no trouble here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megalowbit.pretrain.components.loss_guard_settings import LossGuardSettings
from megalowbit.pretrain.components.loss_spikes import LossSpikes

KEY = "megalowbit.loss_guard"
Action = Literal["go on", "roll back", "stop"]
NEW_RUN = "megalowbit.model.checkpoint, with a lower learning rate"
ACTS: Mapping[str, Action] = {"rollback": "roll back", "stop": "stop"}  # other policies go on


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done after a step.

    Attributes:
        action: whether to train on, to roll back, or to stop.
        line: what to tell of the step; where it stops the run, with the remedy. `None` is nothing.
        since: where it does not, the first step that was in trouble.
    """

    action: Action = "go on"
    line: str | None = None
    since: int | None = None


class LossGuard:
    """Decides after each step.

    Args:
        settings: the policies.

    Attributes:
        settings: as given.
        rollbacks: those made so far, as `{"after_step", "to_step", "reason"}`.
    """

    def __init__(self, settings: LossGuardSettings) -> None:
        self.settings = settings
        self.rollbacks: list[dict[str, Any]] = []
        self._spikes = LossSpikes(settings)
        self._nonfinite_in_a_row = 0
        self._spikes_in_a_row = 0
        self._since: int | None = None  # first step of trouble that may have to be acted upon

    @property
    def is_calm(self) -> bool:
        """Whether the last step is one to come back to; where it is not, a checkpoint would be no refuge."""
        return self._since is None

    def good_until(self, step: int) -> int | None:
        """The newest step that a rollback may ask for, were the loss found to be in trouble at some time.

        Args:
            step: the last one trained.

        Returns:
            `None` where there are no rollbacks.
        """
        if not self.settings.rolls_back:
            return None
        newest = step if self._since is None else self._since - 1
        return min(newest, self._spikes.low_until) if self.settings.spike == "rollback" else newest

    def after_step(self, step: int, loss: float, *, is_skipped: bool) -> Verdict:
        """Judge a step; call it once for each.

        Args:
            step: its number; the first is 1.
            loss: mean over all ranks; of any kind.
            is_skipped: whether its update was left out.
        """
        verdict = self._judge_finite(step, loss) if math.isfinite(loss) else self._judge_nonfinite(step, loss)
        if math.isfinite(loss) or is_skipped or verdict.line is not None:
            return verdict
        line = f"step {step}: the loss is {loss}, but its gradients were finite and have moved the weights"
        return Verdict(line=line)

    def _judge_nonfinite(self, step: int, loss: float) -> Verdict:
        policy, patience = self.settings.nonfinite, self.settings.patience
        self._nonfinite_in_a_row += 1
        self._spikes_in_a_row = 0
        self._note_trouble(step, is_trouble=policy in ACTS)
        if self._nonfinite_in_a_row < patience:
            return Verdict()
        steps = f"{patience} steps in a row" if patience > 1 else "the step"
        reason = f"step {step}: the loss of {steps} was not finite (the last one is {loss})"
        if policy not in ACTS:
            # once in a row of them: each skipped step has a line of its own
            return Verdict(line=reason if self._nonfinite_in_a_row == patience else None)
        return self._act("nonfinite", reason, self._since or step)

    def _judge_finite(self, step: int, loss: float) -> Verdict:
        policy = self.settings.spike
        self._nonfinite_in_a_row = 0
        if policy == "off":
            self._note_trouble(step, is_trouble=False)
            return Verdict()
        found = self._spikes.add(step, loss)
        is_spike = found.spike is not None
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if is_spike else 0
        self._note_trouble(step, is_trouble=is_spike and policy in ACTS)
        if found.rise is not None:
            reason = f"step {step}: {found.rise}"
            since = min(self._spikes.low_until + 1, self._since or step)
            return self._act("spike", reason, since) if policy in ACTS else Verdict(line=reason)
        if not is_spike:
            return Verdict()
        reason = f"step {step}: {found.spike}"
        if policy in ACTS and self._spikes_in_a_row >= self.settings.patience:
            many = f", as {self._spikes_in_a_row} steps in a row" if self._spikes_in_a_row > 1 else ""
            return self._act("spike", reason + many, self._since or step)
        return Verdict(line=reason if self._spikes_in_a_row == 1 else None)

    def _note_trouble(self, step: int, *, is_trouble: bool) -> None:
        self._since = (self._since or step) if is_trouble else None

    def _act(self, key: str, reason: str, since: int) -> Verdict:
        action = ACTS[getattr(self.settings, key)]
        if action == "stop":
            way_out = f"resume with --set {KEY}.{key}=rollback to leave these data out"
        elif len(self.rollbacks) >= self.settings.max_rollbacks:
            action = "stop"
            way_out = f"{KEY}.max_rollbacks = {self.settings.max_rollbacks} are made: raise it"
        else:
            return Verdict(action=action, line=reason, since=since)
        line = f"{reason}: {way_out}, or start a new run from an earlier checkpoint ({NEW_RUN})"
        return Verdict(action=action, line=line, since=since)

    def newest_refuge(self, since: int) -> int:
        """The newest step to roll back to from trouble that began at `since`.

        Where the run has not got past the trouble that it rolled back from last, what it rolled back to is
        under suspicion too, and an earlier step is asked for.
        """
        last = self.rollbacks[-1] if self.rollbacks else None
        if last is not None and since <= last["after_step"]:
            return min(since, last["to_step"]) - 1
        return since - 1

    def facts(self) -> dict[str, int]:
        """For the records of a step: rollbacks so far, once there are any."""
        return {"rollbacks": len(self.rollbacks)} if self.rollbacks else {}

    def state_dict(self) -> dict[str, Any]:
        """All that decisions rest on, as plain values."""
        return {
            "rollbacks": [dict(each) for each in self.rollbacks],
            "spikes": self._spikes.state_dict(),
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.rollbacks = [dict(each) for each in state["rollbacks"]]
        self._spikes.load_state_dict(state["spikes"])
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._since = None if state["since"] is None else int(state["since"])
