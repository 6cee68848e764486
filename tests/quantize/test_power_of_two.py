"""Power-of-two tensor scales of NVFP4: errors, range, and exact operands in bf16."""

import itertools
import math

import numpy as np
import pytest
import torch

from megalowbit.quantize import reference
from megalowbit.quantize.backends import BACKEND_VARIABLE
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.packed_file import load_quantized, save_quantized

POWER_OF_TWO, FP32_SCALE = "nvfp4e2m1bnosr", "nvfp4e2m1bnosr:fp32_scale"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
)
E4M3 = E4M3[:-1]  # the last code is NaN


def gaussian(rows, cols, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def rounded(x, grid):
    """The nearest number of a grid; ties, which Gaussians do not have, go down."""
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    return np.where(x - grid[above - 1] <= grid[above] - x, grid[above - 1], grid[above])


def relative_error(x, is_power_of_two):
    """NVFP4 in float64, after the definition in arXiv:2509.25149 and not after our code."""
    blocks = x.double().numpy().reshape(-1, 16)
    tensor_scale = np.abs(blocks).max() / (6 * 448)
    if is_power_of_two:
        tensor_scale = 2.0 ** math.ceil(math.log2(tensor_scale))
    scales = rounded(np.abs(blocks).max(1, keepdims=True) / 6 / tensor_scale, E4M3) * tensor_scale
    decoded = np.sign(blocks) * rounded(np.abs(blocks / scales), E2M1) * scales
    return np.linalg.norm(decoded - blocks) / np.linalg.norm(blocks)


@pytest.mark.parametrize("name", [POWER_OF_TWO, FP32_SCALE])
def test_the_error_on_gaussians_is_that_of_float64(name):
    expected = [relative_error(gaussian(512, 512, seed), name == POWER_OF_TWO) for seed in range(3)]
    found = [
        ((quantizer(name)(x) - x).norm() / x.norm()).item()
        for x in (gaussian(512, 512, seed) for seed in range(3))
    ]
    assert found == pytest.approx(expected, rel=1e-5)
    assert np.mean(found) == pytest.approx(0.0952, abs=2e-4)


@pytest.mark.parametrize("options", ["nosr", "nosr:4over6", ":unbiased", ":tile16"])
@pytest.mark.parametrize("backend", ["the fastest", "torch"])
def test_operands_with_all_scales_are_exact_in_bf16_for_every_magnitude(options, backend, monkeypatch):
    if backend == "torch":
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    x = gaussian(16, 32)
    x[0, ::5] *= 2.0**-12  # block scales down to E4M3's subnormal numbers
    x[:, 16:] *= 2.0**-14
    x /= x.abs().max()
    for exponent in (-149, -127, -124, -117, -110, -104, -90, -50, 0, 50, 100, 127):
        quantized = quantizer("nvfp4e2m1b" + options).quantize(
            x * 2.0 ** max(exponent, -126) * 2.0 ** min(0, exponent + 126)
        )
        scale = quantized.tensor_scale.item()
        assert math.frexp(scale)[0] == 0.5
        assert scale >= 2.0**-116
        assert (1 / quantized.tensor_scale).double() * scale == 1  # as divisor or as multiplier
        plain = DecodeRequest(quantized.codes, quantized.scales, quantized.format, 16, 32, torch.float32)
        exact = reference.decode(plain).double() * scale
        for transpose in (False, True):
            operand = quantized.operand(torch.bfloat16, transpose=transpose).double()
            assert torch.equal(operand.t() if transpose else operand, exact)
        assert (exact == 0).logical_or(exact.abs() >= 2.0**-126).all()
        assert quantized.operand_scale is None
        assert torch.equal(quantized.dequantize().double(), exact)


@pytest.mark.parametrize(("exponent", "allowed"), [(-90, 0.11), (-104, 0.11), (-110, 0.13), (-124, 1.0)])
def test_tensors_below_2_to_the_minus_104_lose_their_small_blocks_gradually(exponent, allowed):
    x = gaussian(64, 64)
    x = x / x.abs().max() * 2.0**exponent
    error = (quantizer(POWER_OF_TWO).quantize(x).operand(torch.bfloat16).double() - x.double()).norm()
    assert error <= allowed * x.double().norm()


def test_numbers_near_the_largest_of_bf16_stay_finite_up_to_the_documented_limit():
    for largest in (1.0, 1.5, 1.9, 1.96875):
        operand = quantizer(POWER_OF_TWO).quantize(torch.full((1, 16), largest * 2.0**127)).operand()
        assert operand.isfinite().all()
    beyond = quantizer(POWER_OF_TWO).quantize(torch.full((1, 16), 1.98 * 2.0**127))
    assert beyond.operand().isinf().all()
    assert beyond.dequantize().isfinite().all()


def test_a_shared_maximum_gives_shards_the_scale_of_the_whole():
    x = gaussian(8, 64)
    whole, shard = (
        quantizer(POWER_OF_TWO).quantize(x),
        quantizer(POWER_OF_TWO).quantize(x[:4], tensor_amax=x.abs().max()),
    )
    assert shard.tensor_scale == whole.tensor_scale
    assert torch.equal(shard.operand(), whole.operand()[:4])


def test_files_keep_the_kind_of_the_tensor_scale(tmp_path):
    tensors = {
        name.replace(":", "_"): quantizer(name).quantize(gaussian(4, 32))
        for name in (POWER_OF_TWO, FP32_SCALE)
    }
    save_quantized(tensors, tmp_path / "x.safetensors")
    for name, loaded in load_quantized(tmp_path / "x.safetensors").items():
        assert (loaded.operand_scale is None) == tensors[name].is_power_of_two
        assert torch.equal(loaded.operand(), tensors[name].operand())
        assert torch.equal(loaded.dequantize(), tensors[name].dequantize())


def test_an_fp32_scale_that_happens_to_be_a_small_power_of_two_stays_outside_of_the_operand(tmp_path):
    smallest = quantizer(FP32_SCALE).quantize(torch.full((1, 16), 2.0**-125))
    assert smallest.tensor_scale == 2.0**-126
    save_quantized({"x": smallest}, tmp_path / "x.safetensors")
    loaded = load_quantized(tmp_path / "x.safetensors")["x"]
    assert loaded.operand_scale == 2.0**-126
    assert torch.equal(loaded.dequantize(), smallest.dequantize())


def test_the_scale_is_the_smallest_power_of_two_that_saturates_no_block():
    x = gaussian(16, 32)
    for four_over_six, rounding in itertools.product((False, True), ("nearest", "up")):
        encoding = Encoding(
            format=quantizer(POWER_OF_TWO).encoding.format,
            is_power_of_two=True,
            four_over_six=four_over_six,
            scale_rounding=rounding,
        )
        top = 256 if four_over_six else 448
        expected = 2.0 ** math.ceil(math.log2(x.abs().max().item() / 6 / top))
        assert reference.encode(EncodeRequest(x, encoding)).tensor_scale == expected
