"""Settings of `megalowbit.telemetry`, `megalowbit.trackio` and DeepSpeed's blocks `tensorboard` and `wandb`.

The training loop reads both DeepSpeed blocks, with their names, places and defaults, and writes the events
itself: DeepSpeed's events lack saturation and are indexed by samples. It does not pass the blocks on to
DeepSpeed, which would write every curve a second time. Imported without torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megalowbit.values import SettingsModel, unit

BAR, RICH, PLAIN = "bar", "rich", "plain"
UIS = (BAR, RICH, PLAIN)  # what a terminal shows: `--ui`
HELP_OF_UI = (
    "what a terminal shows below the lines of the log: a progress bar (the default), a dashboard (rich), or "
    "nothing (plain). Files and pipes get plain lines"
)


class TelemetrySettings(SettingsModel):
    """What a run records, and how often."""

    log_every: int = Field(
        default=10,
        ge=1,
        description="interval between lines of the log. Skipped steps and the last step always get a line",
        json_schema_extra=unit("steps"),
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard event files into the run folder")
    former_names: bool = Field(
        default=True,
        description="also write metrics to TensorBoard and W&B under their names in `metrics.jsonl`, as "
        "earlier versions did. The next release will not",
    )
    overflow: bool = Field(
        default=True,
        description="count saturated elements, underflow and rounding error of every quantised operand",
    )
    count_every: int = Field(
        default=10,
        ge=1,
        description="interval between steps in which they are counted: step 1 and each multiple. In other "
        "steps kernels do not count, and the figures are left out. 1: every step",
        json_schema_extra=unit("steps"),
    )
    layers_every: int = Field(
        default=100,
        ge=0,
        description="interval between tables by layer (`overflow_layers.jsonl`, TensorBoard, W&B). The end "
        "of the run always writes one; 0: only the end",
        json_schema_extra=unit("steps"),
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="peak of one device, the divisor of MFU. `null`: the vendor's dense figure in the run's "
        "`precision`; without one, there is no MFU",
        json_schema_extra=unit("TFLOP/s"),
    )
    timers: bool = Field(
        default=False,
        description="measure the phases of the optimizer step (`milliseconds/…`), without synchronising the "
        "device",
    )


class TensorBoardBlock(SettingsModel):
    """DeepSpeed's top-level block, with DeepSpeed's defaults.

    It chooses the folder of the event files. To turn them off, set `megalowbit.telemetry.tensorboard`.
    """

    enabled: bool = Field(default=False, description="write event files below `output_path`")
    output_path: str = Field(default="", description="parent folder. Empty: the run folder is used")
    job_name: str = Field(default="DeepSpeedJobName", description="folder below `output_path`")

    def folder(self, default: Path) -> Path:
        """Folder of the event files: `output_path/job_name`, as in DeepSpeed, or `default` without a path."""
        return Path(self.output_path) / self.job_name if self.enabled and self.output_path else default


class WandbSettings(SettingsModel):
    """DeepSpeed's top-level block, with DeepSpeed's defaults.

    There is no key `mode`: the variable `WANDB_MODE` sets it. Without that variable and without an API key
    the run is recorded offline.
    """

    enabled: bool = Field(default=False, description="send the metrics to Weights & Biases")
    project: str = Field(default="deepspeed", description="the W&B project")
    group: str | None = Field(default=None, description="the W&B group of the run")
    team: str | None = Field(default=None, description="the W&B team (entity)")


class TrackioSettings(SettingsModel):
    """Whether and where trackio records the run.

    The database is in trackio's folder: the variable `TRACKIO_DIR`, or `~/.cache/huggingface/trackio`.
    """

    enabled: bool = Field(default=False, description="record the metrics with trackio")
    project: str = Field(
        default="megalowbit",
        min_length=1,
        description="the trackio project: `trackio show --project megalowbit` displays it",
    )
    group: str | None = Field(default=None, description="the trackio group of the run")
    space_id: str | None = Field(
        default=None,
        description="a Hugging Face Space to send the metrics to, `user/name`. `null`: a local database",
    )
