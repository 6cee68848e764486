import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from launchers import ROOT

# unset, it leaves something in the buffer of stdout at the end
BUFFERED = {"PYTHONUNBUFFERED": ""}
ENV = {**os.environ, **BUFFERED, "PYTHONPATH": str(ROOT)}
MEGALOWBIT = shlex.join([sys.executable, "-m", "megalowbit"])


def run_line(line, folder):
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=ENV, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "start", [["-m", "megalowbit", "study"], pytest.param(["tools/study.py"], marks=pytest.mark.slow)]
)
def test_a_reader_that_has_enough_ends_a_command_without_a_traceback(start, tmp_path):
    words = [*start, "configs/studies/gap.json", "--out", str(tmp_path), "--list"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "pipesize": 4096}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=ENV, **streams) as listing:
        assert listing.stdout.readline().startswith("-")
        listing.stdout.close()  # as head does; the list is ten times as long as what the pipe holds
        assert listing.stderr.read() == ""
    assert listing.returncode == 141


@pytest.mark.parametrize(
    "words",
    [["recipes"], pytest.param(["doctor", "--json", "found"], marks=pytest.mark.slow)],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_does_its_work(words, closed, tmp_path):
    line = f"{MEGALOWBIT} {shlex.join(words)} {closed}"
    ended = run_line(line, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "found").exists() == (words[0] == "doctor")


@pytest.mark.parametrize(
    "opening",
    [
        "from megalowbit.standard_streams import run_until_unread; run_until_unread(lambda: 0)",
        "from megalowbit.pretrain.command_line import program; program(lambda: 0)",
    ],
)
def test_no_file_of_this_process_or_a_child_gets_the_number_of_a_closed_stream(opening, tmp_path):
    """What libraries print to the number of a stream would end up in that file."""
    child = """
        import os, sys
        for number in (1, 2):
            os.write(number, b"of a library")
        print("of Python", file=sys.stderr)
        with open("child", "w") as file:
            print(file.fileno(), end="", file=file)
        """
    code = f"""
        import os, subprocess, sys
        {opening}
        assert sys.stdin.read() == ""
        with open("data", "w") as file:
            for number in (1, 2):
                os.write(number, b"of a library")
            print("of Python", flush=True)
            print(file.fileno(), end="", file=file)
        for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
            assert stream.fileno() <= 2
        subprocess.run([sys.executable, "-c", {textwrap.dedent(child)!r}], check=True)
        """
    ended = run_line(f"{shlex.join([sys.executable, '-c', textwrap.dedent(code)])} <&- >&- 2>&-", tmp_path)
    assert ended.returncode == 0
    for name in ("data", "child"):
        assert int((tmp_path / name).read_text()) > 2, name


def test_a_file_that_has_the_number_of_a_closed_stream_keeps_it(tmp_path):
    code = """
        import sys
        from megalowbit.standard_streams import open_closed_streams
        with open("data", "w") as file:
            assert file.fileno() == 1
            open_closed_streams()
            print("of Python", flush=True)
            print("data", end="", file=file)
        """
    ended = run_line(f"{shlex.join([sys.executable, '-c', textwrap.dedent(code)])} >&-", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "data").read_text() == "data"


DRY_RUN = ["pretrain", "--ds-config", "gpt2_tiny_fp4", "--dry-run"]


@pytest.mark.parametrize(
    "words", [["init", "--help"], ["recipes"], pytest.param(DRY_RUN, marks=pytest.mark.slow)], ids=" ".join
)
def test_a_full_disk_under_stdout_is_one_line_and_no_success(words, tmp_path):
    ended = run_line(f"{MEGALOWBIT} {shlex.join(words)} >/dev/full", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("error: stdout cannot be written (No space left on device)\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words", [["init", "--help"], ["--help"], pytest.param(DRY_RUN, marks=pytest.mark.slow)], ids=" ".join
)
def test_a_reader_that_ends_before_the_output_ends_a_command_with_141(words, tmp_path):
    reader, stream = os.pipe()
    os.close(reader)
    command = [*shlex.split(MEGALOWBIT), *words]
    ended = subprocess.run(command, cwd=tmp_path, env=ENV, stdout=stream, stderr=subprocess.PIPE, text=True)
    os.close(stream)
    assert ended.returncode == 141
    assert "Traceback" not in ended.stderr
    assert "Exception" not in ended.stderr


@pytest.mark.parametrize("words", ["--help", "submit --help"])
def test_characters_that_the_encoding_lacks_are_escaped(words, tmp_path):
    ended = run_line(f"PYTHONIOENCODING=ascii {MEGALOWBIT} {words}", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\u2026" in ended.stdout
