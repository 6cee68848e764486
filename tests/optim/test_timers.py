import time

import pytest
import torch

from megalowbit.optim.timers import StepTimers, timed

SLOW = 0.02  # seconds


def test_each_phase_has_the_mean_of_its_times():
    timers = StepTimers()
    for seconds in (SLOW, 2 * SLOW):
        with timers("slow"):
            time.sleep(seconds)
    with timers("quick"):
        pass
    found = timers.milliseconds()
    assert list(found) == ["slow", "quick"]
    assert 1.5e3 * SLOW <= found["slow"] < 15e3 * SLOW
    assert 0 <= found["quick"] < 1e3 * SLOW


def test_a_report_holds_only_what_has_finished_since_the_last():
    timers = StepTimers()
    with timers("first"):
        pass
    assert list(timers.milliseconds()) == ["first"]
    with timers("second"):
        assert timers.milliseconds() == {}
    assert list(timers.milliseconds()) == ["second"]


def test_phases_nest():
    timers = StepTimers("cpu")
    with timers("outer"), timers("inner"):
        time.sleep(SLOW)
    found = timers.milliseconds()
    assert found["outer"] >= found["inner"] >= 1e3 * SLOW


def test_a_phase_that_fails_is_not_counted():
    timers = StepTimers()
    with pytest.raises(ZeroDivisionError), timers("bad"):
        raise ZeroDivisionError
    assert timers.milliseconds() == {}


def test_no_timers_time_nothing():
    with timed(None, "anything"):
        pass
    timers = StepTimers()
    with timed(timers, "something"):
        pass
    assert list(timers.milliseconds()) == ["something"]


class Device:
    """A stand-in for CUDA, on which the test decides when events have passed."""

    def __init__(self):
        self.clock, self.passed, self.recorded = 0.0, 0, 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == "stream"
                device.recorded += 1
                self.place = device.recorded
                self.time = device.clock = device.clock + 1.0

            def query(self):
                return self.place <= device.passed

            def elapsed_time(self, end):
                assert end.query()
                return end.time - self.time

            def synchronize(self):
                raise AssertionError("a timer waited for the device")

        self.event = Event


@pytest.fixture
def device(monkeypatch):
    device = Device()

    def refuse(*_):
        raise AssertionError("a timer waited for the device")

    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    return device


def test_events_are_read_after_the_device_has_passed_them_without_waiting(device):
    timers = StepTimers("cuda")
    for phase in ("a", "b"):
        with timers(phase):
            pass
    assert timers.milliseconds() == {}
    device.passed = 3  # all of a, the start of b
    assert timers.milliseconds() == {"a": 1.0}
    device.passed = 4
    assert timers.milliseconds() == {"b": 1.0}


def test_passed_events_are_freed_without_a_report(device):
    timers = StepTimers("cuda")
    for _ in range(50):
        with timers("a"):
            pass
        device.passed = device.recorded - 2
    assert len(timers._pending) <= 2


@pytest.mark.gpu
def test_the_devices_time_is_measured_without_waiting_for_it():
    timers = StepTimers("cuda")
    with timers("warm-up"):
        torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    timers.milliseconds()
    with timers("sleep"):
        torch.cuda._sleep(200_000_000)
    assert timers.milliseconds() == {}
    torch.cuda.synchronize()
    assert timers.milliseconds()["sleep"] > 20


def test_memory_does_not_grow_without_a_report():
    timers = StepTimers()
    for _ in range(1000):
        with timers("a"):
            pass
    assert len(timers._finished) == 1
    assert len(timers._finished["a"]) == 2  # sum and count
