"""Step 6: a real run by `launch/pretrain.py`, the same in bf16, and one that is killed and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.first_hour.findings import Finding, at_most, expect, info, skip
from benchmarks.first_hour.session import NO_GPU, ROOT, Session

CONFIG = "configs/gpt2_tiny_fp4.json"
# The same recipe in all steps, so that a run of 12 steps and the speed at the end are of FP4.
UNSWITCHED = ("megalowbit.recipe=nvfp4", "megalowbit.late_switch=null")
# nvfp4 after 700 steps: mean and twice its deviation, docs/experiments/short-runs.md
EXPECTED_LOSS, TOLERANCE = 2.18, 0.25
FIRST_STEP_SECONDS = 90  # most of it compiles kernels
DEADLINE = 900
POLL_SECONDS = 0.005

Row = dict[str, Any]


class Run(NamedTuple):
    """What a run left behind.

    Attributes:
        rows: of metrics.jsonl, one for each step.
        seconds: from the row before; the first from the start of the process.
        output: everything printed.
    """

    rows: list[Row]
    seconds: list[float]
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {row["step"]: row["loss"] for row in self.rows}


def check(session: Session) -> Iterator[Finding]:
    """Loss, skipped steps and speed of the tiny run, and a resume after a kill."""
    steps = session.size(700, 12)
    folder = session.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = pretrain(folder / "nvfp4", steps)
    yield from verdict_of(session, run, steps)
    plain = pretrain(folder / "bf16", steps, "megalowbit.recipe=bf16")
    if plain.rows:
        speeds = [each.rows[-1].get("tokens_per_second") or math.nan for each in (run, plain)]
        yield info(
            "speed of nvfp4 ÷ bf16, tiny model", speeds[0] / speeds[1], " ×", note=f"{speeds[0]:.0f} tokens/s"
        )
    else:
        yield expect("the run in bf16", False, "ended early", f"{steps} steps", note=last_line(plain))
    yield from resumed(session, folder)


def verdict_of(session: Session, run: Run, steps: int) -> Iterator[Finding]:
    """Whether a run trains as expected."""
    note = last_line(run, len(run.rows) == steps)
    yield expect(
        "steps of the tiny run", len(run.rows) == steps, len(run.rows), str(steps), " steps", note=note
    )
    if not run.rows:
        return
    losses = list(run.losses.values())
    yield expect("losses are finite", all(map(math.isfinite, losses)), losses[-1], "finite", " nats")
    skipped = sum(row.get("skipped_steps") or 0 for row in run.rows[-1:])
    yield at_most("skipped in bf16", skipped, 0, " steps")
    if session.is_gpu:
        mean = statistics.fmean(losses[-50:])
        limit = f"{EXPECTED_LOSS} ± {TOLERANCE}"
        yield expect(
            "loss of the last 50 steps",
            abs(mean - EXPECTED_LOSS) <= TOLERANCE,
            round(mean, 3),
            limit,
            " nats",
        )
        yield expect("kernels in the log", "Triton" in run.output, "Triton" in run.output, "Triton kernels")
        yield at_most(
            "start and first step", run.seconds[0], 2 * FIRST_STEP_SECONDS, " s", warn=FIRST_STEP_SECONDS
        )
        slowest, median = max(run.seconds[5:]), statistics.median(run.seconds[5:])
        yield at_most(
            "slowest step ÷ median", slowest / median, math.inf, " ×", warn=3, note=f"median {median:.4f} s"
        )
    else:
        yield skip("loss of the last 50 of 700 steps", f"{NO_GPU}; {steps} steps only")
        yield skip("Triton kernels in the log; time of the first step", NO_GPU)


def resumed(session: Session, folder: Path) -> Iterator[Finding]:
    """A run killed between two checkpoints continues with the losses of one that was not.

    On a GPU some operations add in any order, so equal bits need deterministic algorithms.
    """
    if not session.is_gpu:
        yield same_losses(session, folder, "losses after a kill", is_hard=True)
        return
    found = same_losses(session, folder, "losses after a kill", is_hard=False)
    yield found
    if found.status == "pass":
        return
    check = "losses after a kill, deterministic"
    yield same_losses(session, folder, check, "megalowbit.run.deterministic=true", is_hard=True)


def same_losses(session: Session, folder: Path, check: str, *settings: str, is_hard: bool) -> Finding:
    """Compare a run with one that is killed and resumed, step by step."""
    steps, every, kill_at = session.size((80, 20, 60), (12, 4, 6))
    settings = (f"megalowbit.checkpoint.every={every}", *settings)
    name = check.replace(", ", "-").replace(" ", "-")
    whole = pretrain(folder / f"{name}-whole", steps, *settings)
    pretrain(folder / name, steps, *settings, kill_at=kill_at)
    rest = pretrain(folder / name, steps, *settings, resume=True)
    after = {step: loss for step, loss in rest.losses.items() if step > kill_at}
    different = [step for step, loss in after.items() if loss != whole.losses.get(step)]
    is_equal = len(after) == steps - kill_at and not different
    note = f"first different step: {different[0]}" if different else last_line(rest, is_equal)
    return expect(check, is_equal, is_equal, "equal bits", note=note, is_hard=is_hard)


def last_line(run: Run, is_good: bool = False) -> str:
    """The last line of a run that has gone wrong, which says why."""
    return "" if is_good else (run.output.strip().splitlines() or [""])[-1]


def pretrain(
    folder: Path,
    steps: int,
    *settings: str,
    kill_at: int | None = None,
    resume: bool = False,
    processes: int = 1,
) -> Run:
    """Train the tiny configuration in one process, or as ranks of torchrun; `kill_at` is a step."""
    program = [str(ROOT / "launch/pretrain.py"), "--ds-config", str(ROOT / CONFIG), "--run-dir", str(folder)]
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    overrides = [
        part for each in (*UNSWITCHED, f"megalowbit.run.steps={steps}", *settings) for part in ("--set", each)
    ]
    command = [*start, *program, *overrides, *(["--resume", "auto"] if resume else [])]
    log = folder.with_suffix(".log")
    print(f"{folder.name}: its progress is in {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            seconds = follow(process, folder / "metrics.jsonl", kill_at)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Run(rows_of(folder / "metrics.jsonl"), seconds, log.read_text(encoding="utf-8", errors="replace"))


def rows_of(path: Path) -> list[Row]:
    """Rows of metrics.jsonl without a torn last one; of a step that was repeated, the last."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    by_step = {row["step"]: row for row in (json.loads(line) for line in lines if line.endswith("\n"))}
    return [by_step[step] for step in sorted(by_step)]


def follow(process: subprocess.Popen[bytes], path: Path, kill_at: int | None) -> list[float]:
    """Wait for a run's end, or kill it after a step; returns the seconds between its rows."""
    started = last = time.monotonic()
    size, seconds = path.stat().st_size if path.exists() else 0, []
    while process.poll() is None and time.monotonic() - started < DEADLINE:
        time.sleep(POLL_SECONDS)
        if path.exists() and path.stat().st_size > size:
            with path.open("rb") as file:
                file.seek(size)
                new = file.read()
            now, count = time.monotonic(), new.count(b"\n")
            seconds += [(now - last) / count] * count if count else []
            size, last = size + len(new), now
            if kill_at is not None and rows_of(path) and rows_of(path)[-1]["step"] >= kill_at:
                return seconds
    return seconds
