import pytest
import torch

from megalowbit.formats.block_format import MIXED_INT8, MXFP4, NVFP4, NVFP4_TILED, BlockFormat
from megalowbit.formats.element import E4M3
from megalowbit.quantize.encoding import EncodeRequest, Encoding, new_encoded
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.triton import launch_arguments as job

ONE_SCALE = BlockFormat(element=E4M3, block=None, scale="fp32")


def test_a_key_becomes_two_signed_words_and_the_step_a_tensor():
    for step, held in ((2**33 + 2**31, 2**33 + 2**31), (2**63 + 1, 1 - 2**63)):
        found = job.random_arguments(RandomKey(2**63 + 5, step), torch.device("cpu"))
        assert (found["step"].tolist(), found["step"].dtype) == ([held, 0], torch.int64)
        assert {**found, "step": 0} == {"key_low": 5, "key_high": -(2**31), "step": 0, "lag": 0}


@pytest.mark.parametrize("format", [NVFP4, NVFP4_TILED, MXFP4, MIXED_INT8, ONE_SCALE], ids=str)
@pytest.mark.parametrize("is_turned", [False, True])
def test_tiles_hold_whole_blocks_and_cover_the_padded_matrix(format, is_turned):
    x = torch.zeros(300, 37).t() if is_turned else torch.zeros(37, 300)
    rounding = "up" if format is MXFP4 else "nearest"
    arguments, programs = job.reading(
        EncodeRequest(x, Encoding(format=format, scale_rounding=rounding)), tall_rows=64
    )
    rows, cols = arguments["TILE_ROWS"], arguments["TILE_GROUPS"] * 16
    block_rows, block_cols = format.block or (1, 16)
    assert rows % block_rows == 0
    assert cols % block_cols == 0
    across = -(-format.padded(37, 300)[1] // cols)
    down = -(-37 // rows)
    assert programs == across * down
    assert (rows == 64) == is_turned
    assert (arguments["row_stride"], arguments["col_stride"]) == x.stride()


@pytest.mark.parametrize("is_turned", [False, True])
def test_with_counts_a_tile_is_smaller_and_has_whole_blocks(is_turned):
    x = torch.zeros(300, 37).t() if is_turned else torch.zeros(37, 300)
    for format in (NVFP4, NVFP4_TILED, MIXED_INT8, ONE_SCALE):
        request = EncodeRequest(x, Encoding(format=format), with_counts=True)
        arguments, programs = job.reading(request, tall_rows=256)
        rows, cols = arguments["TILE_ROWS"], 16 * arguments["TILE_GROUPS"]
        assert rows * cols == 2048
        assert programs == -(-format.padded(37, 300)[1] // cols) * -(-37 // rows)
        block_rows, block_cols = format.block or (1, 16)
        assert rows % block_rows == cols % block_cols == 0


def test_a_transposed_result_is_written_column_by_column():
    out = torch.zeros(5, 7, dtype=torch.bfloat16)
    assert job.writing(out, transpose=False) | {"out": 0} == {"out": 0, "row_stride": 7, "col_stride": 1}
    assert job.writing(out, transpose=True) | {"out": 0} == {"out": 0, "row_stride": 1, "col_stride": 7}


def test_numbers_go_to_the_kernels_as_they_know_them_and_share_memory():
    for dtype, stored in (
        (torch.bfloat16, torch.int16),
        (torch.float8_e5m2, torch.uint8),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ):
        x = torch.ones(3, 4).to(dtype)
        assert job.as_stored(x).dtype == stored
        assert job.as_stored(x).data_ptr() == x.data_ptr()


def test_words_hold_the_codes_in_order_wherever_they_lie_in_memory():
    codes = torch.arange(33, dtype=torch.uint8)
    for part in (codes[:32].view(2, 16), codes[1:].view(2, 16)):
        words = job.as_words(part)
        assert words.dtype == torch.int32
        assert words.data_ptr() % 4 == 0
        expected = [
            [int.from_bytes(bytes(row[i : i + 4]), "little") for i in (0, 4, 8, 12)] for row in part.tolist()
        ]
        assert words.tolist() == expected


def test_the_counts_of_programs_are_added_up_beyond_32_bits():
    request = EncodeRequest(torch.zeros(7, 80), Encoding(format=NVFP4), with_counts=True)
    partial = job.partial_counts(request, 3)
    partial[0].fill_(2**30)
    partial[1].fill_(0.5)
    encoded = job.with_counts(new_encoded(request), partial)
    assert encoded.counts.tolist() == [3 * 2**30] * 8
    assert encoded.error.tolist() == [1.5, 1.5]
    partial = job.partial_counts(request._replace(with_counts=False), 3)
    assert partial == (None, None)
    assert job.with_counts(new_encoded(request), partial).counts is None
