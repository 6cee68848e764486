import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

GROUPS = ["loops", "given_maxima"]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_numbers_equal_python_loops_and_extreme_maxima_the_reference_in_the_interpreter(group):
    compare_in_a_process("cpu", group, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_numbers_equal_python_loops_and_extreme_maxima_the_reference_on_a_gpu(group):
    compare_in_a_process("cuda", group)
