"""Counters of the micro-batch in the memory of a device."""

import numpy as np
import torch

from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments as job
from megalowbit.quantize.triton.step_counters import StepCounters


def test_a_counter_made_in_inference_mode_is_written_in_training():
    step, device = np.array(3), torch.device("cpu")
    counters = StepCounters(step)
    with torch.inference_mode():
        counter, lag = counters.at(3, device)
    assert (counter[0].item(), lag) == (3, 0)
    step[...] = 4
    again, lag = counters.at(4, device)
    assert again is counter
    assert (counter[0].item(), lag) == (4, 0)
    with torch.inference_mode():
        step[...] = 6
        assert counters.at(5, device) == (counter, 1)
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
