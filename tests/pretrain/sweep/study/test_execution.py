"""Local processes of a study: failures and stop signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalowbit.errors import EXIT_TRANSIENT, UserError
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.execution import execute, raise_failures
from megalowbit.pretrain.sweep.study.study_file import read_study

ROOT = Path(__file__).parents[4]


def cells_with_code(study, tmp_path, codes):
    """Cells, and a starter of real processes that print a line and exit with these codes."""
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)

    def start(cell, log):
        code = f"print('reading'); print('error: no such thing'); raise SystemExit({codes[cell.name]})"
        with log.open("w") as file:
            return subprocess.Popen([sys.executable, "-c", code], stdout=file)

    return cells, start


def test_a_cell_that_fails_does_not_end_the_others(study, tmp_path, capsys):
    names = [cell.name for cell in cells_of(read_study(study), tmp_path, ROOT)]
    cells, start = cells_with_code(study, tmp_path, dict(zip(names, (2, 0, EXIT_TRANSIENT, 0), strict=True)))
    outcome = execute(cells, jobs=2, start=start)
    assert outcome.finished == [names[1], names[3]] or outcome.finished == [names[3], names[1]]
    assert outcome.failed == {names[0]: "no such thing"}
    assert outcome.elsewhere == [names[2]]
    assert f"{names[2]}: run by another command" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"1 cells have failed: {names[0]}: no such thing"):
        raise_failures(outcome)


def test_a_stop_signal_ends_all_cells(study, tmp_path):
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)
    started = []

    def start(cell, log):
        started.append(subprocess.Popen(["sleep", "60"]))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        execute(cells, jobs=2, start=start)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is before
