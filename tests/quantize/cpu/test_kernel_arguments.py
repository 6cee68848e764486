import ctypes
import re
from pathlib import Path

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.formats.block_format import MIXED_INT8, MXFP4, NVFP4, BlockFormat
from megalowbit.formats.element import E3M2, E4M3, E5M2, INT4, INT8
from megalowbit.quantize.cpu import kernel_arguments
from megalowbit.quantize.cpu.kernel_arguments import KernelArguments, address, arguments_of

QUANTIZE = Path(kernel_arguments.__file__).parent


def test_the_job_has_the_fields_of_the_c_struct_in_their_order():
    header = (QUANTIZE / "codes.h").read_text()
    (body,) = re.findall(r"typedef struct \{([^{}]*)\} Args;", header)
    without_comments = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    declared = []
    for declaration in filter(str.strip, without_comments.split(";")):
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+) (.*)", declaration, flags=re.DOTALL).groups()
        for name in names.split(","):
            pointer = "*" in name
            declared.append((name.strip(" *\n"), "pointer" if pointer else kind))
    kinds = {
        ctypes.c_void_p: "pointer",
        ctypes.c_int64: "int64_t",
        ctypes.c_uint64: "uint64_t",
        ctypes.c_double: "double",
    }
    assert [(name, kinds[kind]) for name, kind in KernelArguments._fields_] == declared


def test_elements_are_numbered_as_in_c():
    header = (QUANTIZE / "elements.h").read_text()
    names = re.search(r"enum \{ (INT4[^}]*) \}", header)[1].split(", ")
    by_name = {each.name: number for each, number in kernel_arguments.ELEMENTS.items()}
    assert [by_name[name.lower().rpartition("_")[2]] for name in names] == list(range(len(names)))
    assert by_name["int8_e5m2"] == by_name["int8"]


@pytest.mark.parametrize(
    ("format", "kind", "block"),
    [
        (NVFP4, 0, (1, 16)),
        (MXFP4, 1, (1, 32)),
        (BlockFormat(element=E4M3, block=None, scale="fp32"), 2, (1, 16)),
        (BlockFormat(element=E3M2, block=(16, 16), scale="fp32"), 3, (16, 16)),
        (MIXED_INT8, 4, (1, 128)),
    ],
    ids=str,
)
def test_a_job_says_which_scales_a_format_has(format, kind, block):
    x = torch.ones(3, 40, dtype=torch.bfloat16).t()
    arguments = arguments_of(x, None, format)
    assert (arguments.scale_kind, arguments.block_rows, arguments.block_cols) == (kind, *block)
    assert (arguments.rows, arguments.cols, arguments.row_stride, arguments.col_stride, arguments.dtype) == (
        40,
        3,
        1,
        40,
        1,
    )
    assert arguments.operand is None


def test_every_element_under_fp32_scales_has_its_number():
    formats = [BlockFormat(element=each, block=None, scale="fp32") for each in (INT4, INT8, E4M3, E5M2)]
    numbers = {arguments_of(torch.ones(1, 1), None, format).element for format in formats}
    assert len(numbers) == len(formats)


def test_a_tensor_whose_storage_was_freed_has_no_address():
    x = torch.ones(4, 4)
    assert address(x) == x.data_ptr()
    assert address(None) is None
    x.untyped_storage().resize_(0)
    with pytest.raises(UserError, match=r"a tensor of \(4, 4\) has no memory: .* gather it first"):
        address(x)
