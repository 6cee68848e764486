"""Runs the cells of a study as local processes, a given number at a time.

Each cell is a process of tools/study.py. A cell that fails does not end the others. A stop signal or Ctrl-C
stops all of them; they save, and the same command continues them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megalowbit.errors import EXIT_TRANSIENT, UserError
from megalowbit.pretrain.sweep.study.cells import LOGS, RUN_ELSEWHERE, Cell
from megalowbit.values import counted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_STOPPED = 3  # of a cell that a signal has stopped
SECONDS_BETWEEN_POLLS = 0.1


class Process(Protocol):
    """What is needed of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def wait(self) -> int:
        """Wait for the end."""


Start = Callable[[Cell, Path], Process]


@dataclass
class Outcome:
    """What became of the cells: names."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)


def starter(tool: Path, study: Path) -> Start:
    """Starts a cell as a process of `tool`, tools/study.py, with one thread unless OMP_NUM_THREADS is set."""

    def start(cell: Cell, log: Path) -> Process:
        command = [sys.executable, str(tool), str(study), "--out", str(cell.folder), "--cell", cell.name]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with log.open("a", encoding="utf-8") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, preexec_fn=_ignore_interrupts
            )

    return start


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; a cell ends by SIGTERM instead, after which it saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def execute(cells: Sequence[Cell], *, jobs: int, start: Start) -> Outcome:
    """Run cells, `jobs` at a time, and print a line after each.

    Raises:
        KeyboardInterrupt: a stop signal or Ctrl-C; the cells have been stopped.
    """
    waiting, outcome = list(reversed(cells)), Outcome()
    running: dict[str, tuple[Cell, Process, float, int]] = {}
    for folder in {cell.folder for cell in cells}:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    stopped: list[int] = []
    before = {number: signal.signal(number, lambda *_: stopped.append(1)) for number in STOP_SIGNALS}
    try:
        while (waiting or running) and not stopped:
            while waiting and len(running) < jobs and not stopped:
                cell = waiting.pop()
                log = log_of(cell)
                written = log.stat().st_size if log.exists() else 0  # by earlier attempts
                running[cell.name] = (cell, start(cell, log), time.monotonic(), written)
            for name, (cell, process, started, written) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[name]
                _note(cell, code, written, outcome)
                number = len(outcome.finished) + len(outcome.failed) + len(outcome.elsewhere)
                ending = f"{_ending(name, outcome)}, {time.monotonic() - started:.0f} s"
                print(f"  [{number}/{len(cells)}] {name}: {ending}", flush=True)
            time.sleep(SECONDS_BETWEEN_POLLS)
    finally:
        if stopped and running:
            print(f"stopping {counted(len(running), 'cell')}, which save first", file=sys.stderr, flush=True)
        for _, process, *_ in running.values():
            process.terminate()
        for _, process, *_ in running.values():
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise KeyboardInterrupt
    return outcome


def log_of(cell: Cell) -> Path:
    """The output of a cell's processes."""
    return cell.folder / LOGS / f"{cell.name}.log"


def _note(cell: Cell, code: int, written: int, outcome: Outcome) -> None:
    """Note how a process has ended; its lines in the log begin after `written` bytes."""
    if code == 0:
        outcome.finished.append(cell.name)
        return
    if code == EXIT_STOPPED:
        outcome.failed[cell.name] = "stopped"
        return
    log = log_of(cell)
    lines = log.read_bytes()[written:].decode(errors="replace").splitlines() if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reasons = [error for error in errors if not error.startswith(f"{cell.name} has failed")]
    if code == EXIT_TRANSIENT and errors and RUN_ELSEWHERE in errors[-1]:
        outcome.elsewhere.append(cell.name)
    else:
        outcome.failed[cell.name] = f"{reasons[-1] if reasons else f'exit code {code}'} (see {log})"


def _ending(name: str, outcome: Outcome) -> str:
    if name in outcome.failed:
        return f"failed: {outcome.failed[name]}"
    return "run by another command" if name in outcome.elsewhere else "finished"


def raise_failures(outcome: Outcome) -> None:
    """Raise an error that names the cells that have failed, if any."""
    if outcome.failed:
        lines = [f"{name}: {reason}" for name, reason in list(outcome.failed.items())[:5]]
        more = f", and {len(outcome.failed) - 5} more" if len(outcome.failed) > 5 else ""
        failed = counted(len(outcome.failed), "cell")
        raise UserError(f"{failed} failed: {'; '.join(lines)}{more}")
