import math

import fp4_reference
import numpy as np
import pytest
import torch

from megalowbit.formats.block_format import NVFP4
from megalowbit.quantize.encoding import COUNT_NAMES
from megalowbit.quantize.names import quantizer

EVERY_KIND_OF_SCALE = ("nvfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16", "mxfp4e2m1bnosr:floor", "int8b", "fp8e4m3")


def counts_of(x, name="nvfp4e2m1bnosr", **kwargs):
    result = quantizer(name).quantize(x, with_counts=True, **kwargs)
    return dict(zip(COUNT_NAMES, result.counts.tolist(), strict=True)), result


def brute_force(x: torch.Tensor, name: str) -> tuple[dict[str, int], float, float]:
    """Element by element in float64; finite input only, nothing subnormal."""
    encoding = quantizer(name).encoding
    format = encoding.format
    blocks = fp4_reference.Blocks(
        x.numpy(),
        grid=format.element.grid,
        block=format.block,
        scale=format.scale,
        scale_rounding=encoding.scale_rounding,
        is_power_of_two=encoding.is_power_of_two,
    )
    height, width = format.block or (x.shape[0], 10**9)
    found = dict.fromkeys(COUNT_NAMES, 0)
    found["elements"], found["blocks"] = x.numel(), blocks.stored.size
    amax = np.array(blocks.amax).reshape(blocks.stored.shape)
    found["zero_blocks"] = int(((amax if format.scale == "e8m0" else blocks.stored) == 0).sum())
    error = norm = 0.0
    for (row, col), value in np.ndenumerate(x.double().numpy()):
        stored = float(blocks.stored[row // height, col // width])
        scale = {
            "e4m3": lambda s: fp4_reference.E4M3[int(s)],
            "e8m0": lambda s: 2.0 ** (s - 127),
            "fp32": float,
        }
        scale = scale[format.scale](stored) * (blocks.tensor_scale if format.scale == "e4m3" else 1)
        quantised = float(blocks.values[row, col]) * (blocks.tensor_scale or 1)
        found["underflow"] += value != 0 and quantised == 0
        if scale:
            found["saturated"] += abs(value) > format.element.max * scale * (1 + 2.0**-20)
            found["upper_half"] += abs(value) > format.element.max / 2 * scale * (1 + 2.0**-20)
        error += (value - quantised) ** 2
        norm += value**2
    return found, error, norm


@pytest.mark.parametrize("name", EVERY_KIND_OF_SCALE)
@pytest.mark.parametrize("shape", [(8, 64), (5, 21), (1, 3)])
def test_counts_equal_their_definitions_element_by_element(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[0, :2] = torch.tensor([0.0, 500.0])  # dwarfs the rest: underflow and zero blocks
    if shape[0] > 2:
        x[1, 16:32] = 0
    counts, result = counts_of(x, name)
    expected, error, norm = brute_force(x, name)
    assert counts == expected
    # decoding rounds to fp32: 2⁻²⁴ of a number
    assert result.error[0].item() == pytest.approx(error, rel=1e-6, abs=norm * 2.0**-47)
    assert result.error[1].item() == pytest.approx(norm, rel=1e-12)


def test_a_gaussian_clips_three_and_a_half_percent_and_none_under_scales_rounded_up():
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    counts, _ = counts_of(x)
    assert counts["saturated"] / counts["elements"] == pytest.approx(0.035, abs=0.003)
    assert counts["saturated_scales"] == 0
    assert counts_of(x, "nvfp4e2m1b:unbiased")[0]["saturated"] == 0
    assert counts_of(x, "mxfp4e2m1bnosr")[0]["saturated"] == 0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.7, 1e-3, 12345.678, 3e-20])
@pytest.mark.parametrize("name", ["nvfp4e2m1bnosr:fp32_scale", "fp4e2m1bnosr", "int8"])
def test_a_constant_tensor_saturates_nowhere(name, value):
    counts, _ = counts_of(torch.full((4, 32), value), name)
    assert counts["saturated"] == 0
    assert counts["upper_half"] == 128
    assert counts["saturated_scales"] == 0


def test_padding_counts_as_nothing():
    counts, _ = counts_of(torch.ones(3, 17))
    assert (counts["elements"], counts["blocks"], counts["zero_blocks"], counts["underflow"]) == (51, 6, 0, 0)


@pytest.mark.parametrize(
    ("name", "zero_blocks"), [("nvfp4e2m1bnosr", 4), ("mxfp4e2m1bnosr", 2), ("int8b", 4), ("int8", 1)]
)
def test_zeros_are_zero_blocks_and_no_underflow(name, zero_blocks):
    counts, result = counts_of(torch.zeros(2, 32), name)
    assert (counts["zero_blocks"], counts["underflow"], counts["saturated"]) == (zero_blocks, 0, 0)
    assert result.error.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["int8b", "int8"])
def test_elements_under_an_fp32_scale_that_vanished_count_as_underflow_only(name):
    counts, _ = counts_of(torch.full((1, 16), 1e-45), name)
    assert (counts["underflow"], counts["saturated"], counts["zero_blocks"]) == (16, 0, 1)


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


@pytest.mark.parametrize("name", EVERY_KIND_OF_SCALE)
def test_finite_neighbours_of_a_non_finite_element_count_nowhere(name):
    counts, result = counts_of(torch.tensor([[math.nan] + [1.0] * 15]), name)
    expected = dict.fromkeys(COUNT_NAMES, 0) | {"elements": 16, "nonfinite": 1, "blocks": 1}
    assert counts == expected
    assert result.error.tolist() == [0, 0]


def test_a_maximum_from_another_shard_saturates_scales_and_elements():
    x = torch.ones(2, 16)
    x[1] = 0.5
    counts, _ = counts_of(x, tensor_amax=torch.tensor(0.5))
    assert counts["saturated_scales"] == 1
    assert counts["saturated"] == 16


def test_counts_of_a_tensor_are_the_sum_of_its_parts():
    x = torch.randn(301, 80, generator=torch.Generator().manual_seed(4))
    counts, whole = counts_of(x)
    parts = [counts_of(part, tensor_amax=x.abs().max()) for part in x.split(100)]
    assert counts == {name: sum(part[name] for part, _ in parts) for name in COUNT_NAMES}
    assert whole.error[0].item() == pytest.approx(sum(r.error[0].item() for _, r in parts), rel=1e-12)


def test_counts_are_absent_unless_asked_for_and_zero_for_nothing():
    result = quantizer("nvfp4e2m1b").quantize(torch.randn(2, 16))
    assert result.counts is None
    assert result.error is None
    counts, empty = counts_of(torch.empty(0, 16))
    assert not any(counts.values())
    assert empty.error.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_count_as_their_fp32_values_do(dtype):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    half, full = counts_of(x), counts_of(x.float())
    assert half[0] == full[0]
    assert torch.equal(half[1].error, full[1].error)


def test_blocks_are_those_of_the_format():
    counts, _ = counts_of(torch.ones(5, 40))
    rows, cols = NVFP4.scales_shape(5, 40)
    assert counts["blocks"] == rows * cols
