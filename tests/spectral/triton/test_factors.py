from pathlib import Path

import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = Path(__file__).parent.parent / "triton_factors.py"
SLOW = ["rows", "many", "order", "factors", "dependent"]
FAST = ["codes"]


@pytest.mark.parametrize(
    "group",
    [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_factors_are_those_of_torch_in_the_interpreter(group):
    compare_in_a_process("cpu", group, str(PROGRAM), TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [*FAST, *SLOW])
def test_factors_are_those_of_torch_on_a_gpu(group):
    compare_in_a_process("cuda", group, str(PROGRAM))
