import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalowbit.telemetry.atomic_file import replacing


def test_the_new_text_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    for text in ("one", "two"):
        with replacing(path) as file:
            file.write(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_text_and_no_draft(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail_in_the_middle():
        with replacing(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_in_the_middle_leaves_the_old_text(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys, pathlib; from megalowbit.telemetry.atomic_file import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write('half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
