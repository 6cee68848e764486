import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.block_format import MXFP4, NVFP4, BlockFormat
from megalowbit.formats.block_scale import block_scales, decode_e8m0, decode_scales
from megalowbit.formats.element import E2M1, INT8

E4M3 = [
    m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
]
FP32_BLOCKS = BlockFormat(element=INT8, block=(1, 16), scale="fp32")
ONE_SCALE = BlockFormat(element=INT8, block=None, scale="fp32")
LARGEST = torch.finfo(torch.float32).max


def nearest_e4m3(x: float) -> float:
    return E4M3[min(range(127), key=lambda c: (abs(E4M3[c] - x), c % 2))]


def scales_of(amax, format=NVFP4, rounding="nearest", **kwargs):
    return block_scales(torch.tensor(amax, dtype=torch.float32).view(-1, 1), format, rounding, **kwargs)


def test_decoding_covers_all_e4m3_and_e8m0_numbers():
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = decode_scales(codes.view(torch.float8_e4m3fn)).tolist()
    assert e4m3[:127] == E4M3
    assert e4m3[128:255] == [-v for v in E4M3]
    assert math.isnan(e4m3[127])
    e8m0 = decode_scales(codes.view(torch.float8_e8m0fnu)).tolist()
    assert e8m0[:255] == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(e8m0[255])


def test_every_product_of_element_and_e4m3_scale_is_exact_in_bf16_and_fp16():
    products = torch.tensor([scale * value for scale in E4M3 for value in E2M1.grid], dtype=torch.float64)
    assert products.unique().numel() == 238  # 237 and zero
    assert products[products > 0].min().item() == 2.0**-10
    assert products.max().item() == 2688
    mantissas = [math.frexp(v)[0] * 2**6 for v in products.tolist()]
    assert all(mantissa.is_integer() for mantissa in mantissas)  # six significant bits
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(products.to(dtype).double(), products)


def test_every_product_of_element_and_e8m0_scale_in_the_normal_range_is_exact_in_bf16():
    scales = decode_e8m0(torch.arange(255, dtype=torch.uint8)).double()
    products = (scales[:, None] * torch.tensor(E2M1.grid, dtype=torch.float64)).flatten()
    normal = products[(products == 0) | (products >= 2.0**-126) & (products < 2.0**128)]
    assert normal.numel() > 254 * 8 - 16
    assert torch.equal(normal.to(torch.bfloat16).double(), normal)


