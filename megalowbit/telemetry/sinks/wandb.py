"""Facts to Weights & Biases, which must never stop a training run.

If anything fails after its import (no network, no login, a full disk, a killed service), one warning is
logged and the sink is off. Without `WANDB_MODE`, an API key or a netrc entry, the run is stored offline in
`<run_dir>/wandb/`, for `wandb sync`. W&B never prompts for a login in the middle of a job.

The run's id is in `<run_dir>/wandb/run_id`, so a resumed run continues the same curves. W&B ignores steps
that it has already received, which are the steps a resumed run repeats.
"""

from __future__ import annotations

import netrc
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from megalowbit.durable_files import atomic_file
from megalowbit.errors import UserError
from megalowbit.json_text import read_text
from megalowbit.telemetry.facts import Facts
from megalowbit.telemetry.overflow.counters import LayerOverflow
from megalowbit.telemetry.settings import WandbSettings

INIT_SECONDS = 60  # longest wait for the server before training goes on without


class WandbSink:
    """Logs to one W&B run.

    Args:
        run_dir: the run's folder; files are stored in its `wandb/`.
        settings: project, group and team.
        run_name: name of the run in W&B.
        config: resolved configuration, shown in W&B.

    Raises:
        UserError: the package `wandb` is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: WandbSettings,
        *,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "the wandb block is enabled but wandb is not installed: pip install 'megalowbit[wandb]', "
                "or set wandb.enabled=false"
            ) from error
        self._run: Any = None

        def start() -> None:
            self._run = wandb.init(
                dir=str(run_dir),
                project=settings.project,
                group=settings.group,
                entity=settings.team,
                name=run_name,
                id=_run_id(run_dir / "wandb" / "run_id"),
                resume="allow",
                mode=_mode(),
                config=dict(config or {}),
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS),
            )

        self._attempt(start)

    @property
    def is_on(self) -> bool:
        """Whether facts still reach W&B."""
        return self._run is not None

    def write(self, step: int, facts: Facts) -> None:
        """Log every known fact under `step`."""
        if self.is_on:
            known = {name: value for name, value in facts.items() if value is not None}
            self._attempt(lambda: self._run.log(known, step=step))

    def write_layers(self, step: int, layers: Sequence[LayerOverflow]) -> None:
        """Log the curves of every layer and role under `step`."""
        self.write(step, {name: value for row in layers for name, value in row.facts().items()})

    def close(self, exit_code: int = 0, summary: Facts | None = None) -> None:
        """Store the summary and finish the run; a non-zero `exit_code` marks it as failed."""
        if not self.is_on:
            return

        def finish() -> None:
            self._run.summary.update(
                {name: value for name, value in (summary or {}).items() if value is not None}
            )
            self._run.finish(exit_code=exit_code)

        self._attempt(finish)
        self._run = None

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # anything at all: curves elsewhere are not worth a training run
            self._run = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"W&B failed and is off for the rest of this run ({reason}); metrics.jsonl has everything",
                RuntimeWarning,
                stacklevel=3,
            )


def _run_id(path: Path) -> str:
    """The id in `path`, written there first for a new run."""
    if path.exists() and (run_id := read_text(path).strip()):
        return run_id
    run_id = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(run_id + "\n")
    return run_id


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
