import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

GROUPS = ["decode", "fp8"]


@pytest.mark.parametrize("group", ["decode", pytest.param("fp8", marks=pytest.mark.slow)])
def test_decoding_gives_exact_operands_in_the_interpreter(group):
    compare_in_a_process("cpu", group, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_decoding_gives_exact_operands_on_a_gpu(group):
    compare_in_a_process("cuda", group)
