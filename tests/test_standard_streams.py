import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from launchers import ROOT

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_line(line, folder):
    return subprocess.run(["bash", "-c", line], cwd=folder, env=ENV, capture_output=True, text=True)


@pytest.mark.parametrize(
    "start", [["-m", "megalowbit", "study"], pytest.param(["tools/study.py"], marks=pytest.mark.slow)]
)
def test_a_reader_that_has_enough_ends_a_command_without_a_traceback(start, tmp_path):
    words = [*start, "configs/studies/gap.json", "--out", str(tmp_path), "--list"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=ENV, **streams) as listing:
        assert listing.stdout.readline().startswith("-")
        listing.stdout.close()  # as head does; the list is longer than a pipe holds
        assert listing.stderr.read() == ""
    assert listing.returncode == 141


@pytest.mark.parametrize(
    "words",
    [["recipes"], ["pretrain", "--help"], pytest.param(["doctor", "--json", "a"], marks=pytest.mark.slow)],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_does_its_work(words, closed, tmp_path):
    line = f"{shlex.join([sys.executable, '-m', 'megalowbit', *words])} {closed}"
    ended = run_line(line, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "Error" not in ended.stderr
    assert (tmp_path / "a").exists() == (words[0] == "doctor")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    code = """
        import os
        from megalowbit.standard_streams import open_closed_streams
        open_closed_streams()
        with open("data", "w") as file:
            assert file.fileno() > 2, file.fileno()
            os.write(1, b"of a library")
            print("of Python", flush=True)
        """
    line = f"{shlex.join([sys.executable, '-c', textwrap.dedent(code)])} <&- >&-"
    ended = run_line(line, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "data").read_bytes() == b""
