import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.formats.block_scale import block_amax, decode_e4m3, two_level_scales
from megalowbit.formats.element import E2M1


def e4m3_values() -> list[float]:
    """All finite non-negative E4M3 numbers by code, from the definition (bias 7, three mantissa bits)."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


E4M3 = e4m3_values()


def nearest_e4m3(x: float) -> float:
    code = min(range(127), key=lambda c: (abs(E4M3[c] - x), c % 2))
    return E4M3[code]


def scales_of(amax: list[float], **kwargs):
    return two_level_scales(torch.tensor(amax, dtype=torch.float32).view(-1, 1), E2M1, **kwargs)


def test_decode_table_holds_all_e4m3_numbers():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    decoded = decode_e4m3(codes).tolist()
    assert decoded[:127] == E4M3
    assert decoded[128:255] == [-v for v in E4M3]
    assert math.isnan(decoded[127])
    assert math.isnan(decoded[255])


def test_every_product_of_element_and_block_scale_is_exact_in_bf16_and_fp16():
    products = torch.tensor([scale * value for scale in E4M3 for value in E2M1.grid], dtype=torch.float64)
    assert products.unique().numel() == 238  # 237 and zero
    assert products[products > 0].min().item() == 2.0**-10
    assert products.max().item() == 2688
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(products.to(dtype).double(), products)


@given(st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=40))
@settings(deadline=None, max_examples=100)
def test_scales_equal_the_definition_step_by_step(amax):
    f = np.float32
    largest = f(max(amax))
    encode = f(1) if largest == 0 else min(f(2688) / largest, f(2.0**126)) if largest > 1e-30 else None
    if encode is None:
        return  # numbers this small have a test of their own
    got = scales_of(amax)
    expected = [nearest_e4m3(min(float(f(a) / (f(6) / encode)), 448.0)) for a in amax]
    assert got.decoded.flatten().tolist() == expected
    assert got.tensor_scale.item() == float(f(1) / encode)
    assert got.encode.flatten().tolist() == [float(encode / f(s)) if s else 0.0 for s in expected]


def test_a_tensor_of_zeros_has_tensor_scale_one_and_zero_block_scales():
    scales = scales_of([0.0, 0.0])
    assert scales.tensor_scale.item() == 1
    assert scales.decoded.tolist() == [[0], [0]]
    assert scales.encode.tolist() == [[0], [0]]


@pytest.mark.parametrize("amax", [1e-45, 1.2e-38, 1e-36, 1e-30, 3.4e38])
def test_tiny_and_huge_maxima_give_finite_scales(amax):
    scales = scales_of([amax, amax / 2])
    for each in (scales.decoded, scales.encode, scales.tensor_scale):
        assert each.isfinite().all()
    assert scales.tensor_scale > 0
    if amax > 1e-34:
        assert scales.decoded[0].item() == 448


def test_a_non_finite_block_gets_scale_nan_and_leaves_the_others_alone():
    for bad in (math.inf, math.nan):
        scales = scales_of([3.0, bad, 1.5])
        clean = scales_of([3.0, 1.5])
        assert scales.decoded[1].isnan()
        assert scales.encode[1] == 0
        assert torch.equal(scales.decoded[[0, 2]], clean.decoded)
        assert scales.tensor_scale == clean.tensor_scale


def test_a_maximum_from_elsewhere_clamps_scales_before_the_cast():
    scales = scales_of([10.0, 1.0], tensor_amax=torch.tensor(1.0))
    assert scales.decoded.flatten().tolist() == [448, 448]
    assert scales.unclamped[0].item() == pytest.approx(4480, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_amax_is_the_largest_magnitude_and_shows_non_finite_blocks(dtype):
    blocks = torch.randn(50, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    blocks[3, 5], blocks[4, 0], blocks[5] = math.inf, math.nan, 0
    amax = block_amax(blocks)
    assert amax.dtype == torch.float32
    assert amax[3].item() == math.inf
    assert amax[4].isnan()
    finite = [row for row in range(50) if row not in (3, 4)]
    assert amax[finite].flatten().tolist() == [max(abs(v) for v in blocks[row].tolist()) for row in finite]
