import subprocess
import sys

import pytest
import torch

from megalowbit.formats.block_format import MXFP4, NVFP4, BlockFormat
from megalowbit.formats.element import E3M2
from megalowbit.quantize.backends import can_encode
from megalowbit.quantize.encoding import EncodeRequest, Encoding
from megalowbit.quantize.triton import launch_fp4 as launch_triton


def test_a_cpu_without_the_interpreter_has_no_triton_path(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not launch_triton.is_available(torch.device("cpu"))


def test_devices_triton_does_not_know_have_no_triton_path():
    assert not launch_triton.is_available(torch.device("meta"))


def test_only_supported_formats_are_claimed():
    assert can_encode(
        launch_triton,
        EncodeRequest(
            torch.empty(1, 16, dtype=torch.bfloat16), Encoding(format=NVFP4), operand_dtype=torch.float32
        ),
    )
    assert can_encode(
        launch_triton,
        EncodeRequest(torch.empty(1, 16, dtype=torch.float16), Encoding(format=MXFP4, scale_rounding="up")),
    )
    assert not can_encode(
        launch_triton, EncodeRequest(torch.empty(1, 16, dtype=torch.float64), Encoding(format=NVFP4))
    )
    assert not can_encode(
        launch_triton,
        EncodeRequest(
            torch.empty(1, 16, dtype=torch.float32), Encoding(format=NVFP4), operand_dtype=torch.float16
        ),
    )
    assert not launch_triton.covers(BlockFormat(element=E3M2, block=(1, 16), scale="fp32"), torch.float32)


@pytest.mark.slow
def test_importing_the_launcher_does_not_import_triton():
    code = "import sys; from megalowbit.quantize.triton import launch_fp4; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
