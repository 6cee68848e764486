"""Facts to Weights & Biases.

Without `WANDB_MODE`, an API key or a netrc entry, the run is stored offline in `<run_dir>/wandb/`, for `wandb
sync`. W&B never prompts for a login in the middle of a job.

The run's id is in `<run_dir>/wandb/run_id`, so a resumed run continues the same curves. W&B ignores steps
that it has already received, which are the steps a resumed run repeats.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from megalowbit.errors import UserError
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.media import Histogram
from megalowbit.telemetry.settings import WandbSettings
from megalowbit.telemetry.sinks.hosted import COLUMNS, HostedSink, kept_id

INIT_SECONDS = 60  # longest wait for the server before training goes on without


class WandbSink(HostedSink):
    """Logs to one W&B run.

    Args:
        run_dir: the run's folder; files are stored in its `wandb/`.
        settings: project, group and team.
        run_name: name of the run in W&B.
        config: resolved configuration, shown in W&B.
        with_former_names: also log metrics by their names in `metrics.jsonl`.

    Raises:
        UserError: the package `wandb` is not installed.
    """

    tracker = "W&B"

    def __init__(
        self,
        run_dir: Path,
        settings: WandbSettings,
        *,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        with_former_names: bool = False,
    ) -> None:
        super().__init__(with_former_names=with_former_names)
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "the wandb block is enabled but wandb is not installed: pip install 'megalowbit[wandb]', "
                "or set wandb.enabled=false"
            ) from error
        self._wandb = wandb

        def start() -> None:
            self._run = wandb.init(
                dir=str(run_dir),
                project=settings.project,
                group=settings.group,
                entity=settings.team,
                name=run_name,
                id=kept_id(run_dir / "wandb" / "run_id"),
                resume="allow",
                mode=_mode(),
                config=dict(config or {}),
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS),
            )

        self._attempt(start)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def _histogram(self, histogram: Histogram) -> Any:
        return self._wandb.Histogram(np_histogram=(list(histogram.counts), list(histogram.edges)))

    def _table(self, rows: list[list[Any]]) -> Any:
        return self._wandb.Table(columns=list(COLUMNS), data=rows)

    def _keep(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{path.stem}-{self._run.id}", type=path.stem)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _finish(self, exit_code: int, summary: Facts) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=exit_code)


def _mode() -> Any:
    """`WANDB_MODE` if the user set it; W&B's own choice (`None`) with an account; offline without."""
    # read here, for W&B itself keeps what it found when it was first imported
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return None if os.environ.get("WANDB_API_KEY") or _has_netrc_entry() else "offline"


def _has_netrc_entry() -> bool:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
