"""Default dtype and default device are the user's: no bit may depend on them, nor any table that is kept."""

import os

import pytest
from forks import run_script

SCRIPT = """
import contextlib, sys, zlib, ctypes
import torch
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.seed_compat import SEED_COMPAT
x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
default = sys.argv[1]
surroundings = torch.device("meta") if "meta" in default else contextlib.nullcontext()
if default != "meta":
    torch.set_default_dtype(getattr(torch, default.removesuffix(", meta")))
names = [*quantizer_names(), "fp8e4m3b:sr", "nvfp4e2m1bnosr:4over6", "nvfp4e2m1b:unbiased:tile16"]
names += [f"{name}:seed_compat" for name in SEED_COMPAT]
def crc(*parts):
    total = 0
    for part in parts:
        if part is not None:
            assert part.device.type == "cpu", part.device
            part = part.contiguous()
            total = zlib.crc32(ctypes.string_at(part.data_ptr(), part.nbytes), total)
    return total
for name in names:
    with surroundings:
        one = quantizer(name)
        got = one.quantize(x, random_key=RandomKey(3), with_counts=True)
        parts = [got.codes, got.scales, got.tensor_scale, got.counts, got.error]
        parts += [got.dequantize(), got.operand()]
        empty = one.quantize(x[:0], with_counts=True)
        parts += [empty.tensor_scale, empty.counts, empty.error, empty.operand()]
        if hasattr(one, "quantize_transposed"):
            turned = one.quantize_transposed(x, signs=0x5A3C, random_key=RandomKey(4))
            parts += [turned.codes, turned.scales, turned.operand()]
    print(name, crc(*parts))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """`answers(default, backend)`: what a process with this default prints."""
    script = tmp_path_factory.mktemp("defaults") / "checksums.py"
    script.write_text(SCRIPT)

    def run(default, backend):
        done = run_script(script, default, env={**os.environ, "MEGALOWBIT_BACKEND": backend})
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("backend", "defaults"),
    [
        ("", ("float64, meta",)),
        pytest.param("", ("float64", "bfloat16", "float16", "meta"), marks=pytest.mark.slow),
        pytest.param("torch", ("float64", "bfloat16", "float16", "meta"), marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_default_dtype_or_device(answers, backend, defaults):
    expected = answers("float32", backend)
    assert expected.count("\n") > 25
    for default in defaults:
        assert answers(default, backend) == expected, default
