from pathlib import Path

import pytest
import torch
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.kernels.counting import GPU, counting
from megalowbit.spectral.triton import launch_residual

PROGRAM = Path(__file__).parent.parent / "triton_factors.py"


@pytest.mark.parametrize(
    ("dtype", "rank", "is_covered"),
    [(torch.bfloat16, 60, True), (torch.bfloat16, 65, False), (torch.float16, 60, False)],
)
def test_the_kernel_takes_what_the_factors_kernels_take(dtype, rank, is_covered):
    with counting():
        shapes = (256, 128), (256, rank), (rank, 128)
        matrices = [torch.empty(each, dtype=dtype, device=GPU) for each in shapes]
        assert launch_residual.covers(*matrices) == is_covered
        for which in range(3):
            mixed = [each.float() if number == which else each for number, each in enumerate(matrices)]
            assert not launch_residual.covers(*mixed)


def test_a_residual_reads_its_matrix_once_and_writes_it_once():
    with counting() as gpu:
        shapes = (256, 128), (256, 60), (60, 128)
        launch_residual.residual(*(torch.empty(each, dtype=torch.bfloat16, device=GPU) for each in shapes))
    assert [each.name for each in gpu.kernels] == ["zeros", "factors.residual_kernel"]
    assert gpu.kernels[1].bytes == 2 * (2 * 256 * 128 + (256 + 128) * 60) + 4


def test_memory_that_is_cleared_already_is_not_filled_again():
    with counting() as gpu:
        shapes = (256, 128), (256, 60), (60, 128)
        matrices = (torch.empty(each, dtype=torch.bfloat16, device=GPU) for each in shapes)
        cleared = torch.empty((), dtype=torch.float32, device=GPU)
        assert launch_residual.residual(*matrices, cleared).amax is cleared
    assert [each.name for each in gpu.kernels] == ["factors.residual_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("group", ["residual", "split"])
def test_residuals_and_their_maxima_are_exact_in_the_interpreter(group):
    compare_in_a_process("cpu", group, str(PROGRAM), TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["residual", "split"])
def test_residuals_and_their_maxima_are_exact_on_a_gpu(group):
    compare_in_a_process("cuda", group, str(PROGRAM))
