from pathlib import Path

import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = Path(__file__).parent.parent / "triton_fp8.py"
GROUPS = ["decode", "rules", "products"]


@pytest.mark.parametrize(
    "group", ["decode", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rules", "products"))]
)
def test_fp8_operands_and_products_are_exact_in_the_interpreter(group):
    compare_in_a_process("cpu", group, str(PROGRAM), TRITON_INTERPRET="1")


@pytest.mark.slow
def test_operands_and_exponents_are_those_of_the_reference_in_the_interpreter():
    compare_in_a_process("cpu", "fp8", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_fp8_operands_and_products_are_exact_on_a_gpu(group):
    compare_in_a_process("cuda", group, str(PROGRAM))


@pytest.mark.gpu
def test_operands_and_exponents_are_those_of_the_reference_on_a_gpu():
    compare_in_a_process("cuda", "fp8")
