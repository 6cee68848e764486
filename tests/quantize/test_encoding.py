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


def test_four_over_six_requires_nvfp4_blocks_and_nearest_rounding():
    assert Encoding(format=NVFP4, four_over_six=True).four_over_six
    for format, rounding in ((NVFP4_TILED, "nearest"), (MXFP4, "up"), (FP32_BLOCKS, "nearest")):
        with pytest.raises(UserError, match="1 × 16"):
            Encoding(format=format, scale_rounding=rounding, four_over_six=True)
    with pytest.raises(UserError, match="nosr"):
        Encoding(format=NVFP4, four_over_six=True, is_stochastic=True)
