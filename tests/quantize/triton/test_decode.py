import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
def test_decoding_gives_exact_operands_in_the_interpreter():
    compare_in_a_process("cpu", "decode", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_decoding_gives_exact_operands_on_a_gpu():
    compare_in_a_process("cuda", "decode")
