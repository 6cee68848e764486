"""Formats and options of published recipes against float64 emulations."""

import math

import numpy as np
import published_formats
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.packed_file import load_quantized, save_quantized
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.tensor_statistics import needs_maximum

EVERY_NAME = pytest.mark.parametrize("name", published_formats.NAMES)


def matrices(shape):
    """Gaussian, log-normal (many scales a row), bf16, and rows of very different size."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    yield x
    yield x * torch.randn(shape, generator=generator).mul(2).exp()
    yield x.to(torch.bfloat16)
    yield x * 10.0 ** torch.randint(-4, 4, (shape[0], 1), generator=generator)


@EVERY_NAME
@pytest.mark.parametrize("shape", [(3, 17), (18, 80)])
def test_numbers_are_those_of_the_emulation(name, shape):
    for x in matrices(shape):
        got = quantizer(name).quantize(x.float()).dequantize()
        assert np.array_equal(got.numpy(), published_formats.quantized(name, x.float().numpy()))


def test_blocks_of_128_rows_have_their_own_scales():
    x = torch.randn(140, 130, generator=torch.Generator().manual_seed(1))
    x[128:] *= 1e-3
    got = quantizer("fp8e4m3b:tile128").quantize(x)
    assert got.scales.shape == (2, 2)
    expected = published_formats.quantized("fp8e4m3b:tile128", x.numpy())
    assert np.array_equal(got.dequantize().numpy(), expected)


@EVERY_NAME
def test_stochastic_rounding_gives_a_neighbour_and_unbiased_the_mean(name):
    base = name.replace("nosr", "").replace(":floor", "") + ":unbiased"
    x = torch.randn(128, generator=torch.Generator().manual_seed(2)).repeat(512, 1)
    if "token_scale" not in name:
        x[:, 3] = 4.0
    found = quantizer(base).quantize(x, random_key=RandomKey(5, 6), with_counts=True)
    assert found.counts[1] == 0  # nothing saturates
    drawn = found.dequantize().double()
    excess, variance = drawn.mean(0) - x[0], drawn.var(0) / 512
    assert abs(excess.sum()) <= 5 * variance.sum().sqrt()
    assert excess.abs().le(5 * variance.sqrt() + 0.005 * x[0].abs()).all()  # few or no draws differ
    assert all(len(column.unique()) <= 2 for column in drawn.t())


@EVERY_NAME
def test_an_infinity_spoils_its_block_only(name):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(3))
    x[0, 5] = math.inf
    got = quantizer(name).quantize(x, with_counts=True)
    height, width = quantizer(name).encoding.format.block
    expected = torch.zeros(130, 256, dtype=torch.bool)
    expected[:height, :width] = True
    assert torch.equal(got.dequantize().isnan(), expected)
    assert got.counts[4] == 1
    assert got.counts[5] == got.scales.numel()
    assert got.error.isfinite().all()


@EVERY_NAME
def test_files_keep_every_bit(name, tmp_path):
    x = torch.randn(20, 70, generator=torch.Generator().manual_seed(4))
    kept = quantizer(name).quantize(x)
    save_quantized({"x": kept}, tmp_path / "x.safetensors")
    loaded = load_quantized(tmp_path / "x.safetensors")["x"]
    assert loaded.format == kept.format
    assert torch.equal(loaded.dequantize(), kept.dequantize())
    assert torch.equal(loaded.operand(transpose=True), kept.operand(transpose=True))


@EVERY_NAME
def test_operands_are_exact_in_the_dtype_they_name(name):
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(5)) * 1e-3
    kept = quantizer(name).quantize(x)
    exact = kept.operand(torch.float64)
    assert torch.equal(kept.operand(kept.exact_dtype).double(), exact)


def test_a_row_scale_depends_on_its_row_alone():
    chosen = quantizer("nvfp4e2m1bnosr:token_scale")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)) * 1e-6
    alone = chosen(x[:4])
    x[4:] *= 1e9
    assert torch.equal(chosen(x)[:4], alone)
    assert not torch.equal(quantizer("nvfp4e2m1bnosr")(x)[:4], alone)
    assert chosen.quantize(x).tensor_scale.shape == (8, 1)
    with pytest.raises(UserError, match="needs the full tensor"):
        needs_maximum(chosen)


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [("ue5m3fp4e2m1bnosr", 6 * 114688.0, 6 * 2.0**-17), ("hif4nosr", 7 * 49152.0, 7 * 2.0**-48)],
)
def test_ranges_end_where_the_scales_do(name, largest, smallest):
    for number in (largest, smallest):
        x = torch.full((1, 64), number)
        got = quantizer(name).quantize(x, with_counts=True)
        assert torch.equal(got.dequantize(), x)
        assert got.counts[6] == 0
    above = quantizer(name).quantize(torch.full((1, 64), 3 * largest), with_counts=True)
    assert torch.equal(above.dequantize(), torch.full((1, 64), largest))
    assert above.counts[1] == 64
    assert above.counts[6] == above.scales.numel()
    below = quantizer(name).quantize(torch.full((1, 64), smallest / 100), with_counts=True)
    assert not below.dequantize().any()
    assert below.counts[3] == 64


def test_hif4_bits_are_at_the_places_of_the_page():
    x = torch.zeros(1, 64)
    x[0, 0] = 7.0  # the first eight and the first four are doubled
    x[0, 13] = 2.0  # the second half of the second eight: doubled by its own bit alone
    word = int(quantizer("hif4nosr").quantize(x).scales)
    assert word == 48 << 2 | 1 << 8 | (1 << 0 | 1 << 3) << 16


def test_stochastic_four_over_six_chooses_the_smaller_expected_error():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 512, generator=generator)
    errors = {}
    for name in ("nvfp4e2m1b:unbiased", "nvfp4e2m1b:4over6:unbiased"):
        draws = [quantizer(name)(x, random_key=RandomKey(i, 1)) for i in range(4)]
        errors[name] = sum(float((drawn - x).square().sum()) for drawn in draws)
    plain, chosen = errors.values()
    assert chosen < 0.92 * plain


def test_four_over_six_is_chosen_by_the_transformed_numbers():
    """With a Hadamard transform, blocks are those of the transformed matrix."""
    from megalowbit.quantize.hadamard import hadamard

    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(8))
    for name in ("nvfp4e2m1bnosr:4over6", "nvfp4e2m1bnosr:4over6_448", "hif4nosr"):
        got = quantizer(name).quantize_transposed(x, signs=0xB5A3).dequantize()
        expected = published_formats.quantized(name, hadamard(x.t().contiguous(), 0xB5A3).numpy())
        assert np.array_equal(got.numpy(), expected)
