"""`lr_schedule` of the configuration: the factor of the learning rate at each step.

A schedule is one settings class with one function, and a line in `Schedule`. Steps are counted from 0, and
only applied steps count. A warm-up is linear and begins at 1 / `warmup_steps` instead of 0, because a first
step with a rate of 0 trains nothing. A decay reaches `min_lr_ratio` one step after the last step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from megalowbit.values import BY_TYPE, SettingsModel, is_count, models_by_type, unit

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class ScheduleSettings(SettingsModel):
    """Base of all schedules."""

    type: str
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="the rate rises linearly to the optimizer's over this many steps. 0: no warm-up",
        json_schema_extra=unit("applied steps"),
    )

    def factor(self, step: int) -> float:
        """The factor of the learning rate at step `step`, in [0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._factor_after_warmup(step - self.warmup_steps)

    @abstractmethod
    def _factor_after_warmup(self, step: int) -> float:
        """The factor after the warm-up; `step` is counted from its end."""


class ConstantSchedule(ScheduleSettings):
    """Warm-up, then the optimizer's rate."""

    type: Literal["constant"] = "constant"

    def _factor_after_warmup(self, step: int) -> float:  # noqa: ARG002
        return 1.0


class InverseSqrtSchedule(ScheduleSettings):
    """Warm-up, then √(timescale / (timescale + steps since the warm-up)), without an end."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: Count | None = Field(
        default=None,
        description="steps after the warm-up until the rate has fallen by a factor √2. `null`: "
        "`warmup_steps`, or 10 000 without a warm-up",
        json_schema_extra=unit("applied steps"),
    )

    def _factor_after_warmup(self, step: int) -> float:
        timescale = self.timescale or self.warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + step))


class EndingSchedule(ScheduleSettings):
    """Base of the schedules that end."""

    # "auto" is filled in before validation, see `fill_lr_schedule`
    total_steps: Count = Field(
        description='length of the schedule, warm-up included. `"auto"`: the steps of the run, but at least '
        "`warmup_steps`: a shorter run ends during the warm-up",
        json_schema_extra=unit("applied steps") | {"shown_default": '`"auto"`'},
    )
    min_lr_ratio: Share = Field(default=0.0, description="the factor from `total_steps` on")

    @model_validator(mode="after")
    def _phases_fit_into_total_steps(self) -> EndingSchedule:
        needed = self._steps_needed()
        if needed > self.total_steps:
            raise ValueError(f"its phases take {needed} steps of {self.total_steps}: shorten them")
        return self

    def _steps_needed(self) -> int:
        return self.warmup_steps

    def _between(self, share: float) -> float:
        """Interpolate between `min_lr_ratio` (`share` = 0) and 1 (`share` = 1)."""
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share

    def _progress(self, step: int) -> float:
        """Completed fraction of a decay that takes all steps after the warm-up."""
        num_steps = self.total_steps - self.warmup_steps
        return min(1.0, step / num_steps) if num_steps else 1.0


class LinearSchedule(EndingSchedule):
    """Warm-up, then linear decay."""

    type: Literal["linear"] = "linear"

    def _factor_after_warmup(self, step: int) -> float:
        return self._between(1.0 - self._progress(step))


class CosineSchedule(EndingSchedule):
    """Warm-up, then decay on half a cosine wave."""

    type: Literal["cosine"] = "cosine"

    def _factor_after_warmup(self, step: int) -> float:
        return self._between(0.5 * (1.0 + math.cos(math.pi * self._progress(step))))


class WSDSchedule(EndingSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395).

    `total_steps` and `decay_steps` may change on resume, which gives a checkpoint of the stable phase another
    end.
    """

    type: Literal["wsd"] = "wsd"
    decay_steps: Count = Field(
        description="length of the decay, at the end of `total_steps`",
        json_schema_extra=unit("applied steps"),
    )
    decay: Literal["linear", "cosine", "sqrt"] = Field(
        default="linear",
        description="shape of the decay; `sqrt` is 1 − √progress (Hägele et al. 2024, arXiv:2405.18392)",
    )

    def _steps_needed(self) -> int:
        return self.warmup_steps + self.decay_steps

    def _factor_after_warmup(self, step: int) -> float:
        start = self.total_steps - self.warmup_steps - self.decay_steps
        progress = min(1.0, max(0, step - start) / self.decay_steps)
        shares = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "sqrt": 1.0 - math.sqrt(progress),
        }
        return self._between(shares[self.decay])


Schedule = (
    Annotated[ConstantSchedule, Tag("constant")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[CosineSchedule, Tag("cosine")]
    | Annotated[WSDSchedule, Tag("wsd")]
    | Annotated[InverseSqrtSchedule, Tag("inverse_sqrt")]
)
AnySchedule = Annotated[Schedule, BY_TYPE]
SCHEDULES: dict[str, type[ScheduleSettings]] = models_by_type(Schedule)


def needs_total_steps(section: dict[str, Any]) -> bool:
    """Whether the section of a schedule leaves its `total_steps` to the run."""
    kind = section.get("type")
    schedule = SCHEDULES.get(kind) if isinstance(kind, str) else None
    if schedule is None or "total_steps" not in schedule.model_fields:
        return False
    return section.get("total_steps") in (None, "auto")


def auto_total_steps(section: dict[str, Any], run_steps: int) -> int:
    """The value of `"auto"`: the run's steps, or the warm-up's if those are more."""
    warmup_steps: Any = section.get("warmup_steps")
    # "wsd" would leave out its decay, so it needs a run that is long enough
    if section["type"] == "wsd" or not is_count(warmup_steps, least=0):
        return run_steps
    return max(run_steps, int(warmup_steps))
