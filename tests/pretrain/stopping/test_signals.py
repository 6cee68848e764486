"""Signals sent to real processes: those that wait, and Ctrl-C that waits where it must."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import Forked
from quick_cases import slow_except

from megalowbit.pretrain.stopping import signals as stop_signals
from megalowbit.pretrain.stopping.signals import StartSignals, pending_stop_signal, uninterrupted

ROOT = Path(__file__).parents[3]
SECONDS = 240  # on a machine with much else to do


@pytest.fixture(autouse=True)
def _interrupts_as_in_a_terminal():
    """Whoever starts tests in the background of a shell has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


WAITING = """
import os, signal, sys
from megalowbit.pretrain.stopping.signals import block_stop_signals, pending_stop_signal
block_stop_signals()
print(pending_stop_signal(), flush=True)
sys.stdin.readline()
import torch  # threads that come later inherit the mask
torch.rand(512, 512) @ torch.rand(512, 512)
print("imported", flush=True)
sys.stdin.readline()
print(pending_stop_signal().name, pending_stop_signal().name, flush=True)
"""


@pytest.mark.parametrize("name", slow_except(["SIGUSR1"], ["SIGUSR1", "SIGTERM"]))
def test_a_stop_signal_during_startup_is_kept_until_it_is_read(name):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "None\n"
    is_early = name == "SIGUSR1"
    if is_early:
        process.send_signal(signal.Signals[name])
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "imported\n"
    if not is_early:
        process.send_signal(signal.Signals[name])
    output, _ = process.communicate("\n", timeout=SECONDS)
    assert output == f"{name} {name}\n"
    assert process.returncode == 0


STARTING = """
import sys
from megalowbit.pretrain.stopping import signals
from megalowbit.pretrain.stopping.signals import StartSignals, block_stop_signals, pending_stop_signal
signals.SECONDS_BETWEEN_CHECKS = 0.05
block_stop_signals()
start = StartSignals().__enter__()
if sys.argv[1] == "begun":
    start.stop()
print("there", flush=True)
sys.stdin.readline()
print(pending_stop_signal().name)
"""


@pytest.mark.parametrize("state", ["starting", "begun"])
def test_sigterm_ends_a_starting_process_and_is_deferred_in_a_training_one(state):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGTERM)
    if state == "starting":
        assert process.wait(timeout=SECONDS) == 143
        assert process.stderr.read() == "ended by SIGTERM before the first step\n"
    else:
        time.sleep(0.2)  # a process that still looked for signals would end now
        assert process.communicate("\n", timeout=SECONDS)[0] == "SIGTERM\n"
        assert process.returncode == 0


RENDEZVOUS = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from megalowbit.pretrain.stopping.signals import StartSignals
with StartSignals(is_main=sys.argv[1] == "main"):
    store = TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=600))
    print("there", flush=True)
    store.get("never set")  # in C++, which comes back when its time is over
"""


def is_asleep(process, readings=20):
    """Whether the main thread was seen waiting in the kernel so many times in a row."""
    for _ in range(readings):
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(("name", "line"), [("main", "interrupted before the first step\n"), ("other", "")])
def test_an_interrupt_ends_a_process_that_waits_for_other_ranks(tmp_path, name, line):
    program, output, errors = (tmp_path / each for each in ("program.py", "output", "errors"))
    program.write_text(RENDEZVOUS)
    output.touch()
    process = Forked(program, name, output=output, errors=str(errors))
    end = time.monotonic() + SECONDS
    while output.read_text() != "there\n" or not is_asleep(process):
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert errors.read_text() == line


def test_a_keyboard_interrupt_is_raised_as_usual(monkeypatch):
    # a machine that stands still for the second would end this process, and all tests with it
    monkeypatch.setattr(stop_signals, "INTERRUPT_GRACE_SECONDS", 600.0)
    before = signal.set_wakeup_fd(-1)

    def start():
        with StartSignals():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert signal.set_wakeup_fd(before) == -1


def test_a_start_ends_with_exit_code_75_if_the_launcher_has_ended():
    code = "import time\nfrom megalowbit.pretrain.stopping.signals import StartSignals\n"
    code += "with StartSignals(has_launcher_ended=lambda: True):\n    time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    line = "ended before the first step: the launcher has ended\n"
    assert (done.returncode, done.stderr) == (75, line)


def test_without_a_signal_no_stop_request_is_pending():
    assert pending_stop_signal() is None


def test_an_interrupt_waits_for_the_end_of_the_block_and_then_raises():
    done = []

    def block():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("first half")
            time.sleep(0.01)  # a handler would have run by now
            done.append("second half")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["first half", "second half"]


def test_a_process_that_ignores_interrupts_still_ignores_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_the_block_an_interrupt_raises_at_once_and_does_not_hide_an_error_of_the_block():
    before = signal.getsignal(signal.SIGINT)

    def fail():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("full")

    with pytest.raises(OSError, match="full"), uninterrupted():
        fail()
    assert signal.getsignal(signal.SIGINT) is before
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
