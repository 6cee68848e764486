from pathlib import Path

import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent.parent
PROGRAM = str(HERE / "triton_8bit_comparison.py")
GROUPS = ["blocks", "one_scale", "mixed", "numbers", "decoding"]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_8_bit_formats_have_the_bits_of_the_reference_in_the_interpreter(group):
    compare_in_a_process("cpu", group, PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_8_bit_formats_have_the_bits_of_the_reference_on_a_gpu(group):
    compare_in_a_process("cuda", group, PROGRAM)
