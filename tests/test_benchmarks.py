"""The benchmarks run, on sizes that take no time, and print the ratios they promise."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_linear_compares_every_recipe_with_a_bf16_layer():
    block = '{"base": "nvfp4", "layout": "per_gemm", "hadamard": true}'
    printed = run("linear.py", "--rounds", "2", "--shape", "64x32x48", "--recipe", "mxfp4", "--recipe", block)
    for name in ("BitLinear mxfp4", "BitLinear nvfp4 with own layout, hadamard"):
        time, memory = (line for line in printed.splitlines() if line.strip().startswith(name))
        assert "× nn.Linear bf16" in time
        assert float(memory.split()[-2]) < 0.3


def test_quantize_compares_with_a_copy_and_with_plain_torch():
    printed = run("quantize.py", "--rounds", "2", "--size", "64")
    for name in ("clone", "nvfp4e2m1b", "mxfp4e2m1bnosr", "decode to bf16", "plain torch, nearest", "int8b"):
        assert any(line.strip().startswith(name) and "GB/s" in line for line in printed.splitlines()), name


def test_a_wrong_argument_is_one_line_of_usage_not_a_traceback():
    for arguments in (["--shape", "512,256"], ["--rounds", "0"], ["--device", "tpu"], ["--recipe", "nvfp5"]):
        done = subprocess.run(
            [sys.executable, "benchmarks/linear.py", *arguments], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert arguments[1] in done.stderr
