"""What one process can show; runs that lose ranks are in tests/distributed/test_watchdog.py."""

import faulthandler
import gc
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalowbit.distributed.agreement import raised_on_all_ranks
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import TransientError
from megalowbit.supervision.diagnosis import Diagnosis
from megalowbit.supervision.settings import WatchdogSettings
from megalowbit.supervision.watchdog import Watchdog, _Termination, print_error


def watchdog(**settings):
    return Watchdog(WatchdogSettings(**settings), ProcessIdentity())


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("megalowbit")}


def test_one_rank_needs_no_process_group_and_nothing_is_left_behind():
    with watchdog(timeout=5.0) as watched:
        assert threads() == {"megalowbit-watchdog"}
        watched.mark("step 1")
    assert not threads()  # one that outlived the block might end a process that has left it


def with_ranks(settings):
    """A watchdog with a heartbeat thread that has not begun, as if there were several ranks."""
    start_process_group()
    watched = Watchdog(settings, ProcessIdentity())
    watched._heartbeat_thread = watched._new_heartbeat_thread()
    return watched


def test_a_thread_about_to_end_the_process_lets_an_error_of_all_ranks_pass(monkeypatch):
    ends, is_diagnosed = [], threading.Event()

    def diagnose():
        is_diagnosed.set()
        return Diagnosis("rank 1 does not answer")

    error = raised_on_all_ranks("saved", is_transient=True)
    watched = with_ranks(WatchdogSettings(timeout=60.0, silence=None))
    monkeypatch.setattr(watched, "_diagnose", diagnose)
    monkeypatch.setattr(watched, "_end", ends.append)

    def leave_late():
        with watched:
            watched._heartbeat_thread.start()
            watched._alarmed.set()
            assert is_diagnosed.wait(100)
            raise error  # within 2.5 seconds, which the thread waits before it ends the process

    with pytest.raises(TransientError) as seen:
        leave_late()
    assert seen.value is error
    assert ends == []


LIMIT = WatchdogSettings().termination_seconds


@pytest.mark.parametrize(
    ("changes", "is_overdue"),
    [
        ({}, True),
        ({"lost": LIMIT - 5}, False),
        ({"lost": None}, False),
        ({"began": LIMIT - 5}, False),  # a new step begins after the loss
        ({"is_save": True}, False),
        ({"has_lost_launcher": False}, False),
        ({"settings": {"stop_with_launcher": True}}, True),
        ({"settings": {"stop_with_launcher": False}}, False),
        ({"settings": {"termination_seconds": LIMIT + 20}}, False),
        ({"steps": [1.0, 1.0, 60.0]}, True),
        ({"steps": [LIMIT]}, False),
        ({"steps": [LIMIT / 2, LIMIT / 2, 1.0]}, False),
    ],
)
def test_a_step_is_overdue_without_the_launcher_after_a_time(changes, is_overdue):
    case = {"lost": LIMIT + 5, "began": LIMIT + 7, "is_save": False, "has_lost_launcher": True, **changes}
    watched = with_ranks(WatchdogSettings(**case.get("settings", {})))
    now, thread = time.monotonic(), watched._heartbeat_thread
    thread.lost_at = None if case["lost"] is None else now - case["lost"]
    thread.has_lost_launcher = case["has_lost_launcher"]
    watched._steps.extend(case.get("steps", []))
    watched._mark = watched._mark._replace(time=now - case["began"], is_save=case["is_save"])
    assert watched._is_overdue_without_launcher() == is_overdue


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_ends_while_it_is_described_does_not_end_the_process(monkeypatch, goes_on):
    watched, ends = with_ranks(WatchdogSettings(timeout=6.0)), []
    monkeypatch.setattr(watched, "_end", ends.append)
    found = Diagnosis("the launcher's store ended")

    def diagnose():
        watched._diagnosis = found
        if goes_on:
            watched.mark("the save of step 7", is_save=True)
        return found

    monkeypatch.setattr(watched, "_diagnose", diagnose)
    watched._end_without_launcher()
    assert ends == ([] if goes_on else [found])
    assert watched._diagnosis is None


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_ends_while_sigterm_is_reported_does_not_end_the_process(monkeypatch, goes_on):
    reported, codes = [], []
    watched = Watchdog(WatchdogSettings(timeout=None), ProcessIdentity(), report=reported.append)
    watched._sigterm = _Termination(watched._mark, time.monotonic(), {})

    def state(first):
        if goes_on:
            watched.mark("the save of step 7", is_save=True)
        return "rank 1 waited"

    monkeypatch.setattr(watched, "_state_since", state)
    monkeypatch.setattr("os._exit", codes.append)
    try:
        watched._end_by_signal()
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert codes == ([] if goes_on else [143])
    assert len(reported) == len(codes)


