import pytest

from megalowbit.formats.block_format import MIXED_INT8, MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.formats.element import E2M1, E3M2, INT8, TERNARY


def fp32_scaled(element, block):
    return BlockFormat(element=element, block=block, scale="fp32")


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        (NVFP4, 4.5),
        (NVFP4_TILED, 4 + 8 / 256),
        (MXFP4, 4.25),
        (fp32_scaled(E2M1, (1, 16)), 6),
        (fp32_scaled(E2M1, None), 4),
        (fp32_scaled(E3M2, (1, 16)), 8),
        (fp32_scaled(TERNARY, None), 2),
        (MIXED_INT8, 8.25),
    ],
)
def test_bits_per_element_are_code_and_share_of_the_scale(format, bits):
    assert format.bits_per_element == bits


@pytest.mark.parametrize(
    ("format", "padded", "scales", "codes"),
    [
        (NVFP4, (3, 32), (3, 2), (3, 16)),
        (NVFP4_TILED, (16, 32), (1, 2), (3, 16)),
        (MXFP4, (3, 32), (3, 1), (3, 16)),
        (fp32_scaled(INT8, None), (3, 32), (0, 0), (3, 32)),
        (fp32_scaled(E3M2, (1, 32)), (3, 32), (3, 1), (3, 24)),
        (fp32_scaled(TERNARY, None), (3, 32), (0, 0), (3, 8)),
        (MIXED_INT8, (3, 128), (3, 1), (3, 128)),
    ],
)
def test_a_matrix_of_3_by_17_is_padded_to_whole_blocks_and_groups_of_16(format, padded, scales, codes):
    assert format.padded(3, 17) == padded
    assert format.scales_shape(3, 17) == scales
    assert format.codes_shape(3, 17) == codes


@pytest.mark.parametrize("format", [NVFP4, NVFP4_TILED, MXFP4])
def test_an_empty_matrix_has_no_scales_and_no_codes(format):
    for rows, cols in ((0, 17), (5, 0), (0, 0)):
        for shape in (format.scales_shape(rows, cols), format.codes_shape(rows, cols)):
            assert shape[0] * shape[1] == 0
