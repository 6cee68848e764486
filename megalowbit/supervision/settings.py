"""Settings of the watchdog: how long a run waits for its ranks. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megalowbit.values import SettingsModel, unit

SHORTEST_TIMEOUT = 5.0  # seconds; below this, a busy machine would look broken
LONGEST_TIMEOUT = 7 * 86400.0  # a week; far above it, timers in libraries overflow
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.5, 5.0  # seconds
HEARTBEATS_IN_A_TIMEOUT = 12
ANSWERS_IN_A_TIMEOUT = 6
HEARTBEATS_IN_A_SILENCE = 6


class WatchdogSettings(SettingsModel):
    """When a run counts as stuck, and which steps count as slow."""

    timeout: Annotated[float, Field(ge=SHORTEST_TIMEOUT, le=LONGEST_TIMEOUT)] | None = Field(
        default=600.0,
        description="longest time that a collective, a step, a load, a save or an export may take. `null`: "
        "torch's own timeouts apply (30 minutes or none), and nothing is watched except a step that does not "
        "end after SIGTERM",
        json_schema_extra=unit("seconds"),
    )
    silence: Annotated[float, Field(ge=3.0, le=LONGEST_TIMEOUT)] | None = Field(
        default=15.0,
        description="a rank without a new heartbeat for this long is lost, even if no collective has failed: "
        "NCCL does not notice that a peer is gone. `null`: only collectives and `timeout` show it",
        json_schema_extra=unit("seconds"),
    )
    slow_step: Annotated[float, Field(gt=1.0)] | None = Field(
        default=10.0,
        description="warn when a step takes more than this many times the median of the last 50 steps. "
        "`null`: never",
        json_schema_extra=unit("× median"),
    )
    # launchers send SIGKILL 30 seconds after SIGTERM
    termination_seconds: Annotated[float, Field(ge=1.0, le=LONGEST_TIMEOUT)] = Field(
        default=20.0,
        description="how long a step may continue after SIGTERM before the process ends without a "
        "checkpoint, and without the store of a killed launcher (then 3 usual steps at least). Set it a few "
        "seconds below the time that the launcher waits before SIGKILL. A save that has begun may take until "
        "`timeout`",
        json_schema_extra=unit("seconds"),
    )
    stop_with_launcher: bool | None = Field(
        default=None,
        description="save and end when the process that launched this one has ended. `null`: true under "
        "torchrun, the DeepSpeed launcher and megalowbit's job scripts, false under a shell. `false`: train "
        "on, under torchrun without the store, so that lost ranks are no longer named",
    )

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a rank."""
        if self.timeout is None:
            return LONGEST_INTERVAL
        wished = self.timeout / HEARTBEATS_IN_A_TIMEOUT
        if self.silence is not None:
            wished = min(wished, self.silence / HEARTBEATS_IN_A_SILENCE)
        return min(max(wished, SHORTEST_INTERVAL), LONGEST_INTERVAL)

    @property
    def seconds_to_answer(self) -> float:
        """How long the store, or a rank on a busy machine, may take to answer before it counts as lost.

        It does not depend on `silence`: frequent heartbeats do not make a busy machine faster. It is at least
        twice the heartbeat interval.
        """
        longest = 2 * LONGEST_INTERVAL
        if self.timeout is None:
            return longest
        return min(max(self.timeout / ANSWERS_IN_A_TIMEOUT, 2 * SHORTEST_INTERVAL), longest)
