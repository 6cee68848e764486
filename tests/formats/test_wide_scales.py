import math

import pytest
import torch

from megalowbit.formats.element import E2M1
from megalowbit.formats.wide_scales import (
    E6M2,
    UE5M3,
    decode_hif4,
    decode_ue5m3,
    hif4_scales,
    ue5m3_scales,
)


def test_ue5m3_has_five_bits_of_exponent_and_three_of_mantissa():
    numbers = decode_ue5m3(torch.arange(256, dtype=torch.uint8))
    assert numbers[255].isnan()
    for code in range(255):
        exponent, mantissa = code >> 3, code & 7
        value = (
            math.ldexp(mantissa / 8, -14) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 15)
        )
        assert numbers[code] == value
    assert UE5M3.max == 114688
    # E5M2 is the same with a mantissa of two bits: every other code
    e5m2 = torch.arange(124, dtype=torch.uint8).view(torch.float8_e5m2).float()
    assert torch.equal(numbers[:248:2], e5m2)


def test_e6m2_has_six_bits_of_exponent_two_of_mantissa_and_no_zero():
    for code in range(255):
        assert E6M2.grid[code] == math.ldexp(1 + (code & 3) / 4, (code >> 2) - 48)


@pytest.mark.parametrize("is_up", [False, True])
def test_scales_are_the_nearest_or_the_next_larger_by_search(is_up):
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(50, 4, generator=generator).mul(3).exp()
    grid = torch.tensor(UE5M3.grid, dtype=torch.float64)
    found = ue5m3_scales(wanted * 6, E2M1, is_up)
    ratio = torch.div(wanted * 6, torch.full_like(wanted, 6.0)).double()[..., None]
    if is_up:
        expected = torch.where(grid >= ratio, grid, math.inf).amin(-1)
    else:
        expected = grid[(grid - ratio).abs().argmin(-1)]
    assert torch.equal(found.decoded.double(), expected)
    assert torch.equal(decode_ue5m3(found.codes), found.decoded)


@pytest.mark.parametrize("is_up", [False, True])
def test_hif4_words_decode_to_the_scales_and_rounded_up_ones_hold_every_maximum(is_up):
    generator = torch.Generator().manual_seed(1)
    amax = torch.randn(30, 48, generator=generator).mul(3).exp()
    found = hif4_scales(amax, is_up)
    assert found.codes.dtype == torch.int32
    assert torch.equal(decode_hif4(found.codes), found.decoded)
    reach = found.decoded * 1.75
    if is_up:
        assert (reach >= amax * (1 - 2.0**-22)).all()
    else:  # a maximum saturates by no more than from 2 to 1.75, and what s is rounded down by
        assert (reach >= amax * (1.75 / 2 / 1.13)).all()
    spoiled = amax.clone()
    spoiled[0, 3] = math.nan
    words = hif4_scales(spoiled, is_up).codes
    assert words[0, 0] == 255
    assert decode_hif4(words)[0, :16].isnan().all()
    assert torch.equal(words[0, 1:], found.codes[0, 1:])
