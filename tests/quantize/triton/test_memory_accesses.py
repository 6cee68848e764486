from pathlib import Path

import pytest
from triton_comparison import compare_in_a_process

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = Path(__file__).parent.parent / "triton_memory.py"
ROOT = PROGRAM.parents[2]
GROUPS = ["small", *(pytest.param(group, marks=pytest.mark.slow) for group in ("planted", "far", "every"))]


@pytest.mark.parametrize("group", GROUPS)
def test_programs_touch_only_their_tensors_and_no_address_of_another_program(group):
    compare_in_a_process("cpu", group, str(PROGRAM), TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
