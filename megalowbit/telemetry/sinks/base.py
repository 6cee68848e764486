"""The base class of sinks: a sink overrides what it records and ignores the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Medium

if TYPE_CHECKING:  # it imports torch, and configurations are read without
    from megalowbit.telemetry.overflow.counters import LayerOverflow


class Sink:
    """Receives the facts of each step, in ascending order, and sometimes more; each hook does nothing."""

    def write(self, step: int, facts: Facts) -> None:
        """Record the facts of `step`."""

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Record the table by layer after `step`; the facts of the step are written first."""

    def write_media(self, step: int, media: Sequence[Medium]) -> None:
        """Record histograms and texts of `step`; the facts of the step are written first."""

    def write_files(self, paths: Sequence[Path]) -> None:
        """Keep files that describe the whole run; called at its end, before `close`."""

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Finish: `exit_code` is the run's, `summary` its final facts, for sinks that store them."""
