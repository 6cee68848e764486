"""Runs the steps, each in a separate process: an error of CUDA, a hang or a kill ends one step only.

python -m benchmarks.first_hour.runner FOLDER STEP      what the runner starts for a step
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_hour.commit import commit_of
from benchmarks.first_hour.findings import Finding
from benchmarks.first_hour.report import STEP, Report, shown
from megalowbit.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """A step of the first hour.

    Attributes:
        name: as given to `--steps`.
        title: in the summary.
        module: full name of the module whose function `check` yields the findings.
        seconds: after which its process is killed.
        stops: whether later steps make no sense if it fails.
    """

    name: str
    title: str
    module: str
    seconds: int
    stops: bool = False


STEPS = (
    Step("machine", "0 machine and install", f"{__package__}.machine", 300, stops=True),
    Step("ceilings", "1 ceilings", f"{__package__}.ceilings", 300),
    Step("bits", "2 bits", f"{__package__}.bits", 1500, stops=True),
    Step("kernels", "3 kernels", f"{__package__}.kernels_speed", 600),
    Step("layer", "4 one layer", f"{__package__}.layer", 900),
    Step("host-reads", "5 host reads", f"{__package__}.host_reads", 300),
    Step("run", "6 a run", f"{__package__}.run", 1800),
    Step("memory", "7 memory", f"{__package__}.memory", 600),
    Step("optimizer", "8 optimizer", f"{__package__}.optimizer", 300),
    Step("model", "9 a whole step", f"{__package__}.model", 900),
    Step("ranks", "10 several GPUs", f"{__package__}.ranks", 1800),
    Step("launches", "11 launches and CUDA graphs", f"{__package__}.launches", 600),
)
SECONDS_TO_FIND_DEVICE = 120
SECONDS_TO_END = 20  # for a step that is interrupted to end the programs that it has started
BY_NAME = {step.name: step for step in STEPS}
NUMBERED = ", ".join(f"{number} {step.name}" for number, step in enumerate(STEPS))


def chosen_steps(text: str | None) -> list[Step]:
    """Steps by names or numbers, separated by commas; all without a text.

    Raises:
        UserError: there is no such step.
    """
    if text is None:
        return list(STEPS)
    names = [part.strip() for part in text.split(",")]
    names = [STEPS[int(name)].name if name.isdecimal() and int(name) < len(STEPS) else name for name in names]
    for name in names:
        if name not in BY_NAME:
            raise UserError(f"unknown step {name!r}: known: {NUMBERED}")
    return [step for step in STEPS if step.name in names]


say_at_once = functools.partial(print, flush=True)  # also into a pipe or a file


def run_steps(
    folder: Path, steps: list[Step], *, again: bool = False, say: Callable[[str], None] = say_at_once
) -> bool:
    """Run steps into a folder; returns whether nothing failed.

    Args:
        folder: of the results; steps that are done there are kept.
        steps: what to run.
        again: run them also if they are done.
        say: prints a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder, found_device(say), commit_of(ROOT))
    titles = {step.name: step.title for step in STEPS}
    damage = report.repair()
    if damage is not None:
        say(damage)
    statuses = []
    for step in steps:
        if report.is_done(step.name) and not again:
            statuses.append(_status(report, step))
            say(f"{step.title}: {report.counts(step.name)} (done before)")
        else:
            where = report.difference(step.name)
            if where is not None:
                say(f"{step.title} runs again: it was done {where}")
            try:
                statuses.append(_run_anew(report, step, say))
            finally:  # also if it is interrupted
                report.write_summary(titles)
        if step.stops and statuses[-1] == "fail":
            repeat = f"--steps {step.name} --again repeats it"
            say(f"stopped: later steps make no sense before {step.title} has passed; {repeat}")
            break
    say(f"written: {report.write_summary(titles)}")
    return "fail" not in statuses


def found_device(say: Callable[[str], None]) -> str:
    """The device of the steps, found in another process: CUDA in this one would keep memory of the GPU."""
    say("checking the device …")
    code = "from benchmarks.first_hour.session import device_name; print(device_name())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=True, timeout=SECONDS_TO_FIND_DEVICE,
        )  # fmt: skip
        return done.stdout.splitlines()[-1]
    except (subprocess.SubprocessError, IndexError):
        return "unknown"  # step 0 fails, and its log says why


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _status(report: Report, step: Step) -> str:
    return str(report.of_step(step.name)[-1]["status"])


def _run_anew(report: Report, step: Step, say: Callable[[str], None]) -> str:
    """Run a step, say what is over a limit, and return its status."""
    report.drop_unfinished(step.name)
    say(f"{step.title} … (at most {step.seconds} s; log: {_log_of(report, step)})")
    started = time.monotonic()
    _run_in_process(report, step)
    seconds = time.monotonic() - started
    status = report.close(step.name, seconds)
    say(f"{step.title}: {report.counts(step.name)}, {seconds:.0f} s")
    for row in report.of_step(step.name):
        is_check = row["check"] != STEP and row["value"] is not None
        if is_check and row["status"] in ("fail", "warn"):
            say(f"    {row['status']}  {row['check']}: {shown(row)} ({row['limit']}) {row['note']}")
    return status


def _log_of(report: Report, step: Step) -> Path:
    return report.folder / "logs" / f"{step.name}.log"


def _run_in_process(report: Report, step: Step) -> None:
    log = _log_of(report, step)
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.first_hour.runner"]
    command += [str(report.folder.resolve()), step.name, step.module]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=_environment(),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = process.wait(step.seconds)
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"not finished after {step.seconds} s"
        except BaseException:  # a signal to this process
            _end(process)
            raise
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        _end(process)
    if problem is not None:
        note = f"{lines[-1] if lines else 'no output'}; see logs/{log.name}"
        report.add(step.name, Finding("process", "fail", problem, "exit code 0", note), 0.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step that still runs. Killed at once, it would leave the runs that it has started on the GPU."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_step(folder: Path, name: str, module: str) -> None:
    """Run a step in this process and add its findings; an exception is a finding too."""
    import importlib

    import torch

    from benchmarks.first_hour.session import Session, device_name

    torch.manual_seed(0)
    session = Session(folder, "cuda" if torch.cuda.is_available() else "cpu", device_name())
    report = Report(folder, session.device_name)
    started = time.monotonic()
    try:
        check: Callable[[Session], Iterator[Finding]] = importlib.import_module(module).check
        for finding in check(session):
            report.add(name, finding, time.monotonic() - started)
            started = time.monotonic()
    except Exception as error:
        traceback.print_exc()
        line = (str(error).strip().splitlines() or [""])[0]
        note = f"{type(error).__name__}: {line}; see logs/{name}.log"
        report.add(name, Finding("exception", "fail", type(error).__name__, "none", note), 0.0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step ends the programs it has started
    run_step(Path(sys.argv[1]), *sys.argv[2:])
