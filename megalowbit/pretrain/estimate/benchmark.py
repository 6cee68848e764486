"""`--benchmark`: times the steps of a run on random tokens, and prints a summary.

The steps are those of the run that the configuration describes: same model, recipe, layout, optimizer and
components, the same `train_step`. Only the data are random token ids, and nothing is saved: no run folder,
cache, checkpoint or export. The loss means nothing. With a folder, the figures are written there as JSON,
and a profile if one is configured.

A step ends when its loss has reached the host, so the device has finished it. The first steps compile
kernels and allocate memory; they are not counted. Speeds are those of the median step.
Not covered: reading data and saving checkpoints, which take further time in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megalowbit.data.synthetic import synthetic_loader
from megalowbit.distributed.agreement import agree, gather
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.durable_files import atomic_file
from megalowbit.engine.process_start import (
    compute_deterministically,
    naming_nondeterministic_operations,
    start_process_group,
)
from megalowbit.engine.run_checks.ranks_agree import check_ranks_agree
from megalowbit.errors import UserError, file_system_error
from megalowbit.families.vocabulary import num_tokens
from megalowbit.hf.checkpoint import read_config
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.pretrain.checks import check_config, check_kernels
from megalowbit.pretrain.components.machine.throughput import Throughput
from megalowbit.pretrain.components.profiler import Profiler, ProfileSettings
from megalowbit.pretrain.config import PretrainConfig
from megalowbit.pretrain.job import Job, assemble
from megalowbit.pretrain.loop import train_step
from megalowbit.pretrain.records.lines import job_lines
from megalowbit.pretrain.run import report_lost_ranks, start_facts
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.telemetry import columns
from megalowbit.telemetry.facts import Fact
from megalowbit.telemetry.summary import WIDTH

WARM_UP = 5  # steps that are not counted
GIB = 2**30
FILE = "benchmark.json"


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """What a benchmark has measured.

    Attributes:
        seconds: of each counted step.
        tokens_per_step: over all ranks.
        skipped_steps: counted steps whose update was left out; they are faster than others.
        profiled_steps: counted steps that were profiled; they are slower than others.
        speeds: `tflops_per_device`, and with a known peak `mfu` and `mfu_palm`, of the median step.
        peak_memory: the most bytes of tensors on one device; None without a GPU.
    """

    seconds: tuple[float, ...]
    tokens_per_step: int
    skipped_steps: int
    profiled_steps: int
    speeds: dict[str, Fact]
    peak_memory: int | None

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, in the median step."""
        return self.tokens_per_step / median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            **asdict(self),
            "seconds_median": median(self.seconds),
            "tokens_per_second": self.tokens_per_second,
        }

    def render(self) -> str:
        """The summary as ASCII text."""
        seconds, tflops = self.seconds, columns.number(self.speeds["tflops_per_device"])
        memory = columns.UNKNOWN if self.peak_memory is None else f"{self.peak_memory / GIB:.2f} GiB"
        rows = [
            ("steps", f"{len(seconds)} ({self.skipped_steps} skipped)", "warm-up", f"{WARM_UP} steps"),
            (
                "step",
                f"{median(seconds):.4g} s median",
                "range",
                f"{min(seconds):.4g} to {max(seconds):.4g} s",
            ),
            (
                "tokens",
                f"{self.tokens_per_step:,} per step",
                "tokens/s",
                columns.amount_text(self.tokens_per_second),
            ),
            (
                "TFLOP/s",
                f"{tflops:.4g} per device",
                "MFU",
                columns.percent_text(self.speeds.get("mfu")),
            ),
            ("memory", memory, "MFU (PaLM)", columns.percent_text(self.speeds.get("mfu_palm"))),
        ]
        if self.profiled_steps:
            rows.insert(
                1,
                ("profiled", f"{self.profiled_steps} of the {len(seconds)} steps, which are slower", "", ""),
            )
        lines = [f"{a:<12}{b:<28}{c:<12}{d}".rstrip() for a, b, c, d in rows]
        return "\n".join([" Benchmark ".center(WIDTH, "="), *lines, "=" * WIDTH])


