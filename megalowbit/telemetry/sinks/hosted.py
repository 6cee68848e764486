"""What sinks of experiment trackers have in common: they must never stop a training run.

If anything fails after the package's import (no network, no login, a full disk, a killed service), one
warning is logged and the sink is off.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalowbit.durable_files import atomic_file
from megalowbit.json_text import read_text
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import (
    SECTION_OF_HISTOGRAMS,
    SECTION_OF_SAMPLES,
    Histogram,
    Medium,
    TextSample,
)
from megalowbit.telemetry.sinks.base import Sink
from megalowbit.telemetry.sinks.names import named

if TYPE_CHECKING:
    from megalowbit.telemetry.overflow.counters import LayerOverflow

COLUMNS = ("number", "prompt", "text")  # of the table of texts


class HostedSink(Sink):
    """Logs to one run of an experiment tracker; subclasses call the tracker.

    Attributes:
        tracker: its name in the warning.
    """

    tracker = ""

    def __init__(self, *, with_former_names: bool = False) -> None:
        self._run: Any = None
        self._with_former = with_former_names

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """Log numbers and what `_histogram` and `_table` made, by name."""
        raise NotImplementedError

    def _histogram(self, histogram: Histogram) -> Any:
        """The tracker's object for a histogram."""
        raise NotImplementedError

    def _table(self, rows: list[list[Any]]) -> Any:
        """The tracker's object for a table with `COLUMNS`."""
        raise NotImplementedError

    def _keep(self, path: Path) -> None:
        """Store a file as an artifact of the run."""
        raise NotImplementedError

    def _finish(self, exit_code: int, summary: Facts) -> None:
        """Store the summary and finish the run."""
        raise NotImplementedError

    @property
    def is_on(self) -> bool:
        """Whether facts still reach the tracker."""
        return self._run is not None

    def write(self, step: int, facts: Facts) -> None:
        """Log every known fact under `step`."""
        self._log_known(step, named(facts, with_former=self._with_former))

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Log the curves of every layer and role under `step`."""
        self._log_known(step, {name: value for row in layers for name, value in row.facts().items()})

    def write_media(self, step: int, media: Sequence[Medium]) -> None:
        """Log histograms by name, and all texts of the step as one table."""

        def log() -> None:
            values = {
                f"{SECTION_OF_HISTOGRAMS}/{each.name}": self._histogram(each)
                for each in media
                if isinstance(each, Histogram)
            }
            rows = [[each.number, each.prompt, each.text] for each in media if isinstance(each, TextSample)]
            if rows:
                values[SECTION_OF_SAMPLES] = self._table(rows)
            self._log(step, values)

        if media and self.is_on:
            self._attempt(log)

    def write_files(self, paths: Sequence[Path]) -> None:
        """Store each file as an artifact."""
        for path in paths:
            if self.is_on:
                self._attempt(lambda path=path: self._keep(path))  # type: ignore[misc]

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Store the summary and finish the run; a non-zero `exit_code` marks it as failed."""
        if not self.is_on:
            return
        known = {name: value for name, value in (summary or {}).items() if value is not None}
        self._attempt(lambda: self._finish(exit_code, known))
        self._run = None

    def _log_known(self, step: int, facts: Facts) -> None:
        if self.is_on:
            known = {name: value for name, value in facts.items() if value is not None}
            self._attempt(lambda: self._log(step, known))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # anything at all: curves elsewhere are not worth a training run
            self._run = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"{self.tracker} failed and is off for the rest of this run ({reason}); metrics.jsonl has "
                "everything",
                RuntimeWarning,
                stacklevel=3,
            )


def kept_id(path: Path) -> str:
    """The id in `path`, made up and written there first for a new run."""
    if path.exists() and (run_id := read_text(path).strip()):
        return run_id
    run_id = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(run_id + "\n")
    return run_id
