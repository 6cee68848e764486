import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from forks import run_script

from megalowbit.telemetry.columns import SATURATION_RATE
from megalowbit.telemetry.sinks.console import HEADING_EVERY, Console

ROOT = Path(__file__).parents[3]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RUN = """
import sys, time
from megalowbit.telemetry.sinks.console import Console
console = Console(40, log_every=10)
console.print("run: größe × 2")
for step in range(1, 41):
    time.sleep(0.012)
    console.write(step, {"loss": 6 / step, "lr": 6e-4, "grad_norm": 1.0, "loss_scale": 65536.0,
        "skipped_steps": step >= 23, "tokens_per_second": 4321.0,
        "gradient_overflow/element_overflow_rate": 0.035})
    if step == 30:
        print("from elsewhere")
console.close()
"""


class Clock:
    """A second per step."""

    now = 0.0

    def __call__(self):
        return self.now


def facts(step, skipped=0):
    return {"loss": 6 / step, "lr": 6e-4, "grad_norm": 1.0, "skipped_steps": skipped, SATURATION_RATE: 0.035}


def log_of(steps, total, *, skips=(), **arguments):
    file, clock = io.StringIO(), Clock()
    console = Console(total, file=file, clock=clock, **arguments)
    skipped = arguments.get("skipped_steps", 0)
    for step in steps:
        clock.now += 1
        skipped += step in skips
        console.write(step, facts(step, skipped))
    console.close()
    return file.getvalue().splitlines()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`RUN` as a file."""
    path = tmp_path_factory.mktemp("console") / "run.py"
    path.write_text(RUN)
    return path


def in_terminal(program, width, **environ):
    """Output of a program in a pseudo-terminal of `width` columns."""
    main, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    env = {**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ}
    command = [sys.executable, str(program)]
    process = subprocess.Popen(
        command,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    os.close(secondary)
    output = b""
    while True:
        try:
            more = os.read(main, 65536)
        except OSError:  # how Linux reports that the other end has closed
            break
        if not more:
            break
        output += more
    os.close(main)
    assert process.wait(timeout=240) == 0, output.decode(errors="replace")
    return output.decode(environ.get("PYTHONIOENCODING", "utf-8"))


def test_a_log_has_a_line_for_the_first_every_nth_and_the_last_step():
    lines = log_of(range(1, 26), 25, log_every=10)
    assert lines[0].split()[0] == "step"
    assert [line.split()[0] for line in lines[1:-1]] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[-1] == "done: step 25/25 after 0:00:25"


def test_eta_counts_down_from_the_second_step_on():
    lines = log_of(range(1, 26), 25, log_every=10)
    assert [line.split()[-1] for line in lines[1:-1]] == ["-", "0:00:15", "0:00:05", "0:00:00"]


def test_a_skipped_step_is_shown_at_once_and_marked():
    lines = log_of(range(1, 26), 25, log_every=10, skips=(3, 14))
    marked = [line.split() for line in lines if line.endswith(" SKIP")]
    assert [(line[0], line[5]) for line in marked] == [("3/25", "1"), ("14/25", "2")]


def test_skips_before_a_resume_are_not_shown_again():
    lines = log_of(range(11, 21), 20, log_every=5, start_step=10, skipped_steps=7)
    assert not [line for line in lines if "SKIP" in line]
    assert [line.split()[0] for line in lines[1:-1]] == ["11/20", "15/20", "20/20"]


def test_the_heading_returns_in_a_long_log():
    lines = log_of(range(1, 101), 100, log_every=1)
    assert [index for index, line in enumerate(lines) if "grad_norm" in line] == [
        0,
        HEADING_EVERY + 1,
        2 * HEADING_EVERY + 2,
    ]


@pytest.mark.slow
def test_a_file_never_gets_codes_whatever_the_environment_asks_for(program):
    asked = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"), "1")
    done = run_script(program, env={**os.environ, **asked})
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert all(len(line) <= 86 for line in lines)
    assert [line.split()[0] for line in lines if "/40 " in line and "done" not in line] == [
        "1/40",
        "10/40",
        "20/40",
        "23/40",
        "30/40",
        "40/40",
    ]


def test_long_messages_are_not_broken_in_a_log():
    file = io.StringIO()
    console = Console(5, file=file)
    console.print("x" * 300 + " [bold]not markup[/bold] :smile:")
    assert file.getvalue() == "x" * 300 + " [bold]not markup[/bold] :smile:\n"


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_a_terminal_gets_a_bar_and_the_latest_figures(program, width):
    output = in_terminal(program, width)
    assert COLOUR.search(output)
    frames = [frame for frame in re.split(r"[\r\n]+", ESCAPE.sub("", output)) if frame]
    bars = [frame for frame in frames if "━" in frame]
    assert len(bars) > 2
    assert all(len(frame) <= width for frame in frames)
    assert re.fullmatch(
        r"\d+/40  ━+[━╸╺]* +\d+%  (4\.32k|-) tok/s  ETA (\d:\d\d:\d\d|-) *", bars[len(bars) // 2]
    )
    figures = [frame for frame in frames if frame.startswith("loss ") and "scale 2^16" in frame]
    assert any(
        "saturated 3.50%" in frame and "lr 6.00e-04" in frame and "grad_norm 1.000" in frame
        for frame in figures
    )
    assert any("SKIP 1" in frame for frame in figures)
    assert "from elsewhere" in frames
    assert frames[-1].startswith("done: step 40/40 after 0:00:0")
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor must come back"


@pytest.mark.slow
def test_no_color_is_honoured_on_a_terminal(program):
    output = in_terminal(program, 80, NO_COLOR="1")
    codes = {code for found in COLOUR.findall(output) for code in found[2:-1].split(";")}
    assert not [code for code in codes if code.isdigit() and int(code) >= 30]
    assert "━" in output


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines(program):
    output = in_terminal(program, 80, TERM="dumb")
    assert "\x1b" not in output
    assert "40/40" in output


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_an_ascii_bar(program):
    output = in_terminal(program, 80, PYTHONIOENCODING="ascii")
    assert output.isascii()
    assert "run: gr??e ? 2" in output
    assert re.search(r"/40  -+", ESCAPE.sub("", output))


def test_other_processes_are_silent():
    file = io.StringIO()
    console = Console(5, is_main=False, file=file)
    console.print("hello")
    console.write(1, facts(1))
    console.close()
    assert file.getvalue() == ""


def test_a_stopped_run_prints_its_step():
    file = io.StringIO()
    console = Console(100, file=file, clock=Clock())
    console.write(7, facts(7))
    console.close(exit_code=1)
    assert file.getvalue().splitlines()[-1] == "stopped: step 7/100 after 0:00:00"


SILENCED = """
import sys
from megalowbit.telemetry.sinks.console import Console
console = Console(3, log_every=1)
sys.stdin.readline()
for step in (1, 2, 3):
    console.write(step, {"loss": 1.0})
console.close()
print("went on", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_goes_on_where_whoever_read_its_log_has_ended():
    process = subprocess.Popen(
        [sys.executable, "-c", SILENCED], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == "went on\n"
    assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_bar", [True, False])
def test_a_run_goes_on_where_the_terminal_of_its_log_is_closed(has_bar):
    terminal, stream = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SILENCED.replace("log_every=1", f"log_every=1, has_bar={has_bar}")],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(stream)
    os.close(terminal)
    process.stdin.write("\n")
    process.stdin.close()
    expected = "the log cannot be written (Input/output error): training goes on without it\nwent on\n"
    assert process.stderr.read() == expected
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_run_goes_on_where_the_disk_of_its_log_is_full():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", SILENCED], cwd=ROOT, text=True, input="\n", stdout=full,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    expected = "the log cannot be written (No space left on device): training goes on without it\nwent on\n"
    assert (ended.returncode, ended.stderr) == (0, expected)
