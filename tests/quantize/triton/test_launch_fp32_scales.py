import subprocess
import sys

import pytest
import torch

from megalowbit.formats.block_format import MIXED_INT8, MXFP4, NVFP4, BlockFormat
from megalowbit.formats.element import E2M1, E3M2, E4M3, E5M2, INT4, INT8, INT8_E5M2, TERNARY
from megalowbit.quantize import backends
from megalowbit.quantize.backends import can_encode
from megalowbit.quantize.cpu import fp32_scales as kernels_cpu_8bit
from megalowbit.quantize.encoding import EncodeRequest, Encoding
from megalowbit.quantize.triton import launch_fp4 as launch_triton
from megalowbit.quantize.triton import launch_fp32_scales as launch_triton_8bit

INT8_TENSOR = BlockFormat(element=INT8, block=None, scale="fp32")


@pytest.mark.parametrize("element", [INT8, INT4, E2M1, E4M3, E5M2], ids=lambda each: each.name)
@pytest.mark.parametrize("block", [None, (1, 16), (1, 32), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_these_formats_are_claimed_for_every_dtype_and_rounding(element, block, dtype):
    format = BlockFormat(element=element, block=block, scale="fp32")
    assert launch_triton_8bit.is_for(format)
    assert can_encode(
        launch_triton_8bit,
        EncodeRequest(
            torch.empty(1, 16, dtype=dtype),
            Encoding(format=format, is_stochastic=True),
            operand_dtype=torch.float16,
        ),
    )
    assert launch_triton_8bit.covers(format, dtype)


def test_unsupported_inputs_are_reported_before_the_call():
    assert can_encode(
        launch_triton_8bit,
        EncodeRequest(
            torch.empty(1, 16, dtype=torch.bfloat16),
            Encoding(format=MIXED_INT8),
            operand_dtype=torch.bfloat16,
        ),
    )
    assert launch_triton_8bit.covers(
        BlockFormat(element=INT8_E5M2, block=(1, 32), scale="signed_fp32"), torch.float16
    )
    assert not can_encode(
        launch_triton_8bit,
        EncodeRequest(torch.empty(1, 16, dtype=torch.float64), Encoding(format=INT8_TENSOR)),
    )
    assert not can_encode(
        launch_triton_8bit,
        EncodeRequest(
            torch.empty(1, 16, dtype=torch.float32), Encoding(format=INT8_TENSOR), operand_dtype=torch.float64
        ),
    )
    assert not can_encode(
        launch_triton_8bit,
        EncodeRequest(
            torch.empty(1, 16, dtype=torch.float32), Encoding(format=INT8_TENSOR, scale_from="mean")
        ),
    )
    for format in (
        BlockFormat(element=E3M2, block=None, scale="fp32"),
        BlockFormat(element=TERNARY, block=(1, 16), scale="fp32"),
        BlockFormat(element=INT8, block=(1, 256), scale="fp32"),
        BlockFormat(element=INT8, block=(4, 16), scale="fp32"),
        NVFP4,
    ):
        assert not launch_triton_8bit.covers(format, torch.float32)


def test_the_backends_lead_each_format_to_its_own_kernels():
    for format in (NVFP4, MXFP4):
        assert backends._kernels("triton", format) is launch_triton
    for format in (INT8_TENSOR, MIXED_INT8):
        assert backends._kernels("triton", format) is launch_triton_8bit
        assert backends._kernels("c", format) in (kernels_cpu_8bit, None)
        assert backends._kernels("torch", format) is None


@pytest.mark.slow
def test_importing_the_launcher_does_not_import_triton():
    launcher = "megalowbit.quantize.triton.launch_fp32_scales"
    code = f"import sys; import {launcher}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