@pytest.mark.parametrize("rounding", ["nearest", "up"])
@given(st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_two_level_scales_equal_the_definition_step_by_step(rounding, amax):
    f = np.float32
    largest = f(max(amax))
    with np.errstate(over="ignore"):
        most = f(2.0**118 if rounding == "up" else 2.0**126)
        S = f(1) if largest == 0 else min(f(2688) / largest, most)
    clamped = [min(float(f(a) / (f(6) / S)), 448.0) for a in amax]
    expected = [nearest_e4m3(v) if rounding == "nearest" else min(e for e in E4M3 if e >= v) for v in clamped]
    got = scales_of(amax, rounding=rounding)
    assert got.decoded.flatten().tolist() == expected
    assert got.tensor_scale.item() == float(f(1) / S)
    with np.errstate(over="ignore"):
        encode = [float(S / f(s)) if s else 0.0 for s in expected]
    assert got.encode.flatten().tolist() == [v if math.isfinite(v) else 0.0 for v in encode]


def test_a_tensor_of_zeros_has_tensor_scale_one_and_zero_block_scales():
    for rounding in ("nearest", "up"):
        scales = scales_of([0.0, 0.0], rounding=rounding)
        assert scales.tensor_scale.item() == 1
        assert scales.codes.view(torch.uint8).tolist() == [[0], [0]]
        assert scales.encode.tolist() == [[0], [0]]


@pytest.mark.parametrize("amax", [1e-45, 1.2e-38, 1e-36, 1e-30, LARGEST])
def test_tiny_and_huge_maxima_give_finite_scales(amax):
    for format, rounding in ((NVFP4, "nearest"), (NVFP4, "up"), (MXFP4, "down"), (MXFP4, "up")):
        scales = scales_of([amax, amax / 2], format, rounding)
        assert scales.decoded.isfinite().all()
        assert scales.encode.isfinite().all()
        assert scales.tensor_scale is None or 0 < scales.tensor_scale < math.inf
    if amax > 1e-34:
        assert scales_of([amax, amax / 2]).decoded[0].item() == 448


def mx_exponent(a: float, is_up: bool) -> int:
    """By logarithms in float64, corrected by exact comparison."""
    exponent = math.floor(math.log2(a)) - 2
    exponent += (2.0 ** (exponent + 3) <= a) - (2.0 ** (exponent + 2) > a)  # log2 may round
    if is_up:
        exponent = min(e for e in (exponent, exponent + 1) if 6 * 2.0**e >= a)
    return min(max(exponent, -127), 127)


@pytest.mark.parametrize("rounding", ["down", "up"])
def test_mx_scales_equal_logarithms_for_subnormals_and_a_mantissa_of_one_and_a_half(rounding):
    amax = [2.0**e for e in range(-149, 128)] + [1.5 * 2.0**e for e in range(-148, 128)]
    points = torch.tensor(amax, dtype=torch.float32)
    amax += torch.nextafter(points, torch.tensor(math.inf)).tolist()
    amax += [v for v in torch.nextafter(points, torch.tensor(0.0)).tolist() if v > 0]
    amax += torch.rand(200, generator=torch.Generator().manual_seed(0)).mul(40).exp().mul(1e-9).tolist()
    got = scales_of(amax, MXFP4, rounding)
    assert got.decoded.flatten().tolist() == [2.0 ** mx_exponent(a, rounding == "up") for a in amax]
    assert (got.decoded * got.encode == 1).all()
    assert got.tensor_scale is None


def test_mx_scales_up_let_nothing_clip_and_of_zero_are_the_smallest():
    amax = torch.rand(500, generator=torch.Generator().manual_seed(1)).mul(60).exp().mul(1e-12).tolist()
    got = scales_of([*amax, 0.0], MXFP4, "up")
    assert all(a <= 6 * s for a, s in zip(amax, got.decoded.flatten().tolist(), strict=False))
    assert got.codes.view(torch.uint8)[-1].item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize(
    ("format", "rounding", "byte"), [(NVFP4, "nearest", 0x7F), (NVFP4, "up", 0x7F), (MXFP4, "up", 0xFF)]
)
def test_a_non_finite_block_gets_one_nan_code_and_leaves_the_others_alone(bad, format, rounding, byte):
    scales = scales_of([3.0, bad, 1.5], format, rounding)
    clean = scales_of([3.0, 1.5], format, rounding)
    assert scales.codes.view(torch.uint8)[1].item() == byte
    assert scales.decoded[1].isnan()
    assert scales.encode[1] == 0
    assert torch.equal(scales.decoded[[0, 2]], clean.decoded)
    assert scales.tensor_scale == clean.tensor_scale


def test_a_maximum_from_elsewhere_clamps_scales_before_the_cast():
    scales = scales_of([10.0, 1.0], tensor_amax=torch.tensor(1.0))
    assert scales.decoded.flatten().tolist() == [448, 448]
    assert scales.overflows.flatten().tolist() == [True, False]


def test_a_scale_maximum_of_256_leaves_room_above():
    scales = scales_of([10.0, 5.0], scale_max=256.0)
    assert scales.decoded.flatten().tolist() == [256, 128]


def test_fp32_scales_are_quotients_and_one_scale_is_the_tensors():
    scales = scales_of([10.0, 0.0, math.inf], FP32_BLOCKS)
    assert scales.codes.flatten()[:2].tolist() == [float(np.float32(10) / np.float32(127)), 0]
    assert scales.codes[2].isnan()
    assert scales.tensor_scale is None
    one = scales_of([10.0], ONE_SCALE)
    assert one.tensor_scale.item() == float(np.float32(10) / np.float32(127))
    assert one.decoded.tolist() == [[1]]
    assert scales_of([10.0], ONE_SCALE, tensor_amax=torch.tensor(127.0)).tensor_scale.item() == 1
    assert scales_of([math.nan], ONE_SCALE, tensor_amax=torch.tensor(127.0)).tensor_scale.isnan()
