"""The profiler: a trace of some steps by PyTorch's profiler, with ranges by phase and by layer.

The files are in `profile/` of the run folder, one set for each profiled rank: a trace for Perfetto or
`chrome://tracing`, a table of the operators that took the most time, and on GPUs a snapshot of the memory
allocator for pytorch.org/memory_viz. On GPUs the ranges are NVTX ranges as well, for Nsight Systems.

The profiler starts one step early if it can, because its own start takes seconds. Profiled steps are slower:
their speeds are in the metrics all the same. A run that is stopped on request writes the steps that it has
profiled; one that ends by an error before the last of them writes nothing.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megalowbit.errors import UserError
from megalowbit.pretrain.components.base import Component, RunParts, RunSettings, Summary
from megalowbit.telemetry.facts import Facts
from megalowbit.values import SettingsModel, unit

if TYPE_CHECKING:
    from torch import nn

KEY = "megalowbit.profile"
FOLDER = "profile"
WARM_UP = 5  # steps of the process before the first profiled one, by default
MAX_MEMORY_EVENTS = 200_000  # allocations and frees in a snapshot; each has a stack
TABLE_ROWS = 50


class ProfileSettings(SettingsModel):
    """Which steps to profile, and what to record of them."""

    first_step: int | None = Field(
        default=None,
        ge=1,
        description=f"first step to profile. `null`: after {WARM_UP} steps of the process",
        json_schema_extra=unit("steps"),
    )
    steps: int = Field(
        default=3, ge=1, description="how many steps to profile", json_schema_extra=unit("steps")
    )
    all_ranks: bool = Field(
        default=False, description="profile every rank, each into its own files; otherwise only rank 0"
    )
    memory: bool = Field(
        default=True, description="also record the GPU's allocations. Without a GPU there is no snapshot"
    )


class Profiler(Component):
    """Profiles some steps of a run.

    Args:
        settings: which steps.
        model: the engine's model.
        block_names: dotted names of the model's blocks.
        folder: the run folder.
        rank: this process's rank.
        total_steps: optimizer steps of the run.
    """

    key = "profile"
    settings_class = ProfileSettings
    description = "profile some steps; off unless set. `--profile` sets it"
    may_change = (KEY, f"{KEY}.*")

    def __init__(
        self,
        settings: ProfileSettings,
        model: nn.Module,
        block_names: Iterable[str],
        *,
        folder: Path,
        rank: int,
        total_steps: int,
    ) -> None:
        self._settings, self._model, self._folder = settings, model, folder / FOLDER
        self._block_names, self._rank, self._total_steps = tuple(block_names), rank, total_steps
        self._first: int | None = None  # the first profiled step; None until the first step of the process
        self._profile: Any = None  # torch's, while it runs
        self._ranges: Any = None
        self._is_done = False
        self._num_profiled = 0

    @classmethod
    def build(cls, settings: ProfileSettings, parts: RunParts) -> Profiler | None:
        """None on ranks that are not profiled."""
        from megalowbit.distributed import process_group
        from megalowbit.families.registry import family

        rank, config = process_group.rank(), parts.engine.module.config
        if rank and not settings.all_ranks:
            return None
        return cls(
            settings,
            parts.engine.module,
            family(config.model_type).block_names(config),
            folder=parts.folder,
            rank=rank,
            total_steps=parts.run.steps,
        )

    @classmethod
    def check(cls, settings: ProfileSettings, run: RunSettings, recipe: object) -> None:
        """Reject steps after the last one of the run."""
        last = (settings.first_step or 1) + settings.steps - 1
        if last > run.steps:
            raise UserError(
                f"{KEY} ends with step {last}, but megalowbit.run.steps is {run.steps}: lower "
                f"{KEY}.first_step or {KEY}.steps, or raise megalowbit.run.steps"
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range around a phase of a step, such as `"forward"`, if this step is profiled."""
        if self._ranges is None:
            yield
            return
        from megalowbit.telemetry.ranges import time_range

        with time_range(name):
            yield

    def before_step(self, step: int) -> str | None:
        """Start the profiler one step early, and the ranges with the first profiled step."""
        if self._is_done:
            return None
        line = self._choose_first(step) if self._first is None else None
        assert self._first is not None  # chosen above
        if self._profile is None and not self._is_done and step + 2 >= self._first:
            self._start(warm_up=int(step + 1 < self._first))
        if self._profile is not None and self._ranges is None and step + 1 >= self._first:
            self._attach()
        return line

    def count(self, steps: range) -> int:
        """How many of these steps are profiled, once the process has begun its first one."""
        if self._first is None:
            return 0
        first, after = max(steps.start, self._first), min(steps.stop, self._first + self._settings.steps)
        return max(0, after - first)

    def _choose_first(self, step: int) -> str | None:
        """Choose the first profiled step; a line if it has been trained in an earlier part of the run."""
        settings = self._settings
        latest = max(self._total_steps - settings.steps, step)
        self._first = settings.first_step or min(step + WARM_UP, latest) + 1
        if self._first > step:
            return None
        self._is_done = True
        return (
            f"profile   none: step {self._first} was trained before this run was resumed after step {step}; "
            f"set {KEY}.first_step to a later one"
        )

    def _start(self, warm_up: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warm_up, active=self._settings.steps, repeat=1),
            record_shapes=True,
            acc_events=True,
        )
        self._profile.start()
        atexit.register(self._profile.stop)  # torch crashes at the end of a process that still profiles

    def _attach(self) -> None:
        import torch

        from megalowbit.telemetry.ranges import LayerRanges

        blocks, layers = named_ranges(self._model, self._block_names)
        self._ranges = LayerRanges(blocks, layers)
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    @property
    def _has_memory(self) -> bool:
        import torch

        return self._settings.memory and torch.cuda.is_available()

    def after_step(self, step: int, facts: Facts) -> Iterable[str]:
        """Advance the profiler; after the last profiled step, write the files."""
        if self._profile is None or self._is_done:
            return ()
        assert self._first is not None  # chosen before the profiler was started
        last = self._first + self._settings.steps - 1
        if step < last:
            self._profile.step()
            return ()
        return (self._finish(last),)

    def summary(self) -> Summary:
        """A line on what the summary's speeds count."""
        if not self._num_profiled:
            return Summary()
        steps = "1 profiled step" if self._num_profiled == 1 else f"{self._num_profiled} profiled steps"
        return Summary(line=f"profile   tokens/s and MFU count {steps} and the writing of the files")

    def stop(self, step: int) -> str | None:
        """Write the profile of the steps up to this one."""
        return self._finish(step) if self._ranges is not None else None

    def _finish(self, last: int) -> str:
        """Stop the profiler and write its files; a line that names them."""
        import torch

        assert self._first is not None  # chosen before the profiler was started
        self._is_done, self._num_profiled = True, last + 1 - self._first
        self._ranges.remove()
        self._ranges = None
        atexit.unregister(self._profile.stop)
        self._profile.stop()
        try:
            trace = self._write(last)
        except OSError as error:  # a full disk must not end the run
            reason = error.strerror or str(error)
            place = error.filename or self._folder
            return f"WARNING: profile of steps {self._first} to {last} is incomplete: {place}: {reason}"
        finally:
            self._profile = None
            if self._has_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        return f"profile of steps {self._first} to {last}: {trace} (open it at https://ui.perfetto.dev)"

    def _write(self, last: int) -> Path:
        """Write the files; the path of the trace."""
        import torch

        self._folder.mkdir(exist_ok=True)
        stem = self._folder / f"steps-{self._first}-{last}-rank-{self._rank}"
        trace = stem.with_name(f"{stem.name}.trace.json.gz")
        self._profile.export_chrome_trace(str(trace))
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
        stem.with_name(f"{stem.name}.txt").write_text(table + "\n", encoding="utf-8")
        if self._has_memory:
            torch.cuda.memory._dump_snapshot(str(stem.with_name(f"{stem.name}.memory.pickle")))
        return trace


def named_ranges(
    model: nn.Module, block_names: Iterable[str]
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The blocks, and the other modules with parameters, by their names in the full model.

    An engine or a pipeline stage puts prefixes before the names of blocks.
    """
    wanted, blocks = set(block_names), {}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        block = next((".".join(parts[i:]) for i in range(len(parts)) if ".".join(parts[i:]) in wanted), None)
        if block is not None:
            blocks[block] = module
        elif next(module.parameters(recurse=False), None) is not None:
            layers[name] = module
    return blocks, layers
