import math

import fp4_reference
import numpy as np
import pytest
import torch

from megalowbit.quantize import reference
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest
from megalowbit.quantize.hadamard import hadamard
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.philox import RandomKey

KEY = RandomKey(0xFEDCBA9876543210, 2**40 + 3)
NAMES = (
    *("nvfp4e2m1b", "nvfp4e2m1bnosr", "nvfp4e2m1b:unbiased", "nvfp4e2m1bnosr:tile16", "nvfp4e2m1b:tile16"),
    *("nvfp4e2m1bnosr:4over6", "nvfp4e2m1bnosr:q_scalar=1.25", "nvfp4e2m1b:q_scalar=0.7"),
    *("nvfp4e2m1bnosr:fp32_scale", "nvfp4e2m1b:unbiased:fp32_scale", "nvfp4e2m1bnosr:4over6:fp32_scale"),
    *("mxfp4e2m1b", "mxfp4e2m1bnosr", "mxfp4e2m1bnosr:floor", "mxfp4e2m1b:q_scalar=1.5"),
    *("fp4e2m1", "fp4e2m1b", "fp4e2m1bnosr:block32", "fp4e2m1bnosr:tile16", "fp6e3m2", "fp6e3m2b:sr"),
    *("mxfp4e2m1b:unbiased", "fp6e3m2b:unbiased", "int8:unbiased", "fp8e4m3:unbiased", "fp4e2m1b:unbiased"),
    *("mxfp8e4m3b", "mxfp8e5m2b:unbiased", "mxfp8e4m3b:floor"),
    *("fp8e4m3", "fp8e4m3b:sr", "fp8e5m2:sr", "fp8e5m2b", "int8", "int8b:sr", "int4:sr", "int4b"),
)
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
SHAPES = ((1, 1), (3, 17), (20, 5), (4, 40))


def inputs(shape):
    """Gaussian, subnormal, huge, sparse with negative zeros and a wide range, damaged, half precision."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    yield from (x, x * 1e-39, x * 1e-43, x * 1e38, torch.zeros(shape), x.to(torch.bfloat16))
    sparse = x * torch.randn(shape, generator=generator).mul(5).exp()
    sparse.view(-1)[::2] = 0.0
    sparse.view(-1)[::4] = -0.0
    yield sparse
    for bad in (math.inf, math.nan):
        damaged = x.clone()
        damaged.view(-1)[x.numel() // 2] = bad
        yield damaged


def by_the_book(x, encoding, **options):
    format, shape = encoding.format, encoding.format.padded(*x.shape)
    return fp4_reference.Blocks(
        x.float().numpy(),
        grid=format.element.grid,
        block=format.block,
        scale=format.scale,
        scale_rounding=encoding.scale_rounding,
        q_scalar=encoding.q_scalar,
        four_over_six=encoding.four_over_six,
        is_power_of_two=encoding.is_power_of_two,
        random=fp4_reference.drawn(*shape, KEY) if encoding.is_stochastic else None,
        **options,
    )


def assert_same_numbers(got, expected):
    """Equal, signs of zeros included, NaN where NaN is expected."""
    got, is_number = got.numpy(), ~np.isnan(expected)
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got)[is_number], np.signbit(expected)[is_number])


def check(x, encoding, **options):
    got = reference.encode(
        EncodeRequest(
            x,
            encoding,
            random_key=KEY,
            operand_dtype=torch.float32,
            **{name: torch.tensor(value) for name, value in options.items()},
        )
    )
    expected = by_the_book(x, encoding, **options)
    format, (rows, cols) = encoding.format, x.shape
    packed = fp4_reference.packed(expected.codes[:rows], format.element.bits)
    assert np.array_equal(got.codes.numpy(), packed)
    if expected.tensor_scale is not None:
        assert np.array_equal(got.tensor_scale.item(), expected.tensor_scale, equal_nan=True)
    if format.block is None:
        return got
    stored = got.scales.numpy() if format.scale == "fp32" else got.scales.view(torch.uint8).numpy()
    assert np.array_equal(stored, expected.stored.astype(stored.dtype), equal_nan=format.scale == "fp32")
    assert_same_numbers(got.operand, expected.operand[:rows, :cols])
    return got


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param(name, SHAPES[half::2], marks=() if place % 2 == half else pytest.mark.slow)
        for place, name in enumerate(NAMES)
        for half in (0, 1)
    ],
)
def test_every_quantizer_equals_the_one_by_the_book_bit_for_bit(name, shapes):
    for shape in shapes:
        for x in inputs(shape):
            check(x, quantizer(name).encoding)


@pytest.mark.parametrize(
    "name", ["nvfp4e2m1bnosr", "nvfp4e2m1b:unbiased", "fp4e2m1", "nvfp4e2m1bnosr:4over6"]
)
@pytest.mark.parametrize("tensor_amax", [0.5, 2.0, 300.0])
def test_a_maximum_from_elsewhere_equals_the_one_by_the_book(name, tensor_amax):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    check(x, quantizer(name).encoding, tensor_amax=tensor_amax)


@EVERY_NAME
def test_decoding_gives_the_operand_made_on_the_way_in_both_layouts(name):
    x = torch.randn(18, 37, generator=torch.Generator().manual_seed(5))
    x[3, 4] = math.nan
    encoding = quantizer(name).encoding
    got = reference.encode(EncodeRequest(x, encoding, random_key=KEY, operand_dtype=torch.float32))
    scale = got.tensor_scale if encoding.is_power_of_two else None
    for transpose in (False, True):
        decoded = reference.decode(
            DecodeRequest(got.codes, got.scales, encoding.format, 18, 37, torch.float32, transpose, scale)
        )
        assert decoded.is_contiguous()
        operand = got.operand.t() if transpose else got.operand
        assert torch.equal(decoded.isnan(), operand.isnan())
        assert torch.equal(decoded.nan_to_num(), operand.nan_to_num())


@pytest.mark.parametrize("name", ["nvfp4e2m1b", "mxfp4e2m1bnosr"])
def test_signs_transform_the_rows_before_anything_else(name):
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(6))
    encoding = quantizer(name).encoding
    got = reference.encode(
        EncodeRequest(x, encoding, random_key=KEY, signs=0xB5A3, operand_dtype=torch.bfloat16)
    )
    expected = reference.encode(
        EncodeRequest(hadamard(x, 0xB5A3), encoding, random_key=KEY, operand_dtype=torch.bfloat16)
    )
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.operand, expected.operand)


@pytest.mark.parametrize("name", ["nvfp4e2m1b", "mxfp4e2m1bnosr", "nvfp4e2m1bnosr:tile16"])
def test_strides_do_not_change_the_result(name):
    encoding = quantizer(name).encoding
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(7))
    for strided in (x.t(), x[:, ::2], x[::3], x[:, 5:50]):
        one, other = (
            reference.encode(EncodeRequest(each, encoding, random_key=KEY))
            for each in (strided, strided.contiguous())
        )
        assert torch.equal(one.codes, other.codes)


def test_one_ternary_scale_is_the_mean_magnitude_of_the_elements_without_padding():
    x = torch.randn(5, 21, generator=torch.Generator().manual_seed(8))
    got = reference.encode(EncodeRequest(x, quantizer("1p58bit").encoding))
    assert got.tensor_scale.item() == pytest.approx(x.double().abs().mean().item(), rel=1e-7)
    expected = torch.clamp((x / got.tensor_scale).round(), -1, 1)
    assert torch.equal(quantizer("1p58bit")(x), expected * got.tensor_scale)
