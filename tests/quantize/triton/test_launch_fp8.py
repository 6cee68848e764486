import subprocess
import sys

import pytest
import torch

from benchmarks.kernels.launches import Fp8Request, ProductRequest, captured
from megalowbit.quantize.encoding import DEPTH, E4M3, E5M2, SHIFT
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.triton import launch_fp8
from megalowbit.quantize.triton.launch_fp8 import Fp8Side


def mxfp4(rows, cols):
    return quantizer("mxfp4e2m1bnosr").quantize(torch.zeros(rows, cols), with_exponents=True)


def side(rows, cols, dtype, transpose):
    tensor = mxfp4(rows, cols)
    return Fp8Side(tensor.codes, tensor.scales, tensor.exponents, (rows, cols), dtype, transpose)


def launch_of(request):
    pytest.importorskip("triton", reason="Triton is not installed")
    (launch,) = captured({"request": request})
    return launch


@pytest.mark.parametrize("transpose", [False, True])
def test_a_matrix_is_decoded_by_programs_that_cover_it_and_written_contiguously(transpose):
    tensor = mxfp4(80, 300)
    request = Fp8Request(tensor.codes, tensor.scales, tensor.exponents, 80, 300, E5M2, transpose)
    launch = launch_of(request)
    rows, words = launch.arguments["TILE_ROWS"], launch.arguments["TILE_WORDS"]
    assert launch.programs == -(-80 // rows) * -(-320 // (8 * words))
    assert (launch.arguments["row_stride"], launch.arguments["col_stride"]) == (
        (1, 80) if transpose else (300, 1)
    )
    assert (launch.arguments["SHIFT"], launch.arguments["REACH"]) == (SHIFT[E5M2], DEPTH[E5M2])
    assert launch.arguments["exponents"] is tensor.exponents  # stays where it is


@pytest.mark.parametrize(("m", "n", "programs"), [(48, 32, 1), (80, 144, 10), (8192, 8192, 528)])
@pytest.mark.parametrize("transposes", [(False, True), (True, False)])
def test_a_product_has_a_program_for_each_tile_up_to_a_limit(m, n, programs, transposes):
    shapes = [(32, m) if transposes[0] else (m, 32), (n, 32) if transposes[1] else (32, n)]
    sides = map(side, *zip(*shapes, strict=True), (E5M2, E4M3), transposes)
    out, counts = torch.empty(m, n, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    launch = launch_of(ProductRequest(out, *sides, counts))
    assert launch.programs == programs <= launch_fp8.PROGRAMS
    arguments = launch.arguments
    assert [arguments[size] for size in "mnk"] == [m, n, 32]
    assert (arguments["LEFT_TRANSPOSED"], arguments["RIGHT_TRANSPOSED"]) == transposes
    assert (arguments["LEFT_REACH"], arguments["RIGHT_REACH"]) == (DEPTH[E5M2], DEPTH[E4M3])
    assert arguments["out"].data_ptr() == out.data_ptr()
    assert arguments["counts"] is counts


@pytest.mark.slow
def test_importing_the_launcher_does_not_import_triton():
    code = "import sys; from megalowbit.quantize.triton import launch_fp8; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
