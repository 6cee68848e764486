"""Products of MXFP4 operands on FP8 tensor cores, without a second rounding.

How it works. An MXFP4 number is an E2M1 element times its block's power of two 2^e. FP8 tensor cores have no
block scales, so each operand is rewritten as FP8 numbers under *one* power of two for the whole tensor:

    FP8 number = element · 2^(e − e_max + shift)        tensor factor = 2^(e_max − shift)

This is exact if the block exponents e lie close enough together. E4M3 holds exponents up to 14 below the
largest (shift 6: numbers from 384 down to 2⁻⁹), E5M2 up to 28 (shift 13). Blocks of zeros do not count.

A product runs in FP8 if

- both operands fit, and not both need E5M2 (the hardware has no such product),
- all sizes are multiples of 16,
- the tensor factors and their product are normal fp32 numbers.

Otherwise `multiply` returns `None`, and the layer multiplies in bf16 and counts that.

Layouts. `torch._scaled_mm(a, b)` takes a (m, k) row-major and b (k, n) *column-major*, that is strides (1,
k). Both therefore have the summed axis contiguous. `decode_fp8` writes row-major matrices, so a is decoded as
(m, k), and b as (n, k) and passed as its transpose, a view:

    product        a, decoded from              b.t(), decoded from
    output         input (M, K)                 weight (N, K)
    grad_input     grad_output (M, N)           weight, transposed to (K, N)
    grad_weight    grad_output, to (N, M)       input, transposed to (K, M)

That is the stored order for `output` and a transposing decode where another axis is summed over. (With the
layout `per_gemm` the stored operands of backward are transposed already.)

Dtypes. Operands are E4M3 or E5M2 with an fp32 factor each, 0-dim on the device. The result has the dtype
of the output or gradient; with a bias it is fp32 first. Operands are kept for backward as
MXFP4, 4.25 bits an element.

Cost. The spread of the exponents decides which kernel to launch, so the host reads it and waits for the
device: once in forward, once in backward, if the sizes allow FP8.

Operands are exact, but sums need not be. Hopper's tensor cores are reported to keep about 14 bits while
adding up FP8 products; a remedy is to add partial sums in fp32 every 128 elements (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2). `use_fast_accum=False` asks PyTorch for its more exact sums. The remaining
error on a GPU has not been measured here; a test on accumulation measures it if there is a GPU and is skipped
otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalowbit.errors import UserError
from megalowbit.layers.matmul.gemms import finish, no_autocast
from megalowbit.layers.matmul.operand import ExponentRange, MatmulOperand
from megalowbit.quantize import backends
from megalowbit.quantize.encoding import DEPTH, E4M3, E5M2, SHIFT
from megalowbit.quantize.quantized_tensor import QuantizedTensor, matrix_shape

SIZE_MULTIPLE = 16
_NAN, _BIAS = 255, 127  # E8M0 codes: NaN, and the code of 2^0
_HIGHEST = _BIAS + 125  # above it an element may decode to infinity in bf16, see `gemms`
_NONE = ExponentRange(lowest=_BIAS, highest=_BIAS)  # for a tensor of zeros


def why_unavailable(device: torch.device) -> str | None:
    """Why a device cannot multiply FP8 matrices; `None` if it can."""
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return "FP8 needs compute capability 8.9 (Ada, Hopper) or later"
    return None if device.type in ("cpu", "cuda") else "PyTorch multiplies FP8 matrices on CPU and CUDA only"


def measure(*operands: MatmulOperand) -> None:
    """Find the exponent ranges of MXFP4 operands that have none yet, with one host read for all."""
    unknown = [
        operand
        for operand in {id(each): each for each in operands}.values()
        if operand.exponents is None and _is_mxfp4(operand)
    ]
    if not unknown:
        return
    found = torch.stack([end for operand in unknown for end in _exponent_ends(operand)]).tolist()
    for operand, lowest, highest in zip(unknown, found[::2], found[1::2], strict=True):
        operand.exponents = ExponentRange(lowest=lowest, highest=highest) if highest >= 0 else _NONE


def measure_products(*products: tuple[MatmulOperand | None, MatmulOperand | None]) -> None:
    """Measure both operands of each coming product in one host read; skip pairs with a `None`."""
    wanted: list[MatmulOperand] = []
    for left, right in products:
        if left is not None and right is not None and _may_fit(left, right):
            wanted += (left, right)
    measure(*wanted)


def _may_fit(left: MatmulOperand, right: MatmulOperand) -> bool:
    """Whether formats and sizes allow FP8; the exponents may still rule it out."""
    sizes = (*matrix_shape(left.tensor.shape), *matrix_shape(right.tensor.shape))
    is_fake = isinstance(left.tensor.codes, FakeTensor)  # a memory estimate: no exponents to read
    fits = not is_fake and _is_mxfp4(left) and _is_mxfp4(right)
    return fits and all(n > 0 and n % SIZE_MULTIPLE == 0 for n in sizes)


def _is_mxfp4(operand: MatmulOperand) -> bool:
    tensor = operand.tensor
    return isinstance(tensor, QuantizedTensor) and tensor.format.scale == "e8m0"


def _exponent_ends(operand: MatmulOperand) -> tuple[Tensor, Tensor]:
    """Lowest and highest exponent code of non-zero blocks, 0-dim int64; -1 as highest if there are none."""
    codes, scales = operand.tensor.codes, operand.tensor.scales
    assert codes is not None, "MXFP4"
    assert scales is not None, "MXFP4"
    if codes.numel() == 0:
        nothing = torch.tensor([_NAN, -1], dtype=torch.int64, device=codes.device)
        return nothing[0], nothing[1]
    exponents = scales.view(torch.uint8).to(torch.int64)  # (rows, blocks), E8M0 codes
    # codes is (rows, blocks · 16), two 4-bit codes a byte; 0x77 clears both sign bits
    magnitudes = (codes & 0x77).unflatten(1, (exponents.shape[1], -1))  # (rows, blocks, 16)
    counts = magnitudes.amax(2).ne(0) & (exponents != _NAN)
    return torch.where(counts, exponents, _NAN).amin(), torch.where(counts, exponents, -1).amax()


def dtype_for(exponents: ExponentRange) -> torch.dtype | None:
    """The FP8 dtype that holds all elements exactly: E4M3 if possible, E5M2, or `None`."""
    spread = exponents.highest - exponents.lowest
    return next((dtype for dtype in (E4M3, E5M2) if spread <= DEPTH[dtype]), None)


def decode_fp8(operand: MatmulOperand, dtype: torch.dtype, *, transpose: bool = False) -> Tensor:
    """Decode a measured MXFP4 operand to FP8; times 2^`scale_exponent` this is the decoded matrix.

    `dtype` is what `dtype_for` returned. The result is (rows, cols) of the stored matrix, or (cols, rows)
    with `transpose`. It is row-major in both cases: the transpose is written out, not a view.
    """
    tensor, exponents = operand.tensor, operand.exponents
    assert isinstance(tensor, QuantizedTensor)
    assert exponents is not None, "measure the operand first"
    rows, cols = matrix_shape(tensor.shape)
    if backends.backend_of(tensor.codes) == "triton":
        from megalowbit.quantize.triton.launch_fp4 import decode_fp8 as decode_on_gpu

        return decode_on_gpu(tensor.codes, tensor.scales, rows, cols, dtype=dtype, transpose=transpose)[0]
    depth, codes = DEPTH[dtype], tensor.codes
    # Each block selects a row of the table by how far its exponent is below the largest one.
    stored = tensor.scales.view(torch.uint8).to(torch.int32)  # (rows, blocks)
    row = (stored - (exponents.highest - depth)).clamp(0, depth).masked_fill(stored == _NAN, depth + 1)
    words = codes.unflatten(1, (row.shape[1], -1)).to(torch.int32)  # (rows, blocks, 16) bytes, two codes each
    pairs = _table(tensor, dtype)[words + row.unsqueeze(2) * 256]  # the same shape, two FP8 numbers each
    matrix = pairs.flatten(1).view(torch.uint8)[:, :cols]  # the last block may reach beyond cols
    return (matrix.t() if transpose else matrix).contiguous().view(dtype)


def _table(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Lookup table (depth + 2) · 256 of int16: a byte of two codes → two FP8 numbers.

    Row i belongs to block exponents depth − i below the largest; the last row is NaN.
    """
    depth, shift = DEPTH[dtype], SHIFT[dtype]
    powers = [2.0 ** (exponent - depth + shift) for exponent in range(depth + 1)]
    rows = torch.tensor([*powers, math.nan], dtype=torch.float32, device="cpu")
    values = torch.tensor(tensor.format.element.code_values(), dtype=torch.float32, device="cpu")
    numbers = torch.outer(rows, values).to(dtype).view(torch.uint8)
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([numbers[:, byte & 15], numbers[:, byte >> 4]], dim=2)
    return pairs.flatten(1).view(torch.int16).flatten().to(tensor.codes.device)


