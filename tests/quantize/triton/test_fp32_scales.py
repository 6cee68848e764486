import os
import subprocess
import sys
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


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_with_every_operation_rounded_in_place(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(HERE / "triton_8bit_compiling.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.split()
    assert [names.count(f"{name}_kernel") for name in ("amax", "encode", "decode")] == [1, 7, 8]
