"""Facts to trackio, Hugging Face's tracker with W&B's interface and a local SQLite database.

`trackio show --project PROJECT` displays them. The database is in trackio's folder, `TRACKIO_DIR` or
`~/.cache/huggingface/trackio`; nothing leaves the machine unless `space_id` names a Space.

trackio finds a run by its name, so names get an id from `<run_dir>/trackio/run_id`: a resumed run continues
its own curves, and two folders of one name do not share them. Steps that were logged before are left out,
which a resumed run repeats; trackio would keep both.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megalowbit.errors import UserError
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Histogram
from megalowbit.telemetry.settings import TrackioSettings
from megalowbit.telemetry.sinks.hosted import COLUMNS, HostedSink, kept_id

SUMMARY = "summary/"  # prefix of the final figures, which trackio has no other place for


class TrackioSink(HostedSink):
    """Logs to one trackio run.

    Args:
        run_dir: the run's folder; the id of the run in trackio is stored in its `trackio/`.
        settings: project, group and Space.
        run_name: name of the run, before its id.
        config: resolved configuration, shown in trackio.

    Raises:
        UserError: the package `trackio` is not installed.
    """

    tracker = "trackio"

    def __init__(
        self,
        run_dir: Path,
        settings: TrackioSettings,
        *,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        try:
            with redirect_stdout(io.StringIO()):
                import trackio
        except ImportError as error:
            raise UserError(
                "megalowbit.trackio is enabled but trackio is not installed: pip install "
                "'megalowbit[trackio]', or set megalowbit.trackio.enabled=false"
            ) from error
        self._trackio = trackio
        self._logged_before = -1  # the last step of earlier parts of the run

        def start() -> None:
            run_id = kept_id(run_dir / "trackio" / "run_id")
            self._run = self._trackio.init(
                project=settings.project,
                name=f"{run_name or run_dir.name}-{run_id}",
                group=settings.group,
                space_id=settings.space_id,
                config=dict(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            self._logged_before = self._run._next_step - 1

        self._attempt(start)

    def _attempt(self, action: Callable[[], None]) -> None:
        with redirect_stdout(io.StringIO()):  # it prints instructions at its start and its end
            super()._attempt(action)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if step > self._logged_before:
            self._run.log(values, step=step)

    def _histogram(self, histogram: Histogram) -> Any:
        return self._trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))

    def _table(self, rows: list[list[Any]]) -> Any:
        return self._trackio.Table(columns=list(COLUMNS), data=rows)

    def _keep(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=f"{path.stem}-{self._run.id[:8]}", type=path.stem)

    def _finish(self, exit_code: int, summary: Facts) -> None:
        final = {**summary, **({"exit_code": exit_code} if summary or exit_code else {})}
        if final:
            last = max(self._run._next_step - 1, 0)
            self._run.log({f"{SUMMARY}{name}": value for name, value in final.items()}, step=last)
        self._trackio.finish()  # not the run's: trackio would finish it once more at exit, and print so
