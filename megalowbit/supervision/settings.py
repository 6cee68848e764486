"""Settings of the watchdog: how long a run waits for its ranks. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megalowbit.values import SettingsModel

SHORTEST_TIMEOUT = 5.0  # seconds; below this, a busy machine would look broken
LONGEST_TIMEOUT = 7 * 86400.0  # a week; far above it, timers in libraries overflow
SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.5, 5.0  # seconds
HEARTBEATS_IN_A_TIMEOUT = 12


class WatchdogSettings(SettingsModel):
    """`"watchdog"`: when a run counts as stuck, and which steps count as slow.

    Attributes:
        timeout: seconds that a collective may take, and that may pass without a step, a load, a save or an
            export coming to its end; None: torch's own timeouts (30 minutes or none), and nothing is watched.
        slow_step: warn when a step takes more than so many times the median of the last 50; None: never.
        termination_seconds: that a step may go on after SIGTERM, before the process ends without a
            checkpoint; a few less than whoever sent it waits until SIGKILL. A save has until `timeout`.
        stop_with_launcher: save and end when the launcher of this process has ended; None: where there is
            one (torchrun, the DeepSpeed launcher) or a job script of ours, and not under a shell.
    """

    timeout: Annotated[float, Field(ge=SHORTEST_TIMEOUT, le=LONGEST_TIMEOUT)] | None = 600.0
    slow_step: Annotated[float, Field(gt=1.0)] | None = 10.0
    # launchers kill after 30
    termination_seconds: Annotated[float, Field(ge=1.0, le=LONGEST_TIMEOUT)] = 20.0
    stop_with_launcher: bool | None = None

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a rank."""
        if self.timeout is None:
            return LONGEST_INTERVAL
        return min(max(self.timeout / HEARTBEATS_IN_A_TIMEOUT, SHORTEST_INTERVAL), LONGEST_INTERVAL)
