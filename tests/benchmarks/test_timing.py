import types

import pytest
import torch

from benchmarks import timing


@pytest.fixture
def calls(monkeypatch):
    """What `gpu_seconds` asks of torch.cuda, in order, from a stand-in; two events are 40 ms apart."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append("record")

        def synchronize(self):
            seen.append("wait")

        def elapsed_time(self, _end):
            return 40.0

    properties = types.SimpleNamespace(L2_cache_size=60_000_000, uuid="0")
    fake = types.SimpleNamespace(
        Event=Event,
        synchronize=lambda: seen.append("synchronize"),
        _sleep=lambda cycles: seen.append(("sleep", cycles)),
        get_device_properties=lambda: properties,
    )
    monkeypatch.setattr(timing, "torch", types.SimpleNamespace(cuda=fake))
    monkeypatch.setattr(timing, "gpu_state", lambda: seen.append("state"))
    return seen


def test_the_gpu_sleeps_before_the_first_event_while_the_host_queues_all_repeats(calls):
    seconds, state = timing.gpu_seconds(lambda: calls.append("run"), repeats=4)
    assert seconds == pytest.approx(0.010)
    assert state is None
    assert calls[:3] == ["synchronize", "run", "synchronize"]
    name, cycles = calls[3]
    assert name == "sleep"
    assert cycles >= timing.SLEEP_CYCLES
    # the state is read while the runs are under way
    assert calls[4:] == ["record", "run", "run", "run", "run", "record", "state", "wait"]


def test_a_slow_host_makes_the_gpu_sleep_longer(calls, monkeypatch):
    clock = iter([0.0, 0.010])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timing.gpu_seconds(lambda: None, repeats=20)
    assert calls[2] == ("sleep", int(2 * 0.010 * 20 * timing.CYCLES_PER_SECOND))


def test_a_tensor_that_stays_in_the_cache_is_pointed_out(calls):
    assert "67 MB are less than 4 × the L2 cache of 60 MB" in timing.cache_note(2**26, "cuda")
    assert timing.cache_note(2**28, "cuda") == ""
    assert timing.cache_note(2**10, "cpu") == ""


def test_a_figure_of_a_gpu_is_printed_with_its_clock_and_power(capsys):
    times = timing.Times(["ours", "peer"])
    times["ours"] += [2e-3, 4e-3, 3e-3]
    times["peer"] += [1e-3, 2e-3, 1e-3]
    times.states["ours"] += [timing.GpuState(1700, 300.0), timing.GpuState(1980, 410.4)]
    timing.print_table("title", times, "peer", 3_000_000)
    ours, peer = capsys.readouterr().out.splitlines()[2:]
    assert "3.000 ms" in ours
    assert "1.0 GB/s" in ours
    assert "2.00 × peer" in ours
    assert ours.endswith("1840 MHz  355 W")
    assert "MHz" not in peer


def test_candidates_run_once_a_round_on_a_cpu():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in ("a", "b")}
    times = timing.interleaved(runs, 3, "cpu")
    assert seen == ["a", "a", "b", "b", *["a", "b"] * 3]
    assert all(len(values) == 3 for values in times.values())
    assert times.state("a") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_nvidias_driver_there_is_no_state():
    assert timing.gpu_state() is None
