import math

import pytest
import torch

from megalowbit.quantize.names import quantizer, quantizer_names

NAMES = tuple(name for name in quantizer_names() if name != "fp32")
EVERY_NAME = pytest.mark.parametrize("name", [*NAMES, "nvfp4e2m1bnosr:tile16", "fp6e3m2b:block32"])


def gaussian(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def quantized():
    return quantizer("nvfp4e2m1bnosr").quantize(gaussian(6, 4, 50))


def test_storage_is_four_bits_an_element_and_a_byte_a_block(quantized):
    assert quantized.codes.shape == (24, 32)
    assert quantized.codes.dtype == torch.uint8
    assert quantized.scales.shape == (24, 4)
    assert quantized.scales.dtype == torch.float8_e4m3fn
    assert quantized.tensor_scale.shape == ()
    assert quantized.nbytes == 24 * 32 + 24 * 4 + 4


@EVERY_NAME
def test_bytes_held_are_the_bits_per_element_of_the_format(name):
    large = quantizer(name).quantize(gaussian(256, 512))
    assert large.nbytes * 8 / (256 * 512) == pytest.approx(large.format.bits_per_element, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "int8e5m2b"])
def test_the_operand_is_exact_in_its_exact_dtype_and_wider_and_transposes(name):
    quantized = quantizer(name).quantize(gaussian(6, 4, 50))
    exact = quantized.operand(torch.float64)
    for dtype in (quantized.exact_dtype, torch.float32, torch.float64):
        assert torch.equal(quantized.operand(dtype).double(), exact)
        transposed = quantized.operand(dtype, transpose=True)
        assert torch.equal(transposed.double(), exact.t())


@pytest.mark.parametrize(
    ("dtype", "added"), [(torch.bfloat16, 0.1), (torch.float16, 0.002), (torch.float32, 0.0)]
)
@pytest.mark.parametrize("name", ["int8e5m2b", "int8e5m2b:block32"])
def test_blocks_of_int8_or_e5m2_have_their_tensors_range_and_lose_little_in_half_precision(
    name, dtype, added
):
    x = gaussian(256, 512)
    x[::2, 5] = 100.0
    quantized = quantizer(name).quantize(x)
    assert quantized.exact_dtype == torch.float16
    exact = quantized.operand(torch.float64)
    assert quantized.tensor_scale is None
    own = (exact - x).square().sum()
    more = (quantized.operand(dtype).double() - x).square().sum() / own - 1
    assert abs(more) <= added
    assert torch.equal(quantized.operand(torch.float32).double(), exact)
    assert torch.equal(quantized.operand(dtype, transpose=True), quantized.operand(dtype).t())


@pytest.mark.parametrize(
    "name", ["nvfp4e2m1bnosr", "nvfp4e2m1bnosr:4over6", "mxfp4e2m1bnosr", "mxfp4e2m1bnosr:floor"]
)
def test_a_bf16_product_accumulated_in_fp32_is_the_product_of_the_dequantised_codes(name):
    x, weight = (quantizer(name).quantize(gaussian(size, 160, seed=size)) for size in (33, 48))
    product = x.operand(torch.bfloat16).float() @ weight.operand(torch.bfloat16).float().t()
    exact = x.operand(torch.float64) @ weight.operand(torch.float64).t()
    bound = x.operand(torch.float64).abs() @ weight.operand(torch.float64).abs().t()
    assert ((product.double() - exact).abs() <= 160 * 2.0**-24 * bound).all()  # accumulation alone
    scale = 1.0 if x.operand_scale is None else (x.operand_scale.double() * weight.operand_scale.double())
    dequantised = x.dequantize().double() @ weight.dequantize().double().t()
    assert torch.allclose(product.double() * scale, dequantised, rtol=1e-5, atol=1e-5)


def test_an_operand_made_on_the_way_is_the_decoded_one_and_is_used():
    x = gaussian(5, 40)
    for dtype in (torch.bfloat16, torch.float32):
        ready = quantizer("nvfp4e2m1bnosr").quantize(x, operand_dtype=dtype)
        plain = quantizer("nvfp4e2m1bnosr").quantize(x)
        assert ready.operand(dtype) is ready.ready_operand
        assert torch.equal(ready.operand(dtype), plain.operand(dtype))
        assert torch.equal(ready.operand(dtype, transpose=True), plain.operand(dtype, transpose=True))
        assert ready.to_parts()[1].ready_operand is None


@EVERY_NAME
def test_operand_times_tensor_scale_is_the_dequantised_tensor(name):
    quantized = quantizer(name).quantize(gaussian(6, 4, 50))
    scale = 1.0 if quantized.operand_scale is None else quantized.operand_scale
    assert torch.equal(quantized.dequantize(), (quantized.operand(torch.float32) * scale).view(6, 4, 50))


@pytest.mark.parametrize("name", [*NAMES, "fp32"])
def test_parts_hold_all_tensors_and_give_the_same_tensor_back(name):
    whole = quantizer(name).quantize(gaussian(3, 20), with_counts=True)
    tensors, rest = whole.to_parts()
    held = [value for value in vars(rest).values() if isinstance(value, torch.Tensor)]
    assert all(value.numel() == 0 for value in held)
    assert torch.equal(rest.from_parts(tensors).dequantize(), whole.dequantize())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_numbers_near_the_dtypes_largest_stay_finite(name, dtype):
    x = torch.full((2, 32), torch.finfo(dtype).max, dtype=dtype)
    x[0, ::2] *= 0.9
    assert quantizer(name)(x).isfinite().all()


def test_a_spoiled_block_stays_visible_in_operand_and_result():
    x = gaussian(2, 32)
    x[0, 3] = math.inf
    for name in ("nvfp4e2m1bnosr", "mxfp4e2m1bnosr", "int8b", "int8e5m2b"):
        assert quantizer(name).quantize(x).operand()[0, 3].isnan()
