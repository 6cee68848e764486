"""Errors of packed weights, with numbers that can be checked by hand."""

import math

import pytest
import torch

from megalowbit.hf.packed.report import weight_error, worst_errors


def test_errors_of_weights():
    weight = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    found = weight_error("a", weight, torch.tensor([[3.0, -3.5], [0.0, 0.0]]))
    assert found.snr_db == pytest.approx(10 * math.log10(25 / 0.25))
    assert found.largest == 0.125
    exact = weight_error("b", weight, weight.bfloat16())
    assert (exact.snr_db, exact.largest) == (math.inf, 0.0)
    assert worst_errors([exact, found], 1).splitlines()[1].split() == ["a", "20.00", "0.1250"]
    assert weight_error("c", torch.zeros(2, 2), torch.ones(2, 2)).snr_db == -math.inf