def benchmark(
    config: PretrainConfig, identity: ProcessIdentity, *, steps: int, folder: Path | None
) -> BenchmarkResult:
    """Time `steps` steps, after a warm-up, and print a summary; every rank calls this once.

    Args:
        config: the resolved configuration.
        identity: this process.
        steps: how many steps to count.
        folder: where `benchmark.json` and a profile are written; None: nothing is written.

    Raises:
        TransientError: a rank was lost.
        UserError: the configuration is invalid, or `folder` cannot be written to.
    """
    with report_lost_ranks(identity), naming_nondeterministic_operations():
        if config.settings.run.deterministic:
            compute_deterministically()
        start_process_group(identity)
        check_ranks_agree(start_facts(config, is_resume=False))
        agree(lambda: check_config(config))
        agree(lambda: check_kernels(recipe_of(config.recipe)))
        agree(lambda: _check_folder(config, folder, WARM_UP + steps))
        vocab_size = num_tokens(read_config(config.settings.model))
        job = assemble(
            config,
            identity,
            RunFolder(Path() if folder is None else folder),
            open_data=partial(synthetic_loader, vocab_size=vocab_size),
        )
        _print(identity, "\n".join([*job_lines(job, identity, "random tokens"), ""]))
        result = measure(job, steps, identity)
        _print(identity, result.render())
        agree(lambda: _write(result, folder))
    return result


def measure(job: Job, steps: int, identity: ProcessIdentity) -> BenchmarkResult:
    """Train `WARM_UP` steps, then time `steps`; collective."""
    _print(identity, f"warm-up: {WARM_UP} steps, which compile kernels and are not counted")
    warm_up = sum(_train(job, WARM_UP, identity))
    _print(identity, f"the warm-up took {warm_up:.1f} s; now {steps} steps are timed")
    is_cuda = job.engine.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(job.engine.device)
    skipped_before, counted = job.totals.skipped_steps, range(job.step + 1, job.step + steps + 1)
    seconds = _train(job, steps, identity)
    throughput = job.find(Throughput)
    assert throughput is not None  # every run has one
    profiler = job.find(Profiler)
    memory = torch.cuda.max_memory_allocated(job.engine.device) if is_cuda else None
    peaks = [each for each in gather(memory) if each is not None]
    return BenchmarkResult(
        seconds=seconds,
        tokens_per_step=job.tokens_per_step,
        skipped_steps=job.totals.skipped_steps - skipped_before,
        profiled_steps=0 if profiler is None else profiler.count(counted),
        speeds=throughput.of_speed(job.tokens_per_step / median(seconds)),
        peak_memory=max(peaks, default=None),
    )


def _train(job: Job, steps: int, identity: ProcessIdentity) -> tuple[float, ...]:
    """Train steps as the loop does, without records and checkpoints; the seconds of each."""
    seconds = []
    for _ in range(steps):
        lines = [component.before_step(job.step) for component in job.components]
        step = train_step(job)
        for component in job.components:
            lines.extend(component.after_step(job.step, step.facts))
        seconds.append(step.seconds)
        _print(identity, "\n".join(filter(None, lines)))
    return tuple(seconds)


def _check_folder(config: PretrainConfig, folder: Path | None, last: int) -> None:
    """Create the folder; check that a profile has one, and only steps of the benchmark."""
    profile = config.settings.of(ProfileSettings)
    if profile is not None and folder is None:
        raise UserError("megalowbit.profile needs a folder for the trace: name it with --run-dir")
    if profile is not None and (profile.first_step or WARM_UP + 1) + profile.steps - 1 > last:
        raise UserError(
            f"megalowbit.profile ends after step {last}, the last of this benchmark: profile earlier "
            "steps, or raise --benchmark"
        )
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write(result: BenchmarkResult, folder: Path | None) -> None:
    if folder is None:
        return
    try:
        with atomic_file(folder / FILE) as file:
            file.write(json.dumps(result.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    message = f"--run-dir {folder} cannot be written to ({error.strerror}): name another folder"
    return file_system_error(message, error)


def _print(identity: ProcessIdentity, text: str) -> None:
    if text and identity.is_main:
        print(text, flush=True)
