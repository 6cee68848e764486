"""Compile the Triton kernels of 8-bit formats as for a Hopper GPU: `python triton_8bit_compiling.py`.

The launcher's own arguments are taken where it would launch, so that no GPU is needed. What is checked beyond
"it compiles" is what equal bits rest on: nothing is flushed to zero, fused or approximated.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megalowbit.formats.block_format import MIXED_INT8, BlockFormat
from megalowbit.formats.element import E4M3, INT4, INT8
from megalowbit.quantize.encoding import DecodeRequest, EncodeRequest, Encoding
from megalowbit.quantize.triton import launch_arguments
from megalowbit.quantize.triton import launch_fp32_scales as launch_triton_8bit

HOPPER = GPUTarget("cuda", 90, 32)
INEXACT = re.compile(r"\.ftz|fma\.rn\.f32|\.approx|div\.full")
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int16: "*i16",
}
INT8_TENSOR = BlockFormat(element=INT8, block=None, scale="fp32")
E4M3_BLOCKS = BlockFormat(element=E4M3, block=(1, 16), scale="fp32")
INT4_BLOCKS = BlockFormat(element=INT4, block=(1, 32), scale="fp32")


def source_of(kernel, arguments):
    """A kernel specialised as Triton does it at a launch."""
    assert set(kernel.arg_names) == set(arguments), kernel
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        is_fixed = parameter.is_constexpr or value is None
        if is_fixed or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = TYPES[value.dtype] if is_tensor else {int: "i32", float: "fp32"}[type(value)]
        number = value.data_ptr() if is_tensor else value
        if isinstance(number, int) and number % 16 == 0 and not parameter.do_not_specialize:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compile_instead(kernel, programs, device, **arguments):
    assert programs > 0
    compiled = triton.compile(source_of(kernel, arguments), HOPPER, {"enable_fp_fusion": False})
    assert compiled.asm["cubin"]
    found = INEXACT.search(compiled.asm["ptx"])
    assert not found, (kernel, found)
    names.append(kernel.__name__)


def main():
    launch_triton_8bit.launch = launch_arguments.launch = compile_instead  # of encoding and of decoding
    x, everything = torch.zeros(64, 256), {"operand_dtype": torch.bfloat16, "with_counts": True}
    for request in (
        EncodeRequest(x.bfloat16(), Encoding(format=INT8_TENSOR)),
        EncodeRequest(x.half(), Encoding(format=INT8_TENSOR), tensor_amax=torch.ones(()), **everything),
        EncodeRequest(x.t(), Encoding(format=E4M3_BLOCKS, is_stochastic=True), operand_dtype=torch.float16),
        EncodeRequest(x.bfloat16(), Encoding(format=INT4_BLOCKS), signs=1, operand_dtype=torch.float32),
        EncodeRequest(x.bfloat16(), Encoding(format=MIXED_INT8)),
        EncodeRequest(x.bfloat16().t(), Encoding(format=MIXED_INT8, is_stochastic=True), **everything),
    ):
        launch_triton_8bit.encode(request)
    for format in (INT8_TENSOR, E4M3_BLOCKS, INT4_BLOCKS, MIXED_INT8):
        codes = torch.zeros(format.codes_shape(64, 256), dtype=torch.uint8)
        scales = torch.zeros(format.scales_shape(64, 256))
        for dtype, transpose in ((torch.bfloat16, True), (torch.float16, False)):
            launch_triton_8bit.decode(DecodeRequest(codes, scales, format, 64, 256, dtype, transpose))
    print(*names)


if __name__ == "__main__":
    names = []
    main()