def scale_exponent(exponents: ExponentRange, dtype: torch.dtype) -> int:
    """The exponent of the power of two by which a tensor's FP8 numbers are multiplied."""
    return exponents.highest - _BIAS - SHIFT[dtype]


def multiply(
    left: MatmulOperand,
    right: MatmulOperand,
    *,
    transpose_left: bool,
    transpose_right: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Multiply in FP8, with the arguments of `gemms.multiply`; `None` if not exact or if sizes do not fit.

    `transpose_left` and `transpose_right` refer to the stored matrices.

    Raises:
        UserError: the device has no FP8.
    """
    codes = left.tensor.codes
    if codes is None or isinstance(codes, FakeTensor):
        return None
    device = codes.device
    reason = why_unavailable(device)
    if reason is not None:  # checked before the sizes: a run must not end up all in bf16 without an error
        raise UserError(f'gemm "fp8" cannot run on {device}: {reason}; set gemm to "bf16" in the recipe')
    if not _may_fit(left, right):
        return None
    measure(left, right)
    chosen = _choose(left, right)
    if chosen is None:
        return None
    a = decode_fp8(left, chosen[0], transpose=transpose_left)  # (m, k) row-major
    # _scaled_mm needs its second operand (k, n) column-major, so decode (n, k) row-major and pass the
    # transposed view. For `output` the stored weight is (N, K) already and is not transposed.
    b = decode_fp8(right, chosen[1], transpose=not transpose_right).t()
    scales = [_scale(operand, dtype) for operand, dtype in zip((left, right), chosen, strict=True)]
    with no_autocast(device.type):
        product = torch._scaled_mm(
            a,
            b,
            scale_a=scales[0],
            scale_b=scales[1],
            out_dtype=torch.float32 if bias is not None else out_dtype,  # `finish` adds the bias in fp32
            use_fast_accum=False,
        )
        return finish(product, None, bias, out_dtype)


def _scale(operand: MatmulOperand, dtype: torch.dtype) -> Tensor:
    """The factor of a measured operand's FP8 numbers, 0-dim fp32."""
    scale, codes = 2.0 ** scale_exponent(operand.exponents or _NONE, dtype), operand.tensor.codes
    assert codes is not None, "MXFP4"
    return torch.full((), scale, dtype=torch.float32, device=codes.device)


def _choose(left: MatmulOperand, right: MatmulOperand) -> tuple[torch.dtype, torch.dtype] | None:
    """FP8 dtypes of both operands, which have been measured; `None` if the product has to run in bf16."""
    assert left.exponents is not None, "measure the operand first"
    assert right.exponents is not None, "measure the operand first"
    dtypes = dtype_for(left.exponents), dtype_for(right.exponents)
    if dtypes[0] is None or dtypes[1] is None or dtypes == (E5M2, E5M2):
        return None
    ends = [scale_exponent(left.exponents, dtypes[0]), scale_exponent(right.exponents, dtypes[1])]
    is_normal = all(-126 <= end <= 127 for end in (*ends, sum(ends)))
    is_finite = max(left.exponents.highest, right.exponents.highest) <= _HIGHEST
    return (dtypes[0], dtypes[1]) if is_normal and is_finite else None
