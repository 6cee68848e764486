"""`"lr_schedule"` of the configuration: the factor of the learning rate at each step.

A schedule is one settings class with one function, and its line in `Schedule`. Steps are counted from 0, and
only applied steps count. A warm-up is linear and begins at 1 / `warmup_steps` instead of 0, because a first
step at 0 trains nothing. A decay would reach `min_lr_ratio` at the step after the last one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from megalowbit.values import BY_TYPE, SettingsModel, models_by_type

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class ScheduleSettings(SettingsModel):
    """Base of all schedules.

    Attributes:
        warmup_steps: in which the rate rises linearly to that of the optimizer; 0: none.
    """

    type: str
    warmup_steps: Annotated[int, Field(ge=0)] = 0

    def factor(self, step: int) -> float:
        """The factor of the learning rate at step number `step`, in [0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._factor_after_warmup(step - self.warmup_steps)

    @abstractmethod
    def _factor_after_warmup(self, step: int) -> float:
        """The factor at a step counted from the end of the warm-up."""


class ConstantSchedule(ScheduleSettings):
    """`{"type": "constant"}`: warm-up, then the optimizer's rate."""

    type: Literal["constant"] = "constant"

    def _factor_after_warmup(self, step: int) -> float:  # noqa: ARG002
        return 1.0


class InverseSqrtSchedule(ScheduleSettings):
    """`{"type": "inverse_sqrt"}`: warm-up, then √(timescale / (timescale + step)), without an end.

    Attributes:
        timescale: steps after which the rate has fallen by √2; by default `warmup_steps`, or 10 000 without.
    """

    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: Count | None = None

    def _factor_after_warmup(self, step: int) -> float:
        timescale = self.timescale or self.warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + step))


class EndingSchedule(ScheduleSettings):
    """Base of the schedules that end.

    Attributes:
        total_steps: of the schedule, warm-up included; "auto", the default, is filled in with the run's.
        min_lr_ratio: the factor from `total_steps` on.
    """

    total_steps: Count
    min_lr_ratio: Share = 0.0

    @model_validator(mode="after")
    def _fits_into_the_total(self) -> EndingSchedule:
        needed = self._steps_needed()
        if needed > self.total_steps:
            raise ValueError(f"its phases take {needed} steps of {self.total_steps}: shorten them")
        return self

    def _steps_needed(self) -> int:
        return self.warmup_steps

    def _between(self, share: float) -> float:
        """Interpolate: `min_lr_ratio` if `share` is 0, 1 if it is 1."""
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share

    def _progress(self, step: int) -> float:
        """The completed part of the decay, in [0, 1]; the decay takes all steps after the warm-up."""
        num_steps = self.total_steps - self.warmup_steps
        return min(1.0, step / num_steps) if num_steps else 1.0


class LinearSchedule(EndingSchedule):
    """`{"type": "linear"}`: warm-up, then down on a line."""

    type: Literal["linear"] = "linear"

    def _factor_after_warmup(self, step: int) -> float:
        return self._between(1.0 - self._progress(step))


class CosineSchedule(EndingSchedule):
    """`{"type": "cosine"}`: warm-up, then down on half a cosine wave."""

    type: Literal["cosine"] = "cosine"

    def _factor_after_warmup(self, step: int) -> float:
        return self._between(0.5 * (1.0 + math.cos(math.pi * self._progress(step))))


class WSDSchedule(EndingSchedule):
    """`{"type": "wsd"}`: warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395).

    A checkpoint from the stable phase can be continued with another end: `total_steps` and `decay_steps` may
    change on resume.

    Attributes:
        decay_steps: the last steps of `total_steps`, in which the rate falls.
        decay: its shape; "sqrt" is 1 − √progress (Hägele et al. 2024, arXiv:2405.18392).
    """

    type: Literal["wsd"] = "wsd"
    decay_steps: Count
    decay: Literal["linear", "cosine", "sqrt"] = "linear"

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


def wants_total_steps(section: dict[str, Any]) -> bool:
    """Whether a schedule, as written in the configuration, takes its `total_steps` from the run."""
    kind = section.get("type")
    schedule = SCHEDULES.get(kind) if isinstance(kind, str) else None
    if schedule is None or "total_steps" not in schedule.model_fields:
        return False
    return section.get("total_steps") in (None, "auto")
