"""Step 10: two ranks at every ZeRO stage against one process, and a rank that is lost.

Not automated, because they need other programs or root: nccl-tests, a cut network, a stopped process.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.first_hour.findings import Finding, at_least, at_most, expect, info, skip
from benchmarks.first_hour.run import Run, last_line, pretrain
from benchmarks.first_hour.session import ROOT, Session

STEPS = 30
DISTANCE = 2e-3  # of losses, relative: sums in another order
BUS_GIGABYTES = 350  # per second, all-reduce over NVLink
BY_HAND = {
    "a stopped rank (kill -STOP) and a cut network": "needs root and a second node: docs/faults.md",
    "bf16 communication beside fp32": "compare two runs with and without communication_data_type",
    "save and load of 1 B parameters": "python benchmarks/restart.py measures it",
}
ALL_REDUCE = """
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(2**28, device="cuda")
for _ in range(5): dist.all_reduce(x)
torch.cuda.synchronize(); started = time.perf_counter()
for _ in range(20): dist.all_reduce(x)
torch.cuda.synchronize(); seconds = (time.perf_counter() - started) / 20
n = dist.get_world_size()
if dist.get_rank() == 0: print("GB/s", 2 * (n - 1) / n * x.nbytes / seconds / 1e9)
dist.destroy_process_group()
"""


def check(session: Session) -> Iterator[Finding]:
    """Losses by stage, repeatability with overlapped communication, a lost rank, bandwidth."""
    if session.is_gpu and torch.cuda.device_count() < 2:
        yield skip("two ranks", "one GPU only: NCCL needs one for each rank")
        return
    folder = session.folder / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    steps = session.size(STEPS, 5)
    yield bandwidth(session)
    for precision in session.size(("bf16", "fp16"), ("bf16",)):
        one = train(folder / f"one-{precision}", steps, precision, 0, 1)
        for stage in session.size((0, 1, 2, 3), (2,)):
            for overlaps in session.size((False, True), (False,)):
                yield from stage_of(folder, one, steps, precision, stage, overlaps)
    yield from lost_rank(folder)
    for name, how in BY_HAND.items():
        yield skip(name, f"not automated: {how}")


def train(folder: Path, steps: int, precision: str, stage: int, ranks: int, overlaps: bool = False) -> Run:
    """The tiny model; the tokens of a step do not depend on the number of ranks."""
    settings = (
        "megalowbit.recipe=bf16",  # low-bit layers scale the tensor of each rank by itself
        f"megalowbit.precision={precision}",
        f"zero_optimization.stage={stage}",
        f"train_micro_batch_size_per_gpu={4 // ranks}",
        *([f"zero_optimization.overlap_comm={str(overlaps).lower()}"] if stage else []),
    )
    return pretrain(folder, steps, *settings, processes=ranks)


def stage_of(
    folder: Path, one: Run, steps: int, precision: str, stage: int, overlaps: bool
) -> Iterator[Finding]:
    """Two ranks against one; with overlapped communication a second time, which must give the same bits."""
    name = f"stage {stage}, {precision}" + ", overlapped" * overlaps
    if overlaps and not stage:
        return
    two = train(folder / name.replace(", ", "-"), steps, precision, stage, 2, overlaps)
    yield distance(f"losses of two ranks, {name}", one, two, steps)
    if overlaps:
        again = train(folder / f"{name.replace(', ', '-')}-again", steps, precision, stage, 2, overlaps)
        is_equal = bool(two.rows) and again.losses == two.losses
        yield expect(f"a second run, {name}", is_equal, is_equal, "equal bits", is_hard=False)


def distance(check: str, one: Run, two: Run, steps: int) -> Finding:
    """Largest relative difference of losses, or why there are none."""
    if len(one.rows) != steps or len(two.rows) != steps:
        return expect(check, False, f"{len(two.rows)} steps", f"{steps} steps", note=last_line(two))
    worst = max(abs(two.losses[step] / loss - 1) for step, loss in one.losses.items())
    return at_most(
        check, worst if math.isfinite(worst) else math.nan, DISTANCE, " relative", note="largest of all steps"
    )


def bandwidth(session: Session) -> Finding:
    """All-reduce of 1 GiB."""
    check = "all-reduce of 1 GiB, speed of the bus"
    if not session.is_gpu:
        return skip(check, "no GPU: gloo's speed says nothing of NCCL's")
    script = session.folder / "ranks" / "all_reduce.py"
    script.write_text(ALL_REDUCE, encoding="utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    count = str(torch.cuda.device_count())
    done = subprocess.run(
        [*start, "--nproc-per-node", count, str(script)], capture_output=True, text=True, timeout=300
    )
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("GB/s")]
    if not found:
        return expect(
            check, False, f"exit code {done.returncode}", "a figure", note=done.stderr.strip()[-200:]
        )
    return at_least(
        check,
        float(found[0]),
        0,
        " GB/s",
        warn=BUS_GIGABYTES,
        note=f"{count} GPUs; the goal is that of NVLink",
    )


def lost_rank(folder: Path) -> Iterator[Finding]:
    """SIGKILL of rank 1: the other rank ends the run by itself and says which rank it was."""
    timeout = 60
    run_dir = folder / "lost"
    program = [str(ROOT / "launch/pretrain.py"), "--ds-config", str(ROOT / "configs/gpt2_tiny_fp4.json")]
    overrides = ("megalowbit.run.steps=100000", f"megalowbit.watchdog.timeout={timeout}")
    command = [sys.executable, *program, "--run-dir", str(run_dir)]
    command += [part for each in overrides for part in ("--set", each)]
    port = 20000 + os.getpid() % 20000
    ranks = []
    for rank in range(2):  # without torchrun, which would end the other rank itself
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        with (folder / f"lost-{rank}.log").open("w", encoding="utf-8") as log:
            ranks.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                )
            )  # fmt: skip
    try:
        yield from _kill_second(ranks, run_dir, folder / "lost-0.log", timeout)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _kill_second(
    ranks: list[subprocess.Popen[bytes]], run_dir: Path, log: Path, timeout: int
) -> Iterator[Finding]:
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        if ranks[0].poll() is not None:
            break
        time.sleep(0.2)
    if ranks[0].poll() is not None or not metrics.exists():
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        yield expect("a lost rank", False, "no step in 300 s", "a step", note=lines[-1] if lines else "")
        return
    started = time.monotonic()
    os.killpg(ranks[1].pid, signal.SIGKILL)
    try:
        ranks[0].wait(timeout=3 * timeout)
        seconds = time.monotonic() - started
    except subprocess.TimeoutExpired:
        seconds = math.inf
    limit = 1.5 * timeout
    yield at_most(
        "end of a run after a rank is lost", seconds, limit, " s", warn=30, note=f"timeout {timeout} s"
    )
    text = log.read_text(encoding="utf-8", errors="replace")
    yield expect("the lost rank is named", "rank 1" in text, "rank 1" in text, "rank 1 in the log")
    last = json.loads(metrics.read_text(encoding="utf-8").splitlines()[0])
    yield info("steps before the kill", float(last["step"]), " steps", note="at least")
