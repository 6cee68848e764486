import math

import numpy as np
import pytest
import torch

from megalowbit.formats.packing import PIECE_BLOCKS
from megalowbit.quantize.counts import COUNT_NAMES
from megalowbit.quantize.names import quantizer


def counts_of(x, **kwargs):
    result = quantizer("nvfp4e2m1bnosr").quantize(x, with_counts=True, **kwargs)
    return dict(zip(COUNT_NAMES, result.counts.tolist(), strict=True)), result


def brute_force(reference, x: np.ndarray) -> dict[str, int]:
    elements, scales, tensor_scale = reference.quantize(x)
    found = dict.fromkeys(COUNT_NAMES, 0)
    found["elements"], found["blocks"] = x.size, scales.size
    found["zero_blocks"] = int((scales == 0).sum())
    for (row, col), value in np.ndenumerate(x.astype(np.float64)):
        scale = scales[row, col // 16] * tensor_scale
        found["underflow"] += value != 0 and elements[row, col] * scale == 0
        if scale:
            found["saturated"] += abs(value) > 6 * scale * (1 + 2.0**-20)
            found["upper_half"] += abs(value) > 3 * scale * (1 + 2.0**-20)
    return found


@pytest.mark.parametrize("shape", [(8, 64), (5, 21), (1, 3)])
def test_counts_equal_their_definitions_element_by_element(reference, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[0, :2] = torch.tensor([0.0, 500.0])  # dwarfs the rest: underflow and zero blocks
    counts, result = counts_of(x)
    assert counts == brute_force(reference, x.numpy())
    expected = reference.dequantized(x.numpy())
    exact = x.double().numpy()
    assert result.error[0].item() == pytest.approx(((exact - expected) ** 2).sum(), rel=1e-6)
    assert result.error[1].item() == pytest.approx((exact**2).sum(), rel=1e-12)


def test_a_gaussian_clips_three_and_a_half_percent():
    counts, _ = counts_of(torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)))
    assert counts["saturated"] / counts["elements"] == pytest.approx(0.035, abs=0.003)
    assert counts["saturated_scales"] == 0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.7, 1e-3, 12345.678, 3e-20])
def test_a_constant_tensor_saturates_nowhere(value):
    counts, _ = counts_of(torch.full((4, 32), value))
    assert counts["saturated"] == 0
    assert counts["upper_half"] == 128
    assert counts["saturated_scales"] == 0


def test_padding_counts_as_nothing():
    counts, _ = counts_of(torch.ones(3, 17))
    assert (counts["elements"], counts["blocks"], counts["zero_blocks"], counts["underflow"]) == (51, 6, 0, 0)


def test_zeros_are_zero_blocks_and_no_underflow():
    counts, result = counts_of(torch.zeros(2, 32))
    assert (counts["zero_blocks"], counts["underflow"], counts["saturated"]) == (4, 0, 0)
    assert result.error.tolist() == [0, 0]


def test_non_finite_elements_are_counted_and_leave_the_error_finite():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    x[0, 0], x[0, 1], x[3, 20] = math.inf, math.nan, -math.inf
    counts, result = counts_of(x)
    assert counts["nonfinite"] == 3
    assert counts["zero_blocks"] == 0
    kept = torch.ones(4, 32, dtype=torch.bool)
    kept[0, :16] = kept[3, 16:] = False
    assert result.error[1].item() == pytest.approx(x[kept].double().square().sum().item(), rel=1e-12)
    difference = (result.dequantize() - x)[kept].double()
    assert result.error[0].item() == pytest.approx(difference.square().sum().item(), rel=1e-6)


def test_a_maximum_from_another_shard_saturates_scales_and_elements():
    x = torch.ones(2, 16)
    x[1] = 0.5
    counts, _ = counts_of(x, tensor_amax=torch.tensor(0.5))
    assert counts["saturated_scales"] == 1
    assert counts["saturated"] == 16


def test_counts_over_several_pieces_are_the_sum_of_their_parts():
    x = torch.randn(2 * PIECE_BLOCKS + 5, 16, generator=torch.Generator().manual_seed(4))
    amax = x.abs().max()
    counts, whole = counts_of(x)
    parts = [counts_of(part, tensor_amax=amax) for part in x.split(10_000)]
    assert counts == {name: sum(part[name] for part, _ in parts) for name in COUNT_NAMES}
    assert whole.error[0].item() == pytest.approx(sum(r.error[0].item() for _, r in parts), rel=1e-12)


def test_counts_are_absent_unless_asked_for():
    result = quantizer("nvfp4e2m1b").quantize(torch.randn(2, 16))
    assert result.counts is None
    assert result.error is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_count_as_their_fp32_values_do(dtype):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    half, full = counts_of(x), counts_of(x.float())
    assert half[0] == full[0]
    assert torch.equal(half[1].error, full[1].error)
