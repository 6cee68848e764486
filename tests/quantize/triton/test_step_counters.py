"""Counters of the micro-batch in the memory of a device."""

import numpy as np
import torch

from megalowbit.quantize.triton.step_counters import StepCounters


def test_a_counter_made_in_inference_mode_is_written_in_training():
    step, device = np.array(3), torch.device("cpu")
    counters = StepCounters(step)
    with torch.inference_mode():
        counter, lag = counters.at(3, device)
    assert (counter.item(), lag) == (3, 0)
    step[...] = 4
    again, lag = counters.at(4, device)
    assert again is counter
    assert (counter.item(), lag) == (4, 0)
    with torch.inference_mode():
        step[...] = 6
        assert counters.at(5, device) == (counter, 1)
    assert counter.item() == 6
