"""Local processes of a study: failures and stop signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalowbit.errors import EXIT_TRANSIENT, UserError
from megalowbit.pretrain.sweep.study.cells import cells_of
from megalowbit.pretrain.sweep.study.execution import execute, log_of, raise_failures
from megalowbit.pretrain.sweep.study.study_file import read_study

ROOT = Path(__file__).parents[4]


STACK = 'Timeout (0:10:00)!\n  File "tools/study.py", line 12 in <module>'
ENDINGS = {  # by the ending: exit code, output, and what is printed
    "a mistake": (2, "reading\nerror: no such thing", "failed: no such thing (see {log})"),
    "the end": (0, "reading", "finished"),
    "a held lock": (
        EXIT_TRANSIENT,
        "error: it is run by another process: wait for it",
        "run by another command",
    ),
    "a hang": (
        EXIT_TRANSIENT,
        "error: rank 0 has hung\nwhat went wrong first: diagnose",
        "failed: rank 0 has hung (see {log})",
    ),
    "a failed run": (
        2,
        "error: no checkpoint\nerror: tiny,parts,8,bf16,1 has failed with exit code 2: see its log",
        "failed: no checkpoint (see {log})",
    ),
    "a stack": (1, STACK, "failed: exit code 1 (see {log})"),
    "a signal": (3, "stopped after step 7", "failed: stopped"),
}


def cells_with_endings(study, tmp_path, endings):
    """Cells, and a starter of real processes that end like this."""
    cells = cells_of(read_study(study), tmp_path / "out", ROOT)
    chosen = dict(zip((cell.name for cell in cells), endings, strict=False))

    def start(cell, log):
        code, output, _ = ENDINGS[chosen[cell.name]]
        command = [sys.executable, "-c", f"print({output!r}); raise SystemExit({code})"]
        with log.open("a") as file:
            return subprocess.Popen(command, stdout=file)

    return cells[: len(chosen)], start


def test_a_cell_that_fails_does_not_end_the_others(study, tmp_path, capsys):
    endings = ("a mistake", "the end", "a held lock", "the end")
    cells, start = cells_with_endings(study, tmp_path, endings)
    names = [cell.name for cell in cells]
    outcome = execute(cells, jobs=2, start=start)
    assert sorted(outcome.finished) == sorted([names[1], names[3]])
    assert outcome.failed == {names[0]: f"no such thing (see {log_of(cells[0])})"}
    assert outcome.elsewhere == [names[2]]
    assert f"{names[2]}: run by another command" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"1 cell failed: {names[0]}: no such thing"):
        raise_failures(outcome)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_line_of_a_cell_says_how_it_has_ended(study, tmp_path, capsys, ending):
    cells, start = cells_with_endings(study, tmp_path, [ending])
    log = log_of(cells[0])
    log.parent.mkdir(parents=True)
    log.write_text("error: of an earlier attempt\n")
    execute(cells, jobs=1, start=start)
    expected = ENDINGS[ending][2].format(log=log)
    assert f"[1/1] {cells[0].name}: {expected}, " in capsys.readouterr().out


def test_an_interrupt_of_the_terminal_reaches_a_cell_as_the_signal_after_which_it_saves(study, tmp_path):
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('error: saved', flush=True), os._exit(2)))\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    code = (
        "import sys; from pathlib import Path\n"
        "from megalowbit.pretrain.sweep.study.cells import cells_of\n"
        "from megalowbit.pretrain.sweep.study.execution import execute, starter\n"
        "from megalowbit.pretrain.sweep.study.study_file import read_study\n"
        "tool, study, out, root = map(Path, sys.argv[1:])\n"
        "execute(cells_of(read_study(study), out, root)[:1], jobs=1, start=starter(tool, study))\n"
    )
    command = [sys.executable, "-c", code, *map(str, (tool, study, tmp_path / "out", ROOT))]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as grid:
        logs = tmp_path / "out" / "logs"
        while not any(log.read_text() for log in logs.glob("*")):
            assert grid.poll() is None, grid.stderr.read()
            time.sleep(0.1)
        os.killpg(grid.pid, signal.SIGINT)  # as Ctrl-C does
        assert grid.wait() != 0
    (log,) = logs.glob("*")
    assert log.read_text() == "started\nerror: saved\n"


def test_a_stop_signal_ends_all_cells(study, tmp_path, capsys):
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
    assert capsys.readouterr().err == "stopping 2 cells, which save first\n"
    assert signal.getsignal(signal.SIGTERM) is before
