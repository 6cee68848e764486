import pytest
from quick_cases import slow_except
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

GROUPS = ["nearest", "stochastic", "tiled", "tiled_stochastic", "mxfp4", "four_over_six", "power_of_two"]


@pytest.mark.parametrize("group", slow_except(["few"], ["few", *GROUPS]))
def test_encoding_gives_the_bits_of_the_reference_in_the_interpreter(group):
    compare_in_a_process("cpu", group, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_encoding_gives_the_bits_of_the_reference_on_a_gpu(group):
    compare_in_a_process("cuda", group)
