"""The `megalowbit.telemetry` section of the configuration, and what DeepSpeed's monitor blocks mean to us.

DeepSpeed documents two top-level blocks, `tensorboard` {enabled, output_path, job_name} and `wandb` {enabled,
project, group, team}. They keep their names, places and defaults; the loop reads them into `TensorBoardBlock`
and `WandbSettings` and writes the events itself, because the engine's own events know nothing of overflow and
are indexed by samples. Neither block is handed on, or every curve would be drawn twice.

This module imports pydantic only, so that a configuration is checked without loading torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megalowbit.values import SettingsModel


class TelemetrySettings(SettingsModel):
    """What a run records, and how often.

    Attributes:
        log_every: steps between two lines in a log; skipped steps and the last one always get a line.
        tensorboard: write TensorBoard event files into the run's folder.
        overflow: count saturation, underflow and rounding error of every quantised operand.
        layers_every: steps between two tables by layer (`overflow_layers.jsonl`, TensorBoard, W&B); the end
        always gets one, 0: only the end.
        timers: measure the phases of the optimizer's step, without stopping the device.
    """

    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = True
    overflow: bool = True
    layers_every: int = Field(default=100, ge=0)
    timers: bool = False


class TensorBoardBlock(SettingsModel):
    """DeepSpeed's top-level `tensorboard` block, with DeepSpeed's defaults."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"

    def folder(self, default: Path) -> Path:
        """Folder of the event files: `output_path/job_name` as DeepSpeed does, `default` without a path."""
        return Path(self.output_path) / self.job_name if self.enabled and self.output_path else default


class WandbSettings(SettingsModel):
    """DeepSpeed's top-level `wandb` block, with DeepSpeed's defaults.

    There is no `mode`: `WANDB_MODE` decides, and where neither it nor an API key is set a run is kept
    offline.
    """

    enabled: bool = False
    project: str = "deepspeed"
    group: str | None = None
    team: str | None = None
