from dataclasses import replace

import pytest

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.formats.element import E2M1
from megalowbit.quantize.encoding import Encoding

FP32_BLOCKS = BlockFormat(element=E2M1, block=(1, 16), scale="fp32")


@pytest.mark.parametrize(
    ("format", "rounding", "choices"),
    [(NVFP4, "down", "nearest or up"), (MXFP4, "nearest", "down or up"), (FP32_BLOCKS, "up", "nearest")],
)
def test_a_scale_rounding_the_scale_format_lacks_is_refused(format, rounding, choices):
    with pytest.raises(UserError, match=f"{rounding}.*choose {choices}"):
        Encoding(format=format, scale_rounding=rounding)


@pytest.mark.parametrize("q_scalar", [0.0, -1.0, 1e-60, 1e-40, 1e39, float("inf"), float("nan")])
def test_a_q_scalar_that_is_not_a_positive_number_is_rejected(q_scalar):
    with pytest.raises(UserError, match="q_scalar must be a normal fp32 number above 0"):
        Encoding(format=NVFP4, q_scalar=q_scalar)


def test_four_over_six_requires_nvfp4_and_only_its_plain_form_has_kernels():
    assert Encoding(format=NVFP4, four_over_six=True).has_kernels
    assert Encoding(format=NVFP4, is_stochastic=True).has_kernels
    for others in (
        {"format": NVFP4, "is_stochastic": True},
        {"format": NVFP4, "four_over_six_max": 448.0},
        {"format": NVFP4_TILED},
    ):
        assert not Encoding(four_over_six=True, **others).has_kernels
    for format, rounding in ((MXFP4, "up"), (FP32_BLOCKS, "nearest")):
        with pytest.raises(UserError, match="four-over-six needs NVFP4"):
            Encoding(format=format, scale_rounding=rounding, four_over_six=True)


def test_row_scales_must_be_powers_of_two():
    by_row = replace(NVFP4, has_row_scales=True)
    assert Encoding(format=by_row, is_power_of_two=True).format.has_row_scales
    with pytest.raises(UserError, match="token_scale needs powers of two"):
        Encoding(format=by_row)