def test_without_a_timeout_one_thread_handles_sigterm_and_groups_keep_their_timeouts():
    start_process_group()
    group = dist.new_group([0])
    before = group._get_backend(torch.device("cpu")).options._timeout
    with watchdog(timeout=None) as watched:
        assert threads() == {"megalowbit-watchdog"}
        watched.finish()
    assert group._get_backend(torch.device("cpu")).options._timeout == before
    assert not threads()  # one that outlived the block might end a process that has left it


def test_groups_get_the_timeout_even_those_made_after_the_engine():
    start_process_group()
    group = dist.new_group([0])
    with watchdog(timeout=33.0):
        pass
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 33.0


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), TransientError("x"), RuntimeError("gloo/transport")]
)
def test_errors_of_a_single_rank_are_unchanged(error):
    with pytest.raises(type(error)) as seen, watchdog(timeout=5.0):
        raise error
    assert seen.value is error


@pytest.mark.slow
def test_a_loop_that_advances_is_not_interrupted():
    with watchdog(timeout=5.0) as watched:
        end = time.monotonic() + 6.5
        while time.monotonic() < end:
            time.sleep(0.1)
            watched.mark("step")
    assert watched._diagnosis is None


def test_a_slow_step_is_reported_with_the_median_of_earlier_steps():
    watched = watchdog(slow_step=4.0)
    for seconds in [5.0, *[0.5] * 8]:
        assert watched.step_ended(seconds) is None  # the first is slow, and nine are few
    assert watched.step_ended(9.0) is None
    assert watched.step_ended(2.0) is None  # not slower than four medians
    assert watched.step_ended(2.1) == "the step took 2.1 s, 4 times the median of the last 11 (0.5 s)"


def test_a_permanently_slower_run_is_reported_only_at_first():
    watched = watchdog(slow_step=2.0)
    for _ in range(60):
        watched.step_ended(1.0)
    lines = [watched.step_ended(10.0) for _ in range(60)]
    assert "times the median of the last 50 (1 s)" in lines[0]
    assert lines[24] is not None
    assert not any(lines[26:])


def test_null_disables_slow_step_warnings():
    watched = watchdog(slow_step=None)
    for _ in range(20):
        watched.step_ended(1.0)
    assert watched.step_ended(1e6) is None


def test_an_error_that_another_rank_reports_is_not_printed_twice(capsys):
    error = TransientError("rank 1 does not answer")
    print_error(error)
    error.is_reported = True
    print_error(error)
    assert capsys.readouterr().err == "error: rank 1 does not answer\n"


def test_the_code_on_the_page_of_faults_runs():
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    seen = {"loader": range(3)}
    exec(code, seen)
    assert seen["watchdog"]._mark.what == "step 3"


def test_marks_keep_no_objects_alive():
    with watchdog(timeout=5.0) as watched:
        before = len(gc.get_objects())
        for step in range(1000):
            watched.mark(f"step {step}")
            watched.step_ended(0.1)
        assert len(gc.get_objects()) - before < 200
