"""The settings of the loss guard: what a run does about a loss that is not finite, stands out or rises.

Not covered: how a loss that stands out is found; see `loss_guard`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megalowbit.values import SettingsModel

SHORTEST_WINDOW = 32  # losses; a spread found from fewer is no measure of anything


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
        ge=SHORTEST_WINDOW,
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
