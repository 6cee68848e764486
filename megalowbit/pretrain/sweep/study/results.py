"""The result of a cell: its type, its losses as means of short blocks, and what it was made with.

A run records the loss of every step. Results that are kept in a repository hold means of blocks of at most
25 steps instead, from which the mean of every window can be computed that ends at a multiple of a block, and
a SHA-256 over all losses, which shows whether a repeated run has the same bits. Reports use these means also
where all losses are there, so that a report from kept results has the same numbers.

Files are validated, because a damaged one would otherwise end a report with a traceback, or enter a mean.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megalowbit.errors import UserError
from megalowbit.processor import cpu_name, cpu_units

LONGEST_BLOCK = 25  # steps: a curve of 1,500 steps has 60 points
DIGITS = 9  # of a mean, after the point; float32 has fewer
CPU_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # limit the instructions that are used
GPU_UNITS = "gpu"  # in the place of a CPU's instructions: the name of a GPU has one kind
# Their numbers may change with a version: initial weights, order of data, arithmetic.
VERSIONS = ("torch", "transformers", "numpy", "deepspeed")

# how pydantic calls them in the place of an error
LOSS_TYPES = ("LossMeans", "list[nullable[constrained-float]]")

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
LARGEST_LOSS = (2 - 2**-23) * 2.0**127  # of float32, in which losses are computed
Loss = Annotated[float, Field(ge=0, le=LARGEST_LOSS)]


class Recorded(BaseModel):
    """Base of what is read from results: frozen and strictly typed. Unknown keys are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class LossMeans(Recorded):
    """The training losses of a run.

    Attributes:
        block: number of steps in a mean.
        steps: number of steps that were recorded.
        means: of each block, over its finite losses; None without any. The last block may be shorter.
        lost: steps whose loss was not finite.
        sha256: of the losses of all steps as little-endian float64.
    """

    block: int = Field(ge=1)
    steps: Count
    means: list[Loss | None]
    lost: list[int]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> LossMeans:
        """A mean for each block, missing exactly where all steps of the block are lost."""
        if self.lost != sorted(set(self.lost)) or not all(1 <= step <= self.steps for step in self.lost):
            raise ValueError("lost is no ascending list of steps")
        if len(self.means) != -(-self.steps // self.block):
            raise ValueError("means are not those of the blocks")
        num_lost = Counter((step - 1) // self.block for step in self.lost)
        sizes = [min(self.block, self.steps - start) for start in range(0, self.steps, self.block)]
        has_mean = [num_lost[number] < size for number, size in enumerate(sizes)]
        if [mean is not None for mean in self.means] != has_mean:
            raise ValueError("means are not those of the blocks")
        return self

    @classmethod
    def of(cls, losses: Sequence[float | None], block: int) -> LossMeans:
        """The means of the losses of all steps; None is a loss that was not finite."""
        pieces = [losses[start : start + block] for start in range(0, len(losses), block)]
        raw = struct.pack(f"<{len(losses)}d", *(math.nan if loss is None else loss for loss in losses))
        return cls(
            block=block,
            steps=len(losses),
            means=[_mean([loss for loss in piece if loss is not None]) for piece in pieces],
            lost=[step for step, loss in enumerate(losses, start=1) if loss is None],
            sha256=hashlib.sha256(raw).hexdigest(),
        )

    def mean_to(self, step: int, window: int) -> float:
        """Mean of the finite losses of the `window` steps that end with `step`; NaN if there is none.

        Args:
            step: a multiple of `block`.
            window: a multiple of `block`; the first window may begin before the run.
        """
        if step % self.block or window % self.block:
            raise ValueError(f"step and window must be multiples of {self.block}: {step}, {window}")
        if step > self.steps:
            return math.nan
        total, count = 0.0, 0
        for number in range(max(0, step - window) // self.block, step // self.block):
            mean, start = self.means[number], number * self.block
            if mean is not None:
                finite = self.block - sum(start < each <= start + self.block for each in self.lost)
                total, count = total + mean * finite, count + finite
        return total / count if count else math.nan


class Heldout(Recorded):
    """Held-out losses; None: not finite."""

    bf16: Loss | None
    own: Loss | None
    tokens: Count


class Cost(Recorded):
    """What the last part of a run took, or all parts that were not killed."""

    wall_seconds: Seconds
    cpu_seconds: Seconds
    steps: Count = Field(description="that these seconds were for")
    seconds_of_steps: Seconds
    threads: Count


class Origin(Recorded):
    """What a result was made with."""

    commit: str | None
    python: str
    torch: str
    transformers: str
    numpy: str | None = None  # these two were recorded later
    deepspeed: str | None = None
    machine: str
    processor: str
    # the CPU's instructions for products, and what limits them, or `GPU_UNITS`; recorded later
    units: str | None = None
    gemm: Literal["bf16", "fp32"] | None = None  # of bf16 models on a CPU; recorded later
    command: list[str]

    def place(self) -> str:
        """What it was computed on, and how that multiplies."""
        units = "" if self.units in (None, GPU_UNITS) else f" ({self.units})"
        gemm = "" if self.gemm is None else f", GEMMs in {self.gemm}"
        return f"{self.processor or self.machine}{units}{gemm}"

    def same_place(self, other: Origin) -> bool | None:
        """Whether both were multiplied alike: if not, they differ in the last bits.

        None: one or both have not recorded their instructions, and nothing else differs. Processors of one
        name have several kinds.
        """
        if self.processor != other.processor or (self.gemm != other.gemm and self.gemm and other.gemm):
            return False
        if self.units is None or other.units is None:
            return None
        # earlier, the dtype was only recorded for low-bit recipes; others multiplied in bf16
        return self.units == other.units and (self.gemm or "bf16") == (other.gemm or "bf16")

    def other_version(self, other: Origin) -> tuple[str, str, str] | None:
        """The first of `other_versions`; None if there is none."""
        return next(iter(self.other_versions(other)), None)

    def other_versions(self, other: Origin) -> list[tuple[str, str, str]]:
        """The packages of other versions on which results depend, and both versions.

        The part after `+`, which tells builds for CPU and GPU apart, is left out. Versions that one of both
        has not recorded are not compared.
        """
        found = []
        for name in VERSIONS:
            own, theirs = ((getattr(each, name) or "").partition("+")[0] for each in (self, other))
            if own and theirs and own != theirs:
                found.append((name, own, theirs))
        return found


class CellSettings(Recorded):
    """Everything on which a result depends, except the code and the machine."""

    cell: dict[str, Any]
    config: dict[str, Any]
    model: dict[str, Any] | None
    text: dict[str, str]
    files: dict[str, str] = Field(default_factory=dict)  # recorded later, as the fields of the recipe
    recipe: dict[str, Any] | None = None


class Result(Recorded):
    """The result of a finished cell."""

    settings: CellSettings
    losses: list[Loss | None] | LossMeans
    tokens: Count
    skipped_steps: Count
    diverged_at: int | None
    heldout: Heldout | None
    cost: Cost
    made_with: Origin

    def loss_means(self, block: int) -> LossMeans:
        """The losses in blocks of that many steps, or of the shorter ones that were kept."""
        return self.losses if isinstance(self.losses, LossMeans) else LossMeans.of(self.losses, block)


def result_of(value: Mapping[str, Any], where: str, remedy: str) -> Result:
    """Validate a result.

    Raises:
        UserError: it is damaged, or was written by another version; begins with `where`, ends with `remedy`.
    """
    wrong = ""
    try:
        found = Result.model_validate(value)
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        wrong = ".".join(str(part) for part in location if part not in LOSS_TYPES)
    if wrong:
        raise UserError(f"{where} is no result of this version ({wrong!r} is missing or damaged): {remedy}")
    return found


def block_of(window: int, marks: Sequence[int], steps: int) -> int:
    """The longest block from which the means of all windows can be computed.

    Args:
        window: number of steps in a window.
        marks: steps at which a window ends.
        steps: length of the run, at whose end another one ends.
    """
    common = math.gcd(window, steps, *(mark for mark in marks if mark < steps))
    return max(each for each in range(1, LONGEST_BLOCK + 1) if common % each == 0)


def made_with(root: Path) -> dict[str, Any]:
    """Commit, versions and machine."""
    import numpy
    import torch
    import transformers

    return {
        "commit": commit(root),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "machine": platform.machine(),
        **_place(),
        "command": command_of(sys.argv, root),
    }


def command_of(arguments: Sequence[str], root: Path) -> list[str]:
    """A command line without the folders of this machine, which say nothing on another.

    Paths inside the repository become relative to it; of other absolute ones the last part is kept.
    """
    found = [Path(arguments[0]).name]
    for each in arguments[1:]:
        path = Path(os.path.normpath(each))
        if path.is_absolute():
            each = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        found.append(each)
    return found


def commit(root: Path) -> str | None:
    """The commit of the code, with `-dirty` if files differ from it; None if `root` is no repository."""
    if not (root / ".git").exists():  # installed, maybe in a folder of someone else's repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _place() -> dict[str, str | None]:
    """What a cell computes on: a GPU's name, or that of the CPU with its best instructions for products."""
    import torch

    from megalowbit.pretrain.checks import this_device

    if this_device().type == "cuda":
        return {"processor": torch.cuda.get_device_name(), "units": GPU_UNITS}
    limits = [f"{name}={os.environ[name]}" for name in CPU_LIMITS if os.environ.get(name)]
    return {"processor": cpu_name(), "units": ", ".join([*(cpu_units() or ["unknown"])[:1], *limits])}


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), DIGITS) if values else None
