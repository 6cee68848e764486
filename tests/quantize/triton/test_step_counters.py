"""Counters of the micro-batch in the memory of a device."""

import numpy as np
import pytest
import torch

from megalowbit import cuda_graphs
from megalowbit.errors import UserError
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments as job
from megalowbit.quantize.triton import step_counters
from megalowbit.quantize.triton.step_counters import StepCounters


def test_a_counter_made_in_inference_mode_is_written_in_training():
    step, device = np.array(3), torch.device("cpu")
    counters = StepCounters(step)
    with torch.inference_mode():
        counter, lag, _ = counters.at(3, device)
    assert (counter[0].item(), lag) == (3, 0)
    step[...] = 4
    again, lag, _ = counters.at(4, device)
    assert again is counter
    assert (counter[0].item(), lag) == (4, 0)
    with torch.inference_mode():
        step[...] = 6
        assert counters.at(5, device) == (counter, 1, 0)
    assert counter[0].item() == 6


def test_the_keys_of_a_stream_share_a_counter_that_holds_the_micro_batch():
    stream, cpu = RandomStream(1, 0), torch.device("cpu")
    seen = []
    for _ in range(3):
        stream.advance()
        one, other = (job.random_arguments(stream.key(name, "input"), cpu) for name in "ab")
        assert one["step"] is other["step"]
        assert one["key_low"] != other["key_low"]
        assert (one["step"].tolist(), one["lag"]) == ([stream.step, 0], 0)
        seen.append({**one, "step": one["step"].data_ptr()})
    assert seen[0] == seen[1] == seen[2]
    late = job.random_arguments(stream.key("a", "input", step=1), cpu)
    assert late["step"][0].item() - late["lag"] == 1
    with stream.at(2):
        again = job.random_arguments(stream.key("a", "input"), cpu)
    assert again["step"][0].item() - again["lag"] == 2
    stream.load_state_dict({"seed": 1, "step": 0})
    first = job.random_arguments(stream.key("a", "input"), cpu)
    assert first["step"][0].item() - first["lag"] == 0


def test_each_stream_and_each_capture_has_a_counter(monkeypatch):
    step, cpu, streams, captures = np.array(5), torch.device("cpu"), [0], [None]
    monkeypatch.setattr(step_counters, "_stream", lambda _device: streams[-1])
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda _device: captures[-1])
    counters, found = StepCounters(step), {}
    for number, place in enumerate(((0, None), (1, None), (0, 1), (0, 2), (1, 2))):
        streams.append(place[0])
        captures.append(place[1])
        step[...] = 5 + number // 2
        found[place] = counters.at(int(step), cpu)
        assert counters.at(int(step), cpu).counter.data_ptr() == found[place].counter.data_ptr()
        assert int(found[place].counter[0]) - found[place].lag == int(step)
    assert len({each.counter.data_ptr() for each in found.values()}) == len(found)
    assert [each.key_change for each in found.values()] == [0, 0, 0, 0, 1]


def test_a_step_makes_counters_for_captures_in_its_micro_batch_too(monkeypatch):
    step, cpu, captures = np.array(5), torch.device("cpu"), [None]
    monkeypatch.setattr(step_counters, "ROWS", 2)
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda _device: captures[-1])
    counters = StepCounters(step)
    counters.at(5, cpu)
    captures.append(1)
    first = counters.at(5, cpu)
    captures.append(2)
    counters.at(5, cpu)
    captures.append(3)
    with pytest.raises(UserError, match="run one step first"):
        counters.at(5, cpu)
    captures.append(None)
    counters.at(5, cpu)
    captures.append(3)
    third = counters.at(5, cpu)
    assert third.counter.tolist() == first.counter.tolist() == [1, 0]
    assert third.counter.data_ptr() != first.counter.data_ptr()


@pytest.mark.parametrize("step", [0, 2**31, 2**63 - 2])
def test_a_capture_starts_from_a_known_value_and_the_host_keeps_its_own(monkeypatch, step):
    stream, cpu = RandomStream(1, 0), torch.device("cpu")
    stream.load_state_dict({"seed": 1, "step": step})
    before = job.random_arguments(stream.key("a", "input"), cpu)
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda _device: 1)
    stream.advance()
    captured = job.random_arguments(stream.key("a", "input"), cpu)
    for replay in range(3):
        assert captured["step"].tolist() == [1 + replay, 0]
        assert 1 + replay - captured["lag"] == step + 1 + replay
        captured["step"][0] += 1
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda _device: None)
    assert before["step"].tolist() == [step, 0]
    after = job.random_arguments(stream.key("a", "input"), cpu)
    assert after["step"] is before["step"]
    assert after["step"].tolist() == [step + 1, 0]
    assert (after["key_low"], after["key_high"]) == (captured["key_low"], captured["key_high"])
